# SPDX-License-Identifier: BSD-3-Clause
"""Transformers' gradient checkpointing in a wrapped model: every way of switching it goes through tfg, with the plain run's bits.

The contract with Transformers (4.57 and 5.x) is pinned at the end: when an upstream release changes it, those tests say what.
"""

import copy
import functools
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from bitwise import differences

import tfg
from tfg import takeover
from tfg.subclass import state_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("one_thread", "no_budget_left")]

from transformers import modeling_layers, modeling_utils  # noqa: E402

SHAPE = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
WAYS = ({"interval": 1}, {"interval": 2}, {"every_n_layers": 2}, {"budget": "8GiB"})


def llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, attention_dropout=0.1, **more)
    return transformers.LlamaForCausalLM(config).train()


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64)).train()


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).train()


def ids(seed=0):
    return torch.randint(4, 61, (2, 12), generator=torch.Generator().manual_seed(seed))


def step(model, use_cache=False, **given):
    """Loss and gradients, None where there is none, of a batch. Without a cache, as gradient checkpointing has it: a cache joins
    keys into other memory, and the backward of a matrix product depends on that to the last bit."""
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(input_ids=ids(), labels=ids(), use_cache=use_cache, **given).loss
    loss.backward()
    return [loss.detach(), *[None if p.grad is None else p.grad.clone() for p in model.parameters()]]


def layers(model):
    return [m for m in model.modules() if isinstance(m, modeling_layers.GradientCheckpointingLayer)]


def regions(model):
    return [block["regions"] for block in tfg.report(model).to_dict()["blocks"]]


class Forwards:
    """How often the first piece of each layer was called: Python of the layer that runs again shows here."""

    def __init__(self, model):
        self.counts = {}
        for layer in layers(model):
            inner = next(piece for piece in layer.modules() if not list(piece.children()))
            inner.register_forward_pre_hook(lambda m, args: self.counts.update({m: self.counts.get(m, 0) + 1}))

    def once(self):
        return bool(self.counts) and set(self.counts.values()) == {1}


# -- one line, then the script as it was ----------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("build", [llama, gpt2, t5], ids=lambda build: build.__name__)
def test_enabled_after_wrap_is_bitwise_plain_and_runs_once(build, way):
    wanted = step(build())
    model = tfg.wrap(build(), **way)
    model.gradient_checkpointing_enable()
    forwards = Forwards(model)
    assert not differences(step(model), wanted)
    assert forwards.once() and any(regions(model))


@pytest.mark.parametrize("how", [{}, {"use_reentrant": False}, {"use_reentrant": True}, {"preserve_rng_state": True}], ids=str)
def test_enabled_before_wrap_is_taken_over(how):
    wanted = step(llama())
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    forwards = Forwards(model)
    assert not differences(step(tfg.wrap(model, interval=1)), wanted)
    assert forwards.once() and regions(model) == [1, 1, 1, 1]


def test_enabled_on_an_inner_model_is_taken_over():
    model = tfg.wrap(llama(), interval=1)
    wanted = step(llama())
    model.model.gradient_checkpointing_enable()
    forwards = Forwards(model)
    assert not differences(step(model), wanted) and forwards.once()


def test_off_is_plain_and_on_again_is_tfg():
    model = tfg.wrap(llama(), interval=1)
    wanted = step(llama())
    for switch, n_regions in ((model.gradient_checkpointing_disable, 0), (model.gradient_checkpointing_enable, 4)):
        switch()
        before = sum(regions(model))
        assert not differences(step(model), wanted)
        assert sum(regions(model)) - before == n_regions


def test_every_n_layers_of_transformers_leaves_layers_out():
    model = tfg.wrap(llama(), interval=1)
    if "every_n_layers" in inspect.signature(type(model)._set_gradient_checkpointing).parameters:
        model.gradient_checkpointing_enable(every_n_layers=2)
    else:  # before 5.16 a user does it by hand
        model.gradient_checkpointing_enable()
        for layer in layers(model)[1::2]:
            layer.gradient_checkpointing = False
        tfg.wrap(model, interval=1)
    assert not differences(step(model), step(llama()))
    assert regions(model) == [1, 0, 1, 0]


