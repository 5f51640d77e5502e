# SPDX-License-Identifier: BSD-3-Clause
"""PEFT: adapters on a frozen base, put on before or after tfg.wrap, give the plain run's gradients to the last bit."""

import pytest
import torch
from bitwise import differences

import tfg

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread", "no_budget_left")]


def base(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                                      num_key_value_heads=2, attention_dropout=0.1, use_cache=False)
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def ids():
    return torch.randint(4, 61, (2, 12), generator=torch.Generator().manual_seed(0))


ATTENTION = ["q_proj", "v_proj"]
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=ATTENTION, lora_dropout=0.1, init_lora_weights=False, task_type="CAUSAL_LM"),
    "upper_lora": lambda: peft.LoraConfig(r=4, target_modules=ATTENTION, layers_to_transform=[2], init_lora_weights=False,
                                          task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=ATTENTION, use_dora=True, init_lora_weights=False, task_type="CAUSAL_LM"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"],
                                  init_ia3_weights=False, task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}
WAYS = ({"interval": 1}, {"interval": 2}, {"budget": "8GiB"})
ORDERS = ("adapters, wrap", "wrap, adapters", "wrap, switch, adapters", "switch, adapters, wrap", "adapters, wrap, switch")


def adapted(model, name):
    torch.manual_seed(1)
    return peft.get_peft_model(model, ADAPTERS[name]())


def made(name, order, way, dtype=torch.float32):
    model = base(dtype)
    for deed in order.split(", "):
        if deed == "adapters":
            model = adapted(model, name)
        elif deed == "wrap":
            model = tfg.wrap(model, **way)
        else:
            model.gradient_checkpointing_enable()
    return model


def step(model, n_steps=2):
    """Losses, gradients and weights of two optimizer steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    left = []
    for i in range(n_steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = model(input_ids=ids(), labels=ids()).loss
        loss.backward()
        left += [loss.detach(), *[None if p.grad is None else p.grad.clone() for p in model.parameters()]]
        optimizer.step()
    return left + [p.detach().clone() for p in trained]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_train_as_plain(name, way):
    model = made(name, "adapters, wrap", way)
    got = step(model)
    assert not differences(got, step(adapted(base(), name)))
    assert sum(g is not None and bool(g.any()) for g in got[1:]) > 2
    assert all(block["regions"] == 2 for block in tfg.report(model).to_dict()["blocks"])


@pytest.mark.parametrize("order", ORDERS[1:])
def test_any_order_of_wrap_adapters_and_switch_is_plain(order):
    model = made("upper_lora", order, {"interval": 1})
    assert not differences(step(model), step(adapted(base(), "upper_lora")))


@pytest.mark.parametrize("order", [order for order in ORDERS if not order.startswith("switch")])
def test_layers_below_the_first_adapter_save_nothing_and_are_not_replayed(order):
    """PEFT asks for gradients of the embedding's output where checkpointing is on; that would run backward through all layers."""
    model = made("upper_lora", order, {"interval": 1})
    step(model)
    blocks = tfg.report(model).to_dict()["blocks"]
    assert [block["saved_bytes"] > 0 for block in blocks] == [False, False, True]
    assert [block["ops_replayed"] > 0 for block in blocks] == [False, False, True]


def test_adapters_in_float32_over_a_base_in_bfloat16():
    model = made("lora", "adapters, wrap", {"interval": 1}, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    assert not differences(step(model), step(adapted(base(torch.bfloat16), "lora")))


def test_the_preparation_for_quantised_training_goes_through():
    def prepared(model):
        return adapted(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False), "lora")

    wanted = step(prepared(base(torch.bfloat16)))
    assert not differences(step(prepared(tfg.wrap(base(torch.bfloat16), interval=1))), wanted)


def test_adapters_are_saved_merged_and_switched_off_as_ever(tmp_path):
    model, twin = made("lora", "adapters, wrap", {"interval": 1}), adapted(base(), "lora")
    step(model), step(twin)
    assert list(model.state_dict()) == list(twin.state_dict())
    model.save_pretrained(tmp_path)
    back = peft.PeftModel.from_pretrained(tfg.wrap(base(), interval=1), tmp_path, is_trainable=True)
    assert not differences([p.detach() for p in back.parameters()], [p.detach() for p in twin.parameters()])
    with model.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        assert not differences(model.eval()(input_ids=ids()).logits, twin.eval()(input_ids=ids()).logits)
    assert not differences(model.merge_and_unload().state_dict(), twin.merge_and_unload().state_dict())


def test_a_budget_that_presses_gives_the_same_adapters():
    wanted = step(adapted(base(), "lora"))
    model = adapted(base(), "lora")
    tfg.wrap(model, budget=tfg.cpu.memory_allocated() + 2**16)
    assert not differences(step(model), wanted)
    assert tfg.report(model).to_dict()["total"]["evictions"] > 0
