# SPDX-License-Identifier: BSD-3-Clause
"""rerun: the stock's two checkpoints, for what relies on the function being called again in backward.

    rerun      use_reentrant=False: hooks in place of saved tensors; the function runs again when backward asks for one
    reentrant  use_reentrant=True: one node in the graph, with a backward of its own inside

The binary does both (csrc/torch/rerun.h, rerun_reentrant.h), with the CPU's random state and autocast. What is left to Python is what
few calls need, and what only Python can do: contexts, logs, `with torch.device`, other devices' generators. All of it is packed into
the two callables that the binary is given, one for each run.
"""

import contextlib
import warnings

import torch
import torch.utils.checkpoint as stock
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from ._engine import C
from .rerun_devices import DeviceStates, types_of
from .rerun_log import OperatorLogs
from .selective import is_selective

DETERMINISM_CHECKS = ("default", "none")


def rerun(function, args, kwargs, preserve_rng_state, context_fn, determinism_check, debug, early_stop, respect_saved_tensors_hooks):
    """function(*args, **kwargs), run again in backward. ValueError for debug beside a context_fn, for another determinism_check, and
    where respect_saved_tensors_hooks=True asks of this torch's selective contexts what they can not do."""
    debug = _or_else("_checkpoint_debug_enabled", debug)
    is_custom = context_fn is not None and context_fn is not stock.noop_context_fn
    if debug and is_custom:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    check_determinism_word(determinism_check)
    flags = C.CHECK_METADATA if determinism_check == "default" else 0
    if preserve_rng_state:
        flags |= C.PRESERVE_RNG
    if _or_else("_enable_checkpoint_early_stop", early_stop):
        flags |= C.EARLY_STOP
    states = _states(args, kwargs) if preserve_rng_state else None
    if not is_custom and not debug and states is None and not _has_modes():
        return C.rerun(flags, function, None, None, args, kwargs)
    return _with_contexts(flags, function, args, kwargs, states, context_fn if is_custom else None, debug, respect_saved_tensors_hooks)


def reentrant(function, args, preserve_rng_state):
    """function(*args), by one node. Warns where no argument needs a gradient; RuntimeError inside a functorch transform."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("checkpoint: use_reentrant=True is an autograd.Function without setup_context staticmethod, so it can not run "
                           "inside functorch transforms (vmap, grad, jvp, jacrev, ...)")
    if not any(argument.requires_grad for argument in args if isinstance(argument, torch.Tensor)):
        warnings.warn("None of the inputs have requires_grad=True. Gradients will be None", stacklevel=4)
    flags = C.PRESERVE_RNG if preserve_rng_state else 0
    states = _states(args, {}) if preserve_rng_state else None
    if states is None and not _has_modes():
        return C.rerun_reentrant(flags, function, None, args)
    result = C.rerun_reentrant(flags, function, _Again(function, [], states), args)
    if states is not None:
        states.check_not_initialised_since()
    return result


def warn_of_unsaid_form(name, stacklevel):
    """The stock warns of a missing use_reentrant. It then takes True, which restricts what backward may do; here it means False."""
    warnings.warn(f"torch.utils.checkpoint{name}: the use_reentrant parameter should be passed explicitly. tfg takes a missing one for "
                  "False.", stacklevel=stacklevel + 1)


def check_determinism_word(word):
    if word not in DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check should be one of {list(DETERMINISM_CHECKS)}, but got {word}")


def _or_else(name, given):
    """What a context manager of the stock has set, else the argument."""
    chosen = getattr(stock, name, None)
    return given if chosen is None else chosen


def _states(args, kwargs):
    """The random states that the binary does not put back by itself, or None."""
    types = types_of(args, kwargs)
    return DeviceStates(types) if types else None


def _has_modes():
    return torch._C._len_torch_function_stack() > 0


def _with_contexts(flags, function, args, kwargs, states, context_fn, debug, respect_saved_tensors_hooks):
    logs = OperatorLogs() if debug else None
    forward, recompute = logs.contexts() if debug else context_fn() if context_fn else (None, None)
    if respect_saved_tensors_hooks is not None and is_selective(forward):
        _tell_about_hooks(forward, respect_saved_tensors_hooks)
    if context_fn and _is_traced() and not (isinstance(forward, TorchDispatchMode) and isinstance(recompute, TorchDispatchMode)):
        raise AssertionError("In torch.compile mode, `context_fn` arg passed to checkpoint must generate a tuple of two "
                             "`TorchDispatchMode`s.")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    again = _Again(function, [] if recompute is None else [recompute], states)
    first = function if forward is None else _First(function, forward)
    result = C.rerun(flags, first, again, logs.explain if debug else None, args, kwargs)
    if states is not None:
        states.check_not_initialised_since()
    return result


def _tell_about_hooks(context, respected):
    """Selective contexts keep values outside the graph; from torch 2.14 they can pass them through the user's hooks."""
    if respected and not hasattr(context, "respect_saved_tensors_hooks"):
        raise ValueError("respect_saved_tensors_hooks=True: this torch's selective checkpointing contexts can not, where the function is "
                         "called again; tfg.engine(\"replay\") always does")
    context.respect_saved_tensors_hooks = respected


def _is_traced():
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


class _First:
    """The first run, inside the forward context."""

    def __init__(self, function, context):
        self.function, self.context = function, context

    def __call__(self, *args, **kwargs):
        with self.context:
            return self.function(*args, **kwargs)
        raise RuntimeError("torch.utils.checkpoint: the forward context provided by context_fn suppressed an exception raised during the "
                           "checkpointed forward. There is no value to return then.")


class _Again:
    """A second run, inside the recompute context and what else stood around the first."""

    def __init__(self, function, contexts, states):
        self.function, self.contexts, self.states, self.device = function, contexts, states, _device_in_force()

    def __call__(self, *args, **kwargs):
        with contextlib.ExitStack() as around:
            if self.states is not None:
                around.enter_context(self.states.in_force())
            for context in self.contexts:
                around.enter_context(context)
            if self.device is not None:
                around.enter_context(DeviceContext(self.device))  # a fresh one: the one of the forward may be in use
            return self.function(*args, **kwargs)


def _device_in_force():
    """The device of the innermost `with torch.device` or set_default_device, or None."""
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None
