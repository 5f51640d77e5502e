# SPDX-License-Identifier: BSD-3-Clause
"""engines: which of the two ways a checkpointed function takes.

    replay   the function runs once; backward replays operators from the tape. The default
    rerun    the function is called again in backward, as the stock does, for what relies on that (a custom context_fn, tests that
             count calls), with the stock's meanings and errors (rerun.py)

Chosen by `with tfg.engine("rerun"):` for this thread, by TFG_ENGINE for the process, and by itself where only rerun can do what was
asked: use_reentrant=True, and a context_fn that is not selective checkpointing.
"""

import contextlib
import os

from ._engine import C

ENGINES = {"replay": C.REPLAY, "rerun": C.RERUN}


def _number_of(name, source):
    if name not in ENGINES:
        raise ValueError(f"{source}: 'replay' or 'rerun', not {name!r}")
    return ENGINES[name]


C.choose_default_engine(_number_of(os.environ.get("TFG_ENGINE") or "replay", "TFG_ENGINE"))


@contextlib.contextmanager
def engine(name):
    """Let tfg.checkpoint use this engine inside the `with`, in this thread: "replay" or "rerun". The one that was chosen when a
    function ran also serves its backward, and what a function that is called again calls itself is called again too. ValueError for
    another name."""
    before, chosen = C.engine(), _number_of(name, "engine")
    C.choose_engine(chosen)
    try:
        yield
    finally:
        C.choose_engine(before)


def is_rerun():
    """Whether functions are called again in this thread: by choice, or inside one that is."""
    return C.engine() != C.REPLAY


def is_chosen():
    """Whether rerun was chosen, so that its warnings are wanted."""
    return C.engine() == C.RERUN
