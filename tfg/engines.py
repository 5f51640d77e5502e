# SPDX-License-Identifier: BSD-3-Clause
"""engines: which of the two ways a checkpointed function takes.

    replay   the function runs once; backward replays operators from the tape. The default
    rerun    the function is called again in backward: the stock's own code, for what relies on that (a custom context_fn, tests
             that count calls), with all of its meanings and errors

Chosen by `with tfg.engine("rerun"):` for this thread, by TFG_ENGINE for the process, and by itself where only rerun can do what was
asked: use_reentrant=True, and a context_fn that is not selective checkpointing.
"""

import contextlib
import os
import threading

ENGINES = ("replay", "rerun")


def _check(name, source):
    if name not in ENGINES:
        raise ValueError(f"{source}: 'replay' or 'rerun', not {name!r}")
    return name


class _Chosen(threading.local):
    name = _check(os.environ.get("TFG_ENGINE") or "replay", "TFG_ENGINE")


_chosen = _Chosen()


@contextlib.contextmanager
def engine(name):
    """Let tfg.checkpoint use this engine inside the `with`, in this thread: "replay" or "rerun". The one that was chosen when a
    function ran also serves its backward. ValueError for another name."""
    before, _chosen.name = _chosen.name, _check(name, "engine")
    try:
        yield
    finally:
        _chosen.name = before


def is_rerun():
    """Whether this thread has chosen the function to be called again."""
    return _chosen.name == "rerun"
