# SPDX-License-Identifier: BSD-3-Clause
"""subclass: the class that a wrapped block gets. Same names, isinstance true; its forward runs a region of *its* instance.

A forward set on the instance would stay bound to it, and copies and replicas would train the original's weights. A class
goes with the instance: state lies in the instance's __dict__ under STATE and nowhere else, and the forward passes straight
through where it is missing (after unwrap, where FSDP or a parametrization has subclassed once more).
"""

import functools
import types
import weakref

from torch.compiler import is_compiling

STATE = "_tfg_state"
_wrapped_classes = weakref.WeakValueDictionary()  # original class -> its subclass


class Wrapped:
    """Mixed in first. Keeps the original's __init_subclass__ from seeing our class, but not the classes made from it.

    Transformers' layers are the exception: from 5.23 theirs is what sets caches to None where gradient checkpointing is on.
    No __slots__: an instance can change to a class whose layout is the same only.
    """

    def __init_subclass__(cls, **kwargs):
        if "_tfg_base" not in vars(cls):
            super().__init_subclass__(**kwargs)
        elif (layer := _transformers_layer(cls)) is not None:
            layer.__init_subclass__.__func__(cls)

    def __reduce_ex__(self, protocol):
        parts = super().__reduce_ex__(protocol)
        cls = type(self)
        if "_tfg_base" not in vars(cls) or isinstance(parts, str):
            return parts
        make, args, *rest = parts
        base = cls._tfg_base
        args = tuple(base if arg is cls else arg for arg in args)
        return (_restore, (base, base if make is cls else make, args), *rest)


def _transformers_layer(cls):
    """The GradientCheckpointingLayer that `cls` is made from, where it has an __init_subclass__ of its own; None otherwise."""
    for base in cls.__mro__:
        if base.__name__ == "GradientCheckpointingLayer" and "__init_subclass__" in vars(base):
            return base
    return None


def _restore(base, make, args):
    """What copy, deepcopy and pickle call: the original object, in the wrapped class again."""
    made = make(*args)
    if type(made) is base:
        object.__setattr__(made, "__class__", _class_for(base))
    return made


def _make_forward(base):
    @functools.wraps(base.forward)
    def forward(self, *args, **kwargs):
        state = self.__dict__.get(STATE)
        if state is None:
            return base.forward(self, *args, **kwargs)
        replaced = state.replaced
        if is_compiling():
            return replaced(*args, **kwargs) if replaced is not None else base.forward(self, *args, **kwargs)
        return state.run(self, replaced or types.MethodType(base.forward, self), args, kwargs)

    return forward


def _class_for(base):
    made = _wrapped_classes.get(base)
    if made is None:
        names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
        names.update(_tfg_base=base, forward=_make_forward(base))
        made = types.new_class(base.__name__, (Wrapped, base), {}, lambda namespace: namespace.update(names))
        _wrapped_classes[base] = made
    return made


def put_on(block, state):
    """Give `block` the wrapped class, unless it has it somewhere below, and `state`."""
    state.replaced = vars(block).pop("forward", None)
    if not isinstance(block, Wrapped):
        object.__setattr__(block, "__class__", _class_for(type(block)))
    vars(block)[STATE] = state


def take_off(module):
    """Undo put_on; nothing where it was not done. A class that others made from ours is left, passing straight through."""
    state = vars(module).pop(STATE, None)
    if state is not None and state.replaced is not None:
        vars(module).setdefault("forward", state.replaced)
    if "_tfg_base" in vars(type(module)):
        object.__setattr__(module, "__class__", type(module)._tfg_base)


def state_of(module):
    """The BlockState of `module`, or None."""
    return vars(module).get(STATE)
