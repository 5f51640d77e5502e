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
from .engines import is_chosen, is_rerun
from .rerun import check_determinism_word, reentrant, rerun, warn_of_unsaid_form
from .selective import selection_of

_site_keys = {}  # id(code or type) -> (key, the object itself: held, so that its id is not used again)
_module_keys = {}  # id(module) -> (key, weak reference)
_stock_checkpoint = stock.checkpoint  # the compiler knows this very object; a patch may put another under the name


def checkpoint(function=None, *args, use_reentrant=None, preserve_rng_state=True, context_fn=None, determinism_check="default",
               debug=False, early_stop=True, respect_saved_tensors_hooks=None, **kwargs):
    """function(*args, **kwargs), with everything but its inputs let go at its end and replayed when backward asks.

    The same result, gradients and random numbers as the plain call, bit for bit; `function` runs once. Under a budget
    (tfg.set_budget) nothing is let go before the device is full. Without `function` and arguments a decorator is returned. The
    stock's keywords are reserved, all others go to `function`:

    use_reentrant                None and False are the same, and only the rerun engine warns of a missing one; True is the reentrant
                                 form: one node, the function runs again inside backward (ValueError and RuntimeError as the stock's)
    preserve_rng_state           holds by construction, whatever is given
    context_fn                   functools.partial(create_selective_checkpoint_contexts, policy): the tape asks the policy which
                                 results to keep. Anything else: the function is run again (see tfg.engine)
    determinism_check            'default' or 'none': nothing is run twice, so there is nothing to compare. The bits of operators
                                 seen for the first time are compared in either case
    debug, early_stop            hold by construction: only what is needed is replayed, and it can not differ unseen
    respect_saved_tensors_hooks  what a region keeps passes through hooks around it, always

    TypeError for a `function` that cannot be called, ValueError for another determinism_check, for debug=True with a context_fn,
    and for keywords beside a missing function.
    """
    if function is None and not args:
        return _decorator(kwargs, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state, context_fn=context_fn,
                          determinism_check=determinism_check, debug=debug, early_stop=early_stop,
                          respect_saved_tensors_hooks=respect_saved_tensors_hooks)
    if use_reentrant or debug or context_fn is not None or determinism_check != "default" or is_compiling() or is_rerun():
        return _special(function, args, kwargs, use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop,
                        respect_saved_tensors_hooks)
    _check_callable(function)
    return C.run(C.BY_BUDGET, _key(function), function, args, kwargs)


def _special(function, args, kwargs, use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop,
             respect_saved_tensors_hooks):
    """All but the usual call."""
    is_custom = context_fn is not None and context_fn is not stock.noop_context_fn
    if is_compiling():
        return _compiled(function, args, kwargs, use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop,
                         respect_saved_tensors_hooks)
    if use_reentrant:
        _check_reentrant(kwargs, is_custom or debug or respect_saved_tensors_hooks is not None)
    _check_callable(function)
    if use_reentrant:
        return reentrant(function, args, preserve_rng_state)
    if is_rerun() or (debug and is_custom):
        if use_reentrant is None and is_chosen():
            warn_of_unsaid_form("", stacklevel=3)
        return rerun(function, args, kwargs, preserve_rng_state, context_fn, determinism_check, debug, early_stop,
                     respect_saved_tensors_hooks)
    check_determinism_word(determinism_check)
    if not is_custom:
        return C.run(C.BY_BUDGET, _key(function), function, args, kwargs)
    selection, contexts = selection_of(context_fn)
    if selection is None:
        return rerun(function, args, kwargs, preserve_rng_state, lambda: contexts, determinism_check, debug, early_stop,
                     respect_saved_tensors_hooks)
    return C.run(C.BY_BUDGET, _key(function), function, args, kwargs, selection)


def _compiled(function, args, kwargs, use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop,
              respect_saved_tensors_hooks):
    """The stock function, which the compiler knows, with the keywords that were given: this torch's may not have them all."""
    keywords = {"use_reentrant": bool(use_reentrant), "preserve_rng_state": preserve_rng_state}
    given = {"context_fn": (context_fn, None), "determinism_check": (determinism_check, "default"), "debug": (debug, False),
             "early_stop": (early_stop, True), "respect_saved_tensors_hooks": (respect_saved_tensors_hooks, None)}
    keywords |= {name: value for name, (value, default) in given.items() if value is not default and value != default}
    return _stock_checkpoint(function, *args, **keywords, **kwargs)


def _check_reentrant(strays, has_others):
    if strays:
        raise ValueError("Unexpected keyword arguments: " + ",".join(strays))
    if has_others:
        raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False. So is `respect_saved_tensors_hooks`.")


def _check_callable(function):
    if not callable(function):
        raise TypeError(f"checkpoint: the first argument must be callable, but is {function!r}")


def _decorator(strays, **keywords):
    if strays:
        raise ValueError("Unexpected keyword arguments: " + ",".join(strays))

    def decorate(function):
        _check_callable(function)

        @functools.wraps(function)
        def checkpointed(*args, **kwargs):
            return checkpoint(function, *args, **keywords, **kwargs)

        return checkpointed

    return decorate


def checkpoint_sequential(functions, segments, input, use_reentrant=None, **kwargs):
    """The stock's: `functions` (an nn.Sequential or a list of callables) in `segments` runs of equal length, each but the last
    through checkpoint(). One tensor in, one out. use_reentrant as in checkpoint(); the only other keyword is preserve_rng_state.
    ValueError for other keywords, and for more segments than functions.
    """
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    if use_reentrant is None and not is_compiling() and is_chosen():
        warn_of_unsaid_form(".checkpoint_sequential", stacklevel=2)
        use_reentrant = False
    functions = list(functions.children()) if isinstance(functions, nn.Sequential) else functions
    length = len(functions) // segments
    if length == 0:  # the end of the line is what the stock says
        raise ValueError(f"checkpoint_sequential: {segments} segments are more than the {len(functions)} functions: range() arg 3 must "
                         "not be zero")
    end = 0
    for start in range(0, length * (segments - 1), length):
        end = start + length
        input = checkpoint(_Run(functions[start:end]), input, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
    return _Run(functions[end:])(input)


class _Run:
    """Functions called in turn, one tensor in and one out. As a call site it is known by the first: no two segments of a model share
    what has been proven of one."""

    __slots__ = ("functions",)

    def __init__(self, functions):
        self.functions = functions

    def __call__(self, value):
        for function in self.functions:
            value = function(value)
        return value


def _key(function):
    """The key of the call site that `function` stands for. Cheap: one look-up once it is known."""
    if type(function) is types.FunctionType:
        entry = _site_keys.get(id(function.__code__))
        return entry[0] if entry else _new_site(function.__code__, function.__qualname__)
    if isinstance(function, nn.Module):
        return _module_key(function)
    if type(function) is _Run:
        return _key(function.functions[0])
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
