# SPDX-License-Identifier: BSD-3-Clause
"""trainer_callback: tfg.TrainerCallback, for Transformers' Trainer and what derives from it (TRL's). The one file that imports it.

    Trainer(..., callbacks=[tfg.TrainerCallback(budget="40GiB")])        the script is otherwise as it was

    on_init_end      wraps the model, before checkpointing is switched on and before accelerator.prepare
    on_train_begin   wraps where that came too early (model_init, add_callback); again under auto_find_batch_size: nothing new
    on_step_end      after the first step: did the blocks' regions run at all?
    on_log           adds METRICS to the logs, of the steps since the last log
    on_train_end     report: an INFO line, and callback.report; unwraps what it wrapped

The trainer is not passed to callbacks and its reporters (TensorBoard, W&B) come before the user's: to be seen by them the callback
moves to the front of the list that the trainer's CallbackHandler, the caller, is going through.
"""

import os
import sys
import time
from pathlib import Path

import torch

from . import budget as budgets
from . import neighbours
from ._engine import C, is_counting, is_disabled, log
from .reporting import report
from .subclass import state_of
from .wrapping import _settings, unwrap, wrap

try:
    import transformers
    from transformers.trainer_callback import CallbackHandler
except ImportError as missing:
    raise ImportError("tfg.TrainerCallback needs Transformers and Accelerate: pip install 'tfg[hf]'") from missing

GIB = 2**30
FULL = 0.95  # of the machine's memory: from there on the system ends processes
METRICS = {
    "tfg/peak_allocated_gib": "the most tensor bytes alive at once",
    "tfg/budget_used": "that, of the budget",
    "tfg/recompute_frac": "time in replay, of the steps' time",
    "tfg/dropped_gib_per_step": "activations let go of, at a region's end or by eviction",
    "tfg/process_gib": "resident memory of the process, as the system counts it",
}


class TrainerCallback(transformers.TrainerCallback):
    """Wraps the trainer's model and tells what that did. Arguments as tfg.wrap; none of them is budget="auto".

    A model that was wrapped before is left as it is where no argument is given. `report` is the last tfg.report, made when
    training ended, or None. ValueError for arguments that tfg.wrap refuses, and for activation_offloading in the trainer's
    arguments: one memory library is enough.
    """

    def __init__(self, *, budget=None, interval=None, every_n_layers=None, blocks=None, strict=False):
        _settings(interval, every_n_layers)
        self.how = {"budget": budget, "interval": interval, "every_n_layers": every_n_layers, "blocks": blocks, "strict": strict}
        self.report = None
        self._model = None  # that this callback wrapped
        self._marks = _Marks()
        self._is_first_step = self._is_memory_fine = True

    # -- the events -------------------------------------------------------------------------------------------------------
    def on_init_end(self, args, state, control, model=None, **others):
        self._go_first(sys._getframe(1))
        if getattr(args, "activation_offloading", False):
            raise ValueError("activation_offloading=True moves what tfg.TrainerCallback would drop: leave one of them out")
        if model is not None:
            self._wrap(model)

    def on_train_begin(self, args, state, control, model=None, **others):
        self._go_first(sys._getframe(1))
        self._wrap(model)
        neighbours.check(model)
        self._is_first_step = True
        self._marks = _Marks(_totals(model))

    def on_step_begin(self, args, state, control, **others):
        self._marks.step_begins()

    def on_step_end(self, args, state, control, model=None, **others):
        self._marks.step_ends()
        if self._is_first_step:
            self._is_first_step = False
            _check_applied(model)

    def on_log(self, args, state, control, model=None, logs=None, **others):
        if is_disabled or logs is None or not self._marks.n_steps:
            return
        metrics = self._marks.metrics(_totals(model))
        self._marks = _Marks(_totals(model))
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)  # written before callbacks are asked
        self._watch(metrics.get("tfg/process_gib"), state)

    def on_train_end(self, args, state, control, model=None, **others):
        if not is_disabled and _is_wrapped(model):
            self.report = report(model)
            if state.is_world_process_zero:
                log.info("%s", self.report)
        if self._model is not None:
            unwrap(self._model)
            self._model = None

    # -- what they do -------------------------------------------------------------------------------------------------------
    def _wrap(self, model):
        is_told = any(value not in (None, False) for value in self.how.values())
        if _is_wrapped(model) and (self._model is not None or not is_told):
            return
        if self._model is not None and self._model is not model:  # model_init has made another one
            unwrap(self._model)
        wrap(model, **self.how)
        self._model = model

    def _go_first(self, frame):
        """Be the first of the callbacks that `frame` goes through. Those it moves back have had this event already."""
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler) and self in handler.callbacks:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)

    def _watch(self, process_gib, state):
        total_bytes, where = budgets.machine_memory()
        if self._is_memory_fine and process_gib is not None and process_gib * GIB > FULL * total_bytes:
            self._is_memory_fine = False
            log.warning("step %d: the process has %.2f GiB of %s (%s): a lower budget, or a smaller batch", state.global_step, process_gib,
                        budgets.format_bytes(total_bytes), where)


class _Marks:
    """What had been counted when the last log was made, and the steps since."""

    def __init__(self, totals=None):
        self.totals, self.n_steps, self.steps_ns, self._begun_ns = totals, 0, 0, None
        C.take_recent_peak()

    def step_begins(self):
        self._begun_ns = time.perf_counter_ns()

    def step_ends(self):
        if self._begun_ns is not None:
            self.steps_ns += time.perf_counter_ns() - self._begun_ns
            self.n_steps += 1
            self._begun_ns = None

    def metrics(self, totals):
        since = {count: totals[count] - self.totals[count] for count in ("replay_ns", "dropped_bytes", "evicted_bytes")}
        values = {"tfg/recompute_frac": round(since["replay_ns"] / max(1, self.steps_ns), 4),
                  "tfg/dropped_gib_per_step": (since["dropped_bytes"] + since["evicted_bytes"]) / self.n_steps / GIB}
        if is_counting:
            peak_bytes, budget_bytes = C.take_recent_peak(), budgets.in_force().n_bytes
            values["tfg/peak_allocated_gib"] = peak_bytes / GIB
            if budget_bytes:
                values["tfg/budget_used"] = round(peak_bytes / budget_bytes, 4)
        if (resident_bytes := process_bytes()) is not None:
            values["tfg/process_gib"] = resident_bytes / GIB
        return values


def process_bytes(statm="/proc/self/statm"):
    """Resident bytes of this process; None where the system does not say."""
    try:
        return int(Path(statm).read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def _is_wrapped(model):
    return any(state_of(module) is not None for module in model.modules())


def _totals(model):
    return report(model).to_dict()["total"] if not is_disabled and _is_wrapped(model) else _NOTHING


_NOTHING = {"replay_ns": 0, "dropped_bytes": 0, "evicted_bytes": 0}


def _check_applied(model):
    """Say so where the first step saw no region: switched on, but to no effect."""
    if is_disabled or not torch.is_grad_enabled():
        return
    blocks = report(model).to_dict()["blocks"] if _is_wrapped(model) else []
    idle = [block["name"] for block in blocks if not block["regions"]]
    if not blocks or len(idle) == len(blocks):
        log.warning("no block of %s ran as a region in the first step: nothing is dropped or replayed (gradient checkpointing "
                    "switched off, torch.compile, or blocks that the model does not call)", type(model).__name__)
    elif idle:
        log.info("blocks that did not run as regions in the first step: %s", ", ".join(idle))
