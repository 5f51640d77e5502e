# SPDX-License-Identifier: BSD-3-Clause
"""selective: a selective-checkpointing policy, taken from a stock `context_fn` and asked by the tape.

The stock runs a policy through two dispatch modes and a store of values. Here the recorder asks it once per operator, while the
region is taped, and keeps what it names on the tape: nothing is looked up by call index, and any number of backwards may follow.
Views are not recorded, so the policy is not asked for them.

    context_fn() ── the two modes of create_selective_checkpoint_contexts(policy) ──> policy
                 ── anything else ──> None: the function is run again (rerun.py)
"""

import torch.utils.checkpoint as stock
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
IGNORED = frozenset(getattr(stock, "SAC_IGNORED_OPS", ()))

_caching_mode = getattr(stock, "_CachingTorchDispatchMode", None)


def selection_of(context_fn):
    """(selection for C.run or None, contexts that were made on the way or None).

    ValueError and TypeError for a list or policy that the stock refuses, with its words.
    """
    contexts = context_fn()  # the stock looks at the policy, and makes a function of a list
    first = contexts[0] if isinstance(contexts, tuple) and len(contexts) == 2 else None
    if is_selective(first):
        return _selection(first.policy_fn), None
    return None, contexts


def is_selective(context):
    """Whether this is the forward half of what create_selective_checkpoint_contexts makes."""
    return _caching_mode is not None and type(context) is _caching_mode


def _selection(policy_fn):
    """policy_fn as the recorder asks it: (op, args, kwargs, results) -> whether to keep the results."""

    def is_kept(op, args, kwargs, results):
        if op in IGNORED:
            return False
        answer = policy_fn(SelectiveCheckpointContext(is_recompute=False, op_output=results), op, *args, **kwargs)
        return answer is True or (isinstance(answer, CheckpointPolicy) and answer in SAVED)  # all else recomputes, as in the stock

    return is_kept
