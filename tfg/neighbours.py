# SPDX-License-Identifier: BSD-3-Clause
"""neighbours: other memory libraries that already work on a model's blocks. One of the two is enough; two would do the work twice.

    CheckpointWrapper     around, inside or instead of a block, unless its checkpoint_fn is tfg's (Accelerate's FSDP plugin makes them)
    composable checkpoint torch.distributed._composable.checkpoint: hooks on a module
    takeover.check        a function that Transformers' layers were given

What is put on after tfg.wrap can not be seen by it: then a block finds itself inside the stock's checkpoint, and stands aside.
"""

import sys

import torch
import torch.utils.checkpoint as stock

from . import takeover
from ._engine import log
from .checkpoint import checkpoint

WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
COMPOSABLE = "torch.distributed._composable.checkpoint_activation"

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)
_has_stood_aside = False


def check(model):
    """ValueError, naming the module and what would work, where `model` is checkpointed by another library already."""
    takeover.check(model)
    wrapper_class = getattr(sys.modules.get(WRAPPER), "CheckpointWrapper", ())  # where it is not loaded there is none
    for name, module in model.named_modules():
        if isinstance(module, wrapper_class) and not is_ours(module):
            raise ValueError(f"{name or 'the model'} is a CheckpointWrapper, which would run each block again although tfg replays it: "
                             "leave the wrapper out (with FSDP: activation_checkpointing off in its plugin or policy), or give it "
                             "checkpoint_wrapper(module, checkpoint_fn=tfg.checkpoint) and do not call tfg.wrap")
        if any(getattr(hook, "__module__", None) == COMPOSABLE for hook in module._forward_pre_hooks.values()):
            raise ValueError(f"{name or 'the model'} has torch.distributed._composable.checkpoint on it, which would run it again "
                             "although tfg replays it: leave that out")


def is_ours(wrapper):
    """Whether a CheckpointWrapper runs its module through tfg.checkpoint."""
    return getattr(wrapper.checkpoint_fn, "func", None) is checkpoint


def is_inside_stock(name):
    """Whether the stock's non-reentrant checkpoint surrounds this call of the block `name`, in its forward or when it runs it
    again: two takes of one block on a segment's tape would not be told apart. Said once."""
    global _has_stood_aside
    hooks = _top_hooks(False)
    if hooks is None or getattr(hooks[0], "__module__", None) != stock.__name__:
        return False
    if not _has_stood_aside:
        _has_stood_aside = True
        log.warning("%s is called inside torch.utils.checkpoint, which runs it again: tfg stands aside there, and the block runs as "
                    "without it. Leave the checkpoint out, or use tfg.checkpoint in its place", name or "the model")
    return True
