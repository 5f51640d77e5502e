# SPDX-License-Identifier: BSD-3-Clause
"""takeover: Transformers' own gradient checkpointing, in a wrapped model, goes through tfg.

    switch   PreTrainedModel._set_gradient_checkpointing: gradient_checkpointing_enable and _disable, Trainer, PEFT's preparation
             and TRL's toggles all end there. Takeover.set stands on each PreTrainedModel of the model in its place
    asked    the function that the switch hands to the layers, torch's checkpoint mostly. Taken stands there instead

    enable ──> Takeover.set ──> the class's own setter: flags, every_n_layers ──> layers call Taken ──> the block's region

    never touched    regions on, as wrap was told                         off    blocks run plainly until it is on again
    on               regions on; layers that every_n_layers left off run plainly; caches are set to None by the layers as ever

The embeddings' output need not require a gradient: enable_input_require_grads does nothing meanwhile, so that what lies below
the first trained layer goes on saving nothing. Transformers is not imported here.
"""

import inspect
import weakref

import torch.utils.checkpoint as stock
from torch import nn
from torch.compiler import is_compiling

from ._engine import Error, log
from .checkpoint import checkpoint
from .subclass import state_of

SETTER, FUNC, FLAG = "_set_gradient_checkpointing", "_gradient_checkpointing_func", "gradient_checkpointing"
WANT, UNWANT = "enable_input_require_grads", "disable_input_require_grads"
LEFT_OUT = "_tfg_left_out"  # on a block that wrap's every_n_layers passed over

_plain_functions = (stock.checkpoint, checkpoint)


def check(model):
    """ValueError where another memory library already works on the layers of `model`."""
    for name, module in model.named_modules():
        asked = vars(module).get(FUNC)
        if asked is not None and getattr(module, FLAG, False):
            _check_asked(asked, f"{name}: " if name else "")


def take_over(model, stacks):
    """Let the switches of `model` lead to tfg, and obey what they say now. Blocks have their states."""
    for module in model.modules():
        vars(module).pop(LEFT_OUT, None)
    for stack in stacks:
        for _, _, block in stack.entries:
            if state_of(block) is None and hasattr(block, FLAG):
                vars(block)[LEFT_OUT] = True
    for module in model.modules():
        if _has_switch(module) and not isinstance(_owner(module), Takeover):
            Takeover(module).put_on()
    if any(getattr(module, FLAG, False) is True for module in model.modules()):
        _obey(model, True)


def give_back(model):
    """Undo take_over: every function and method as it would be without it."""
    for module in model.modules():
        vars(module).pop(LEFT_OUT, None)
        if isinstance(taken := vars(module).get(FUNC), Taken):
            setattr(module, FUNC, taken.asked)
        if isinstance(owner := _owner(module), Takeover):
            owner.take_off()


class Takeover:
    """What stands on one PreTrainedModel. Refers to it weakly: a model is no cycle; copies of the model get their own."""

    def __init__(self, model):
        self._model = weakref.ref(model)
        self.wants_input_grads = False

    def __reduce__(self):
        return Takeover, (self.model,), {"wants_input_grads": self.wants_input_grads}

    def __setstate__(self, state):
        self.wants_input_grads = state["wants_input_grads"]

    @property
    def model(self):
        model = self._model()
        if model is None:
            raise Error("the model that tfg.wrap was given is gone, and this is a shallow copy of it: call tfg.wrap on the copy")
        return model

    def put_on(self):
        vars(self.model).update({SETTER: self.set, WANT: self.want_input_grads, UNWANT: self.unwant_input_grads})

    def take_off(self):
        model = self.model
        for name in (SETTER, WANT, UNWANT):
            vars(model).pop(name, None)
        if self.wants_input_grads:
            model.enable_input_require_grads()

    def set(self, enable=True, gradient_checkpointing_func=stock.checkpoint, **settings):
        """The switch itself. ValueError, with nothing changed, for what would do tfg's work a second time."""
        model = self.model
        if enable:
            _check_asked(gradient_checkpointing_func, "")
        type(model)._set_gradient_checkpointing(model, enable, gradient_checkpointing_func, **settings)
        _obey(model, enable)

    def want_input_grads(self):
        self.wants_input_grads = True
        log.info("%s: not needed under tfg, nothing was registered: gradients reach adapters above frozen layers without it", WANT)

    def unwant_input_grads(self):
        self.wants_input_grads = False


class Taken:
    """What a layer calls in place of `asked`: a block's region begins by itself, any other layer is one tfg.checkpoint."""

    __slots__ = ("asked",)

    def __init__(self, asked):
        self.asked = asked

    def __call__(self, function, *args, **kwargs):
        layer = layer_of(function)
        if is_compiling():
            return self.asked(function, *args, **kwargs)
        if layer is not None and (state_of(layer) is not None or LEFT_OUT in vars(layer)):
            return function(*args, **kwargs)
        return checkpoint(function, *args, **kwargs)


def layer_of(function):
    """The module that a layer hands over as `function`: partial(bound method, …), partial(plain function, layer, …), a bound
    method. None where it is none of these."""
    inner = getattr(function, "func", function)
    owner = getattr(inner, "__self__", None)
    if owner is None and getattr(function, "args", ()):
        owner = function.args[0]
    return owner if isinstance(owner, nn.Module) else None


def _obey(model, is_on):
    """Layers call Taken, and blocks are off where the switch, or its every_n_layers, left them off."""
    n_off = n_blocks = 0
    for module in model.modules():
        asked = vars(module).get(FUNC)
        if asked is not None and not isinstance(asked, Taken):
            setattr(module, FUNC, Taken(asked))
        if (state := state_of(module)) is not None:
            state.is_off = not (is_on and getattr(module, FLAG, True))
            n_off, n_blocks = n_off + state.is_off, n_blocks + 1
    log.info("gradient checkpointing of %s is %s: %d of %d blocks are tfg's", type(model).__name__, "on" if is_on else "off",
             n_blocks - n_off, n_blocks)


def _check_asked(asked, where):
    """ValueError where `asked` does more than checkpoint: offload, a context_fn, someone's patch."""
    if isinstance(asked, Taken):
        return
    keywords, function = getattr(asked, "keywords", {}), getattr(asked, "func", asked)
    if function not in _plain_functions:
        name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
        raise ValueError(f"{where}gradient checkpointing would run through {name} (offload=True, or a patch of another library), "
                         "and the model is tfg's: switch that off, or tfg.unwrap(model)")
    if keywords.get("context_fn") not in (None, stock.noop_context_fn):
        raise ValueError(f"{where}gradient checkpointing with a context_fn chooses what to keep, and so does tfg.wrap: leave "
                         "context_fn out, or tfg.unwrap(model) and use tfg.patch()")
    if keywords.get("use_reentrant"):
        log.info("gradient checkpointing: use_reentrant=True is ignored, nothing runs twice under tfg")


def _has_switch(module):
    setter = getattr(type(module), SETTER, None)
    if setter is None:
        return False
    if "value" in inspect.signature(setter).parameters:
        log.warning("%s switches its gradient checkpointing in a form older than Transformers 4.35, which tfg does not take over: "
                    "leave it off (tfg.wrap does without), or run under tfg.patch()", type(module).__name__)
        return False
    return True


def _owner(module):
    """The Takeover that stands on `module`, or None."""
    return getattr(vars(module).get(SETTER), "__self__", None)
