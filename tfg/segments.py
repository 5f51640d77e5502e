# SPDX-License-Identifier: BSD-3-Clause
"""segments: when a wrapped stack starts a new tape. Blocks are called one by one; a segment is what shares a tape.

    cursor   how far the current segment of one stack has come, per thread: tape, last position, calls on it

    a new tape starts        every `interval` calls · where the position called is not the one after the last · in another
                             thread · where nothing of the old tape is waiting for backward any more
    the old one is closed    then, at the stack's last block, after `interval` calls, and on any exception

A tape lives as long as autograd's handles need it: forgetting one here, by unwrap or otherwise, is harmless.
Threads: cursors are thread-local, the rest is read only.
"""

import threading

from torch import is_grad_enabled

from ._engine import C


class Cursor:
    __slots__ = ("last", "n_calls", "tape")

    def __init__(self):
        self.tape, self.last, self.n_calls = None, -2, 0

    def begin(self, positions, interval):
        """The tape for the next call, of a block that stands at `positions`; None where nothing can be saved."""
        if not is_grad_enabled():
            self.stop()
            return None
        position, tape = self.last + 1, self.tape
        if tape is None or position not in positions or self.n_calls >= interval or not tape.n_handles:
            self.stop()
            position, tape = positions[0], C.Tape()
            self.tape, self.n_calls = tape, 0
        self.last = position
        self.n_calls += 1
        return tape

    def stop(self):
        """Close the segment; the next call starts a new one."""
        tape, self.tape = self.tape, None
        if tape is not None:
            tape.close()


class ThreadCursor(threading.local):
    """One cursor per thread, under one name: reading a thread-local is dear, so it is read once per call."""

    def __init__(self):
        self.cursor = Cursor()


class Stack:
    """name: the parent's · n_positions: of its children · interval: calls per segment. A copy has a cursor of its own."""

    __slots__ = ("interval", "n_positions", "name", "here")

    def __init__(self, name, n_positions, interval):
        self.name, self.n_positions, self.interval = name, n_positions, interval
        self.here = ThreadCursor()

    def __reduce__(self):
        return Stack, (self.name, self.n_positions, self.interval)


class BlockState:
    """What a wrapped block carries in its __dict__. Never refers to the block; a deep copy gets a key of its own.

    label      the settings as the user gave them, "interval=2", for the report
    positions  where the block stands in its stack, ascending; several for a shared one
    replaced   a forward that was set on the instance before wrap, or None
    """

    __slots__ = ("key", "label", "name", "positions", "replaced", "stack")

    def __init__(self, stack, positions, name, label, replaced=None):
        self.stack, self.positions, self.name, self.label, self.replaced = stack, positions, name, label, replaced
        self.key = C.new_key(name)

    def __reduce__(self):
        return BlockState, (self.stack, self.positions, self.name, self.label, self.replaced)

    def run(self, block, function, args, kwargs):
        """function(*args, **kwargs) as a region of this block, whose module is `block`.

        A block that FSDP manages is a segment of its own: only its parameters are there in its backward.
        """
        stack = self.stack
        is_sharded = "_is_fsdp_managed_module" in block.__dict__
        if stack.interval == 1 or is_sharded:
            return C.run(is_sharded or None, self.key, function, args, kwargs)
        cursor = stack.here.cursor
        tape = cursor.begin(self.positions, stack.interval)
        try:
            result = C.run(tape, self.key, function, args, kwargs)
        except BaseException:
            cursor.stop()
            raise
        if cursor.tape is tape and (cursor.n_calls >= stack.interval or cursor.last + 1 == stack.n_positions):
            cursor.stop()
        return result
