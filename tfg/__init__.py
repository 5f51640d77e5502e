# SPDX-License-Identifier: BSD-3-Clause
"""tfg: train inside the memory you have. Activations are a cache: taped once, dropped, replayed when backward asks.

    y = tfg.checkpoint(block, x)        # one region; at its end everything but its inputs is let go
    tfg.wrap(model)                     # everything is kept until the memory is full; tfg.unwrap(model) undoes it
    tfg.wrap(model, budget="40GiB")     # a ceiling for the device; tfg.set_budget sets one without a model
    tfg.wrap(model, interval=2)         # segments of two blocks, whatever the memory
    tfg.freeze(model, fraction=1/3)     # embeddings and the lower third of the blocks stop training
    print(tfg.report(model))            # what was saved, kept, dropped and replayed, per block

Environment, read once at import:
    TFG_DISABLE=1           all of it does nothing: plain training, nothing frozen
    TFG_STRESS=drop,verify  drop: let go after every operator; verify: compare fingerprints at every replay
    TFG_CPU_ALLOCATOR=0     leave the process's CPU allocator alone: tfg.cpu then counts nothing
"""

__version__ = "0.1.0"

from . import cpu
from ._engine import Error, mutated
from .budget import set_budget
from .checkpoint import checkpoint
from .freezing import freeze
from .interval import dynamic_interval
from .reporting import report
from .wrapping import unwrap, wrap

__all__ = ["Error", "checkpoint", "cpu", "dynamic_interval", "freeze", "mutated", "report", "set_budget", "unwrap", "wrap"]
