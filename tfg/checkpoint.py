# SPDX-License-Identifier: BSD-3-Clause
"""checkpoint: one region around one call. Stands where torch.utils.checkpoint.checkpoint stood.

A call site is what statistics and proof are kept for: a module's instance, else the code object of the function.
"""

import functools
import types
import weakref

import torch.utils.checkpoint as stock
from torch import nn
from torch.compiler import is_compiling

from ._engine import C

_site_keys = {}  # id(code or type) -> (key, the object itself: held, so that its id is not used again)
_module_keys = {}  # id(module) -> (key, weak reference)


def checkpoint(function, *args, use_reentrant=None, preserve_rng_state=True, context_fn=None, determinism_check="default",
               debug=False, early_stop=True, respect_saved_tensors_hooks=None, **kwargs):
    """function(*args, **kwargs), with everything but its inputs let go at its end and replayed when backward asks.

    The same result, gradients and random numbers as the plain call, bit for bit; `function` runs once. The stock's own
    keywords are reserved: use_reentrant (None, False), preserve_rng_state, early_stop and respect_saved_tensors_hooks are
    accepted and change nothing (random numbers are always right, and only what is needed is replayed); determinism_check is
    'default' or 'none'. TypeError for a `function` that cannot be called, ValueError for another determinism_check,
    NotImplementedError for use_reentrant=True, debug=True and a context_fn. All other keywords go to `function`.
    """
    if use_reentrant or debug or context_fn is not None or determinism_check != "default":
        _check_keywords(use_reentrant, context_fn, determinism_check, debug)
    if is_compiling():  # the compiler knows the stock function, by identity
        return stock.checkpoint(function, *args, use_reentrant=False, **kwargs)
    if not callable(function):
        raise TypeError(f"checkpoint: the first argument must be callable, but is {function!r}")
    return C.run(C.BY_BUDGET, _key(function), function, args, kwargs)


def _check_keywords(use_reentrant, context_fn, determinism_check, debug):
    if determinism_check not in ("default", "none"):
        raise ValueError(f"determinism_check should be one of ['default', 'none'], but got {determinism_check}")
    wanted = {"use_reentrant=True": use_reentrant, "debug=True": debug,
              "context_fn": context_fn is not None and context_fn is not stock.noop_context_fn}
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise NotImplementedError(f"checkpoint: {name} is not supported yet; part 3 of the work brings it")


def _key(function):
    """The key of the call site that `function` stands for. Cheap: one look-up once it is known."""
    if type(function) is types.FunctionType:
        entry = _site_keys.get(id(function.__code__))
        return entry[0] if entry else _new_site(function.__code__, function.__qualname__)
    if isinstance(function, nn.Module):
        return _module_key(function)
    if isinstance(function, functools.partial):
        owner = function.args[0] if function.args and isinstance(function.args[0], nn.Module) else function.func
        return _key(owner)
    if isinstance(function, types.MethodType):
        return _key(function.__self__ if isinstance(function.__self__, nn.Module) else function.__func__)
    entry = _site_keys.get(id(type(function)))
    return entry[0] if entry else _new_site(type(function), type(function).__qualname__)


def _new_site(owner, label):
    return _site_keys.setdefault(id(owner), (C.new_key(label), owner))[0]


def _module_key(module):
    entry = _module_keys.get(id(module))
    if entry is None or entry[1]() is not module:
        number = id(module)
        reference = weakref.ref(module, lambda dead: _forget(number, dead))
        entry = _module_keys[number] = (C.new_key(type(module).__qualname__), reference)
    return entry[0]


def _forget(number, dead):
    entry = _module_keys.get(number)
    if entry is not None and entry[1] is dead:
        del _module_keys[number]


def known_key(module):
    """The key under which `module` was checkpointed directly, or None."""
    entry = _module_keys.get(id(module))
    return entry[0] if entry and entry[1]() is module else None
