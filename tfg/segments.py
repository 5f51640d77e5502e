# SPDX-License-Identifier: BSD-3-Clause
"""segments: when a wrapped stack starts a new tape. Blocks are called one by one; a segment is what shares a tape.

    cursor   how far the current segment of one stack has come, per thread: tape, last position, calls on it

    a new tape starts        every `interval` calls · where the position called is not the one after the last · in another
                             thread · where nothing of the old tape is waiting for backward any more
    the old one is closed    then, at the stack's last block, after `interval` calls, and on any exception

With a budget a block's region keeps what it saves, on a tape of its own, until the device is full. "dynamic" answers the
interval anew, by the formula, for the length of each batch: when the stack's first position is called.

A tape lives as long as autograd's handles need it: forgetting one here, by unwrap or otherwise, is harmless.
Threads: cursors are thread-local, the rest is read only.
"""

import threading

from torch import Tensor, is_grad_enabled

from . import budget, neighbours
from ._engine import C

DYNAMIC = "dynamic"


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
    """One cursor per thread, under one name (reading a thread-local is dear), and what "dynamic" answered last."""

    def __init__(self):
        self.cursor = Cursor()
        self.dial = None  # the formula's last answer


class Stack:
    """name: the parent's · first: the first block's position · n_positions: of its children · n_layers: of the model, for the
    formula. A copy has its own cursor."""

    __slots__ = ("first", "here", "n_layers", "n_positions", "name")

    def __init__(self, name, first, n_positions, n_layers):
        self.name, self.first, self.n_positions, self.n_layers = name, first, n_positions, n_layers
        self.here = ThreadCursor()

    def __reduce__(self):
        return Stack, (self.name, self.first, self.n_positions, self.n_layers)


class BlockState:
    """What a wrapped block carries in its __dict__. Never refers to the block; a deep copy gets a key of its own.

    policy     "interval", "every_n_layers" or "budget"; dial: its number, or "dynamic"; the budget's is None
    positions  where the block stands in its stack, ascending; several for a shared one
    order      how many blocks of the model come before it
    replaced   a forward that was set on the instance before wrap, or None
    is_off     the model's own switch says that this block is not checkpointed (see takeover): it runs plainly
    """

    __slots__ = ("dial", "is_off", "key", "name", "order", "policy", "positions", "replaced", "stack")

    def __init__(self, stack, positions, order, name, policy, dial, replaced=None, is_off=False):
        self.stack, self.positions, self.order, self.name = stack, positions, order, name
        self.policy, self.dial, self.replaced, self.is_off = policy, dial, replaced, is_off
        self.key = C.new_key(name)

    def __reduce__(self):
        return BlockState, (self.stack, self.positions, self.order, self.name, self.policy, self.dial, self.replaced,
                            self.is_off)

    @property
    def label(self):
        """The settings as the user gave them, "interval=2", for the report."""
        return self.policy if self.dial is None else f"{self.policy}={self.dial}"

    def run(self, block, function, args, kwargs):
        """function(*args, **kwargs) as a region of this block, whose module is `block`.

        A block that FSDP manages is a segment of its own: only its parameters are there in its backward.
        """
        if self.order == 0:
            budget.notice()
        if self.is_off or neighbours.is_inside_stock(self.name):
            return function(*args, **kwargs)
        trust = C.TRUST_PARAMETERS if "_is_fsdp_managed_module" in block.__dict__ else 0
        if self.policy == "budget":
            return C.run(C.KEEP | trust, self.key, function, args, kwargs)
        k = self.dial if self.dial != DYNAMIC else self._dial_of_batch(args, kwargs)
        if self.policy == "every_n_layers":
            return C.run((C.KEEP if self.order % k else C.LET_GO) | trust, self.key, function, args, kwargs)
        if k == 1 or trust:
            return C.run(C.LET_GO | trust, self.key, function, args, kwargs)
        return self._run_in_segment(k, function, args, kwargs)

    def _dial_of_batch(self, args, kwargs):
        """The formula's answer for this batch; every block of a pass gets the first one's."""
        here = self.stack.here
        if self.stack.first in self.positions or here.dial is None:
            length = sequence_length(args, kwargs)
            here.dial = C.dynamic_interval(self.stack.n_layers, length, 2, 12, self.stack.n_layers)
        return here.dial

    def _run_in_segment(self, k, function, args, kwargs):
        stack = self.stack
        cursor = stack.here.cursor
        tape = cursor.begin(self.positions, k)
        try:
            result = C.run(tape, self.key, function, args, kwargs)
        except BaseException:
            cursor.stop()
            raise
        if cursor.tape is tape and (cursor.n_calls >= k or cursor.last + 1 == stack.n_positions):
            cursor.stop()
        return result


def sequence_length(args, kwargs):
    """Tokens per sequence of a block's input, padding included: the last dimension but one of the first floating tensor
    of two dimensions or more ([batch, tokens, hidden] or [tokens, hidden]); 1 where there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return max(1, int(value.shape[-2]))
    return 1