def test_wrap_s_every_n_layers_passes_over_layers_that_are_switched_on():
    model = tfg.wrap(llama(), every_n_layers=2)
    model.gradient_checkpointing_enable()
    forwards = Forwards(model)
    assert not differences(step(model), step(llama()))
    assert forwards.once() and [state_of(layer) is None for layer in layers(model)] == [False, True, False, True]
    report = tfg.report(model).to_dict()
    assert [block["name"] for block in report["blocks"]] == ["model.layers.0", "model.layers.2"]


def test_layers_that_are_no_blocks_are_checkpointed_by_tfg():
    model = tfg.wrap(llama(), interval=1, blocks=["model.layers.0", "model.layers.1"])
    model.gradient_checkpointing_enable()
    forwards = Forwards(model)
    assert not differences(step(model), step(llama()))
    assert forwards.once()
    assert [tfg.checkpoint.__globals__["known_key"](layer) is not None for layer in layers(model)] == [False, False, True, True]


def test_no_grad_records_nothing_and_eval_is_plain():
    model = tfg.wrap(llama(), interval=1)
    model.gradient_checkpointing_enable()
    with torch.no_grad():
        model(input_ids=ids())
    assert sum(regions(model)) == 0
    model.eval()
    assert not differences(step(model), step(llama().eval()))


def test_caches_are_handled_as_the_stock_path_does():
    """A cache that is handed in: without checkpointing it is filled, with it the layers leave it empty. Once, not twice."""
    def filled(model):
        cache = transformers.DynamicCache(config=model.config)
        name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        return step(model, **{name: cache}, use_cache=True), cache.get_seq_length()

    stock, ours = llama(), tfg.wrap(llama(), interval=1)
    assert not differences(filled(ours), filled(stock))
    for model in (stock, ours):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert not differences(filled(ours), filled(stock))


def test_generation_between_steps_is_plain():
    model, twin = tfg.wrap(llama(), interval=1), llama()
    model.gradient_checkpointing_enable()
    given = {"input_ids": ids(), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.eval().generate(**given), twin.eval().generate(**given))
    assert not differences(step(model.train()), step(twin.train()))


# -- what it leaves alone, copies ------------------------------------------------------------------------------------------
def test_unwrap_gives_everything_back():
    model = llama()
    model.gradient_checkpointing_enable()
    for hook in getattr(model, "_require_grads_hooks", ()):
        hook.remove()
    before = [(type(m), {k: v for k, v in vars(m).items()}) for m in model.modules()]
    names = list(model.state_dict())
    tfg.wrap(model, interval=1)
    assert list(model.state_dict()) == names
    tfg.unwrap(model)
    assert [(type(m), dict(vars(m))) for m in model.modules()] == before


