# SPDX-License-Identifier: BSD-3-Clause
"""tfg: train inside the memory you have. Activations are a cache: taped once, dropped, replayed when backward asks.

    y = tfg.checkpoint(block, x)        # one region; at its end everything but its inputs is let go
    tfg.wrap(model)                     # everything is kept until the memory is full; tfg.unwrap(model) undoes it
    tfg.wrap(model, budget="40GiB")     # a ceiling for the device; tfg.set_budget sets one without a model
    tfg.wrap(model, interval=2)         # segments of two blocks, whatever the memory
    with tfg.patch(): ...               # torch.utils.checkpoint's functions are tfg's; python -m tfg run train.py
    tfg.TrainerCallback(budget="40GiB") # for Transformers' Trainer: Trainer(..., callbacks=[that])
    tfg.freeze(model, fraction=1/3)     # embeddings and the lower third of the blocks stop training
    tfg.clip_grad_norm_(model.parameters(), 1.0)  # torch's function, in one pass over all gradients
    print(tfg.report(model))            # what was saved, kept, dropped and replayed, per block

Environment, read once at import:
    TFG_DISABLE=1           all of it does nothing: plain training, nothing frozen
    TFG_STRESS=drop,verify  drop: let go after every operator; verify: compare fingerprints at every replay
    TFG_ENGINE=rerun        tfg.checkpoint calls the function again in backward, as the stock does
    TFG_CPU_ALLOCATOR=0     leave the process's CPU allocator alone: tfg.cpu then counts nothing
"""

__version__ = "0.1.0"

from torch.utils.checkpoint import (  # the stock's own, under either engine: see the README's table
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointFunction,
    CheckpointPolicy,
    DefaultDeviceType,
    GraphExecGroup,
    SelectiveCheckpointContext,
    check_backward_validity,
    create_selective_checkpoint_contexts,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)

from . import cpu
from ._engine import Error, mutated
from .budget import set_budget
from .checkpoint import checkpoint, checkpoint_sequential
from .clipping import clip_grad_norm_
from .engines import engine
from .freezing import freeze
from .interval import dynamic_interval
from .patching import patch
from .reporting import report
from .wrapping import unwrap, wrap

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "Error",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "clip_grad_norm_",
    "cpu",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "dynamic_interval",
    "engine",
    "freeze",
    "get_device_states",
    "mutated",
    "noop_context_fn",
    "patch",
    "report",
    "set_budget",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "unwrap",
    "wrap",
]


def __getattr__(name):
    """TrainerCallback, for which Transformers is imported when it is first asked for."""
    if name == "TrainerCallback":
        from .trainer_callback import TrainerCallback
        return TrainerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