def test_unwrap_leaves_the_switch_as_it_was_set_meanwhile():
    model = tfg.wrap(llama(), interval=1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tfg.unwrap(model)
    layer = layers(model)[0]
    assert layer.gradient_checkpointing and layer._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint
    forwards = Forwards(model)
    assert not differences(step(model), step(llama()))
    assert set(forwards.counts.values()) == {2}


@pytest.mark.parametrize("made", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_has_a_switch_of_its_own(made):
    model = tfg.wrap(llama(), interval=1)
    twin = made(model)
    twin.gradient_checkpointing_disable()
    assert [state_of(layer).is_off for layer in layers(twin)] == [True] * 4
    assert [state_of(layer).is_off for layer in layers(model)] == [False] * 4
    twin.gradient_checkpointing_enable()
    forwards = Forwards(twin)
    assert not differences(step(twin), step(llama())) and forwards.once()


def test_a_copy_made_while_it_is_on_goes_through_tfg():
    model = tfg.wrap(llama(), interval=1)
    model.gradient_checkpointing_enable()
    twin = copy.deepcopy(model)
    forwards = Forwards(twin)
    assert not differences(step(twin), step(llama())) and forwards.once()


def test_a_shallow_copy_of_a_model_that_is_gone_says_so():
    model = tfg.wrap(llama(), interval=1)
    twin = copy.copy(model)
    del model
    gc.collect()
    with pytest.raises(tfg.Error, match="call tfg.wrap on the copy"):
        twin.gradient_checkpointing_enable()


def test_a_wrapped_model_dies_without_the_garbage_collector():
    model = tfg.wrap(llama(), interval=1)
    model.gradient_checkpointing_enable()
    step(model)
    seen = weakref.ref(model.model.layers)
    gc.collect()
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


# -- frozen layers below adapters ------------------------------------------------------------------------------------------
def frozen_prefix(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3" in name)
    return model


def saved_tensors(model):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = model(input_ids=ids(), labels=ids()).loss
    return len(saved), loss


def test_a_frozen_prefix_goes_on_saving_nothing():
    model = tfg.wrap(frozen_prefix(llama()), interval=1)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert not differences(step(model), step(frozen_prefix(llama())))
    blocks = tfg.report(model).to_dict()["blocks"]
    assert [block["saved_bytes"] > 0 for block in blocks] == [False, False, False, True]
    model.disable_input_require_grads()


def test_input_gradients_asked_for_meanwhile_are_there_after_unwrap():
    model = tfg.wrap(frozen_prefix(llama()), interval=1)
    model.enable_input_require_grads()
    assert not model.get_input_embeddings()._forward_hooks
    tfg.unwrap(model)
    assert len(model.get_input_embeddings()._forward_hooks) == 1


# -- two libraries at once -------------------------------------------------------------------------------------------------
def test_offload_of_transformers_is_refused():
    model = tfg.wrap(llama(), interval=1)
    if "offload" not in inspect.signature(modeling_utils.PreTrainedModel._activation_checkpointing_enable
                                          if hasattr(modeling_utils.PreTrainedModel, "_activation_checkpointing_enable")
                                          else modeling_utils.PreTrainedModel.gradient_checkpointing_enable).parameters:
        pytest.skip("this Transformers has no offload")
    with pytest.raises(ValueError, match="offload=True.*tfg.unwrap"):
        model.gradient_checkpointing_enable(offload=True)
    assert not any(layer.gradient_checkpointing for layer in layers(model))
    tfg.unwrap(model).gradient_checkpointing_enable(offload=True)
    with pytest.raises(ValueError, match="offload=True"):
        tfg.wrap(model, interval=1)
    assert all(state_of(layer) is None for layer in layers(model))


def test_a_context_fn_is_refused():
    model = tfg.wrap(llama(), interval=1)
    context_fn = functools.partial(tfg.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    with pytest.raises(ValueError, match="context_fn.*tfg.patch"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": context_fn})


def test_the_old_form_of_the_switch_is_left_alone(caplog):
    class Old(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

        def _set_gradient_checkpointing(self, module, value=False):
            pass

    model = tfg.wrap(Old(), interval=1)
    assert "_set_gradient_checkpointing" not in vars(model) and "older than Transformers 4.35" in caplog.text


# -- the contract ----------------------------------------------------------------------------------------------------------
def test_contract_the_setter_sets_function_and_flag_on_every_layer():
    parameters = inspect.signature(modeling_utils.PreTrainedModel._set_gradient_checkpointing).parameters
    assert {"enable", "gradient_checkpointing_func"} <= parameters.keys(), "Transformers' switch takes other arguments now"
    model, marker = llama(), functools.partial(torch.utils.checkpoint.checkpoint)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=marker)
    for layer in layers(model):
        assert vars(layer)[takeover.FUNC] is marker and vars(layer)[takeover.FLAG] is True, "the layers' attributes are called otherwise now"


def test_contract_every_public_switch_ends_at_the_setter():
    model, seen = llama(), []
    inner = type(model)._set_gradient_checkpointing
    model._set_gradient_checkpointing = lambda *args, **how: seen.append((args, how)) or inner(model, *args, **how)
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if hasattr(model, f"{name}_enable"):
            getattr(model, f"{name}_enable")()
            getattr(model, f"{name}_disable")()
    assert len(seen) >= 2 and len(seen) % 2 == 0, "gradient_checkpointing_enable does not end at _set_gradient_checkpointing any more"


def test_contract_the_layer_hands_over_itself_in_a_partial():
    model, seen = llama(), []

    def func(function, *args):
        seen.append((function, args))
        return function(*args)

    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=func)
    wanted = step(llama())
    assert not differences(step(model), wanted)
    assert [takeover.layer_of(function) for function, _ in seen] == layers(model), "what a layer hands over has another form now"
    assert all(args[0].shape == (2, 12, 32) for _, args in seen)


def test_contract_the_layer_s_subclass_hook_is_known():
    """From 5.23 forward is wrapped in __init_subclass__; before, __call__ does it. Our class must get whichever it is."""
    layer = modeling_layers.GradientCheckpointingLayer
    assert "__init_subclass__" in vars(layer) or "__call__" in vars(layer), "checkpointing is neither in __call__ nor in forward now"
