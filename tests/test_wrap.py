# SPDX-License-Identifier: BSD-3-Clause
"""wrap and unwrap: what they leave alone, what they find, what they refuse, and that training is the plain one."""

import copy
import inspect
import logging
import subprocess
import sys

import pytest
import torch
from small_models import Block, Stack, assert_same_bits, batch, one_step, plain, train
from torch import nn

import tfg
from tfg.blocks import find_stacks
from tfg.subclass import STATE


def block_names(model, blocks=None):
    return [name for stack in find_stacks(model, blocks) for _, name, _ in stack.entries]


# -- what it leaves alone -------------------------------------------------------------------------------------------------
def test_wrap_works_in_place_and_leaves_names_alone():
    model, twin = Stack(), Stack()
    assert tfg.wrap(model, interval=1) is model
    block = model.blocks[0]
    assert isinstance(block, Block) and type(block) is not Block
    assert (type(block).__name__, type(block).__qualname__, type(block).__module__) == ("Block", "Block", Block.__module__)
    assert repr(model) == repr(twin) and list(model.state_dict()) == list(twin.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in twin.named_modules()]
    assert inspect.signature(block.forward) == inspect.signature(twin.blocks[0].forward)


def test_unwrap_restores_every_class_and_dict():
    model = Stack()
    before = [(type(m), dict(vars(m))) for m in model.modules()]
    assert tfg.unwrap(tfg.wrap(model, interval=2)) is model
    assert [(type(m), dict(vars(m))) for m in model.modules()] == before
    assert tfg.unwrap(model) is model


def test_a_forward_set_on_the_instance_runs_inside_and_comes_back():
    model = Stack()
    block = model.blocks[1]
    ours = block.forward = lambda x, scale: Block.forward(block, x, scale) * 2
    wanted = one_step(model, batch())
    tfg.wrap(model, interval=1)
    torch.manual_seed(0)
    got = one_step(model, batch())
    torch.manual_seed(0)
    assert vars(tfg.unwrap(model).blocks[1])["forward"] is ours
    assert_same_bits(got, one_step(model, batch()))
    assert len(wanted) == len(got) and tfg.report(tfg.wrap(model, interval=1)).to_dict()["blocks"][1]["name"] == "blocks.1"


# -- training ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [{"interval": k} for k in (1, 2, 3, 4)] + [{"every_n_layers": k} for k in (1, 2, 3)], ids=str)
def test_training_is_bitwise_plain_and_python_runs_once(how):
    model = Stack()
    wanted = plain(model)
    assert_same_bits(train(tfg.wrap(model, **how)), wanted)
    assert [block.n_forwards for block in model.blocks] == [2, 2, 2, 2]


def test_wrapping_again_reconfigures():
    model = Stack()
    wanted = plain(model)
    for how in ({"interval": 1}, {"every_n_layers": 2}, {"interval": 3}):
        tfg.wrap(model, **how)
    assert [STATE in vars(b) for b in model.blocks] == [True] * 4
    tfg.wrap(model, every_n_layers=3)
    assert [STATE in vars(b) for b in model.blocks] == [True, False, False, True]
    assert [type(b) is Block for b in model.blocks] == [False, True, True, False]
    assert_same_bits(train(model), wanted)


@pytest.mark.parametrize("change", [tfg.unwrap, lambda m: tfg.wrap(m, interval=1), lambda m: tfg.wrap(m, every_n_layers=2)])
def test_a_change_between_forward_and_backward_is_harmless(change):
    def step(model, between):
        torch.manual_seed(0)
        y = model(batch())
        between(model)
        y.square().sum().backward()
        return [y.detach(), *[p.grad for p in model.parameters()]]

    wanted = step(Stack(), lambda model: None)
    assert_same_bits(step(tfg.wrap(Stack(), interval=2), change), wanted)


def test_eval_and_no_grad_are_plain():
    model, twin = tfg.wrap(Stack(), interval=2).eval(), Stack().eval()
    with torch.no_grad():
        assert torch.equal(model(batch()), twin(batch()))
    with torch.inference_mode():
        assert torch.equal(model(batch()), twin(batch()))
    model.train(), twin.train()
    assert_same_bits(train(model), train(twin))


def test_an_error_in_a_block_passes_and_the_next_step_is_right():
    class Fussy(Block):
        def forward(self, x, scale=1.0):
            if x.isnan().any():
                raise KeyboardInterrupt
            return super().forward(x, scale)

    model = Stack(block=Fussy)
    wanted = plain(model)
    tfg.wrap(model, interval=3)
    with pytest.raises(KeyboardInterrupt):
        model(batch() * float("nan"))
    assert_same_bits(train(model), wanted)


def test_a_subclass_hook_sees_only_the_users_classes():
    seen = []

    class Registered(Block):
        def __init_subclass__(cls, tag, **kwargs):
            seen.append(tag)

    tfg.wrap(Stack(block=Registered), interval=1)
    assert seen == []
    type("Named", (Registered,), {}, tag="user")
    assert seen == ["user"]


# -- finding blocks ---------------------------------------------------------------------------------------------------------
def test_outermost_containers_are_found_with_mixed_classes():
    model = nn.Module()
    model.one = nn.ModuleList([Stack(2)])
    model.mixed = nn.ModuleDict({"a": Stack(3), "b": Block()})
    model.seq = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Tanh()))
    assert block_names(model) == ["one.0.blocks.0", "one.0.blocks.1", "mixed.a", "mixed.b", "seq.0", "seq.1"]


def test_a_root_sequential_and_lists_of_lists_are_found():
    assert block_names(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) == ["0", "1"]
    nested = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
    assert block_names(nested) == ["0.0", "0.1", "1.0", "1.1"]


def test_no_split_modules_come_first_and_only_inside_containers():
    class Named(nn.Module):
        _no_split_modules = ["Block", "Embedding"]

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(3, 8)
            self.stages = nn.ModuleList([Stack(2), Stack(2)])
            self.tail = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    assert block_names(Named()) == [f"stages.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)]


def test_patterns_and_modules_name_blocks():
    model = Stack()
    assert block_names(model, "blocks.[12]") == ["blocks.1", "blocks.2"]
    assert block_names(model, "blocks.*.up") == [f"blocks.{i}.up" for i in range(4)]
    assert block_names(model, ["blocks.*.up", model.blocks[0]]) == ["blocks.0", "blocks.1.up", "blocks.2.up", "blocks.3.up"]
    wanted = plain(model)
    assert_same_bits(train(tfg.wrap(model, interval=2, blocks="blocks.[12]")), wanted)
    with pytest.raises(ValueError, match="'layers.*' matches no module"):
        tfg.wrap(model, interval=1, blocks=["blocks.*", "layers.*"])
    with pytest.raises(ValueError, match="the given Linear matches no module"):
        tfg.wrap(model, interval=1, blocks=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="ModuleList, which has no forward; did you mean 'blocks.*'"):
        tfg.wrap(model, interval=1, blocks="blocks")
    with pytest.raises(TypeError, match="not 3"):
        tfg.wrap(model, interval=1, blocks=[3])


def test_a_model_without_blocks_says_how_to_name_them():
    with pytest.raises(ValueError, match='Linear has no repeated blocks.*blocks="path.to.layers'):
        tfg.wrap(nn.Linear(2, 2), interval=1)
    with pytest.raises(TypeError, match="not 'model'"):
        tfg.wrap("model", interval=1)


# -- arguments ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["interval", "every_n_layers"])
@pytest.mark.parametrize("value", [0, -3, 2.0, True, "two", [1]])
def test_bad_counts_are_value_errors_with_the_value(name, value):
    with pytest.raises(ValueError, match=name) as raised:
        tfg.wrap(Stack(), **{name: value})
    assert repr(value) in str(raised.value)


def test_two_dials_are_refused():
    with pytest.raises(ValueError, match="not both"):
        tfg.wrap(Stack(), interval=1, every_n_layers=1)


def test_a_refused_wrap_changes_nothing():
    model = tfg.wrap(Stack(), interval=2)
    with pytest.raises(ValueError):
        tfg.wrap(model, interval=1, blocks="nothing.*")
    assert str(tfg.report(model)).startswith("tfg: interval=2")


def test_an_interval_above_the_blocks_is_clamped_with_one_line(caplog):
    caplog.set_level(logging.INFO, logger="tfg")
    model = Stack()
    wanted = plain(model)
    tfg.wrap(model, interval=99)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "interval=99 is more than the 4 blocks" in lines[0] and "interval=4" in lines[1]
    assert_same_bits(train(model), wanted)


def test_wrap_says_what_it_chose_in_one_line(caplog):
    caplog.set_level(logging.INFO, logger="tfg")
    tfg.wrap(Stack(), interval=2)
    assert [r.getMessage() for r in caplog.records] == ["wrap: 4 blocks (Block) in 1 stack (blocks), interval=2, 4 regions"]


# -- environment -------------------------------------------------------------------------------------------------------------
def run_python(code, **environment):
    import os
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=os.path.dirname(__file__),
                          env={**os.environ, **environment})


def test_disable_makes_all_of_it_do_nothing():
    code = """
import torch, tfg
from small_models import Stack, Language, batch
model = tfg.wrap(Stack(), interval=2)
assert vars(model.blocks[0]).keys() == vars(Stack().blocks[0]).keys() and type(model.blocks[0]) is type(Stack().blocks[0])
assert tfg.checkpoint(torch.sin, torch.ones(2), use_reentrant=False).tolist() == torch.ones(2).sin().tolist()
assert all(p.requires_grad for p in model.parameters()) and tfg.freeze(Language(), n_layers=1).names == ()
tfg.cpu.reset_peak_memory_stats(); tfg.cpu.set_memory_limit(1); tfg.mutated(torch.ones(1)); str(tfg.report(tfg.unwrap(model)))
assert tfg.cpu.memory_allocated() == tfg.cpu.max_memory_allocated() == 0 and tfg.dynamic_interval(32, 4096) == 2
import sys; assert "tfg._C" not in sys.modules
"""
    done = run_python(code, TFG_DISABLE="1")
    assert done.returncode == 0, done.stderr


def test_an_unknown_stress_word_is_named():
    done = run_python("import tfg", TFG_STRESS="drop,shake")
    assert done.returncode != 0 and "'shake'" in done.stderr


def test_an_allocator_left_alone_counts_nothing_and_refuses_limits():
    code = """
import tfg, torch
tfg.cpu.set_memory_limit(None)
try: tfg.cpu.set_memory_limit(1 << 20)
except tfg.Error as error: assert "TFG_CPU_ALLOCATOR" in str(error)
else: raise SystemExit("no error")
"""
    done = run_python(code, TFG_CPU_ALLOCATOR="0")
    assert done.returncode == 0, done.stderr


def test_shared_layers_train_right():
    def build():
        model = Stack()
        model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1]] * 2)
        return model

    for interval in (1, 2, 3, 4):
        assert_same_bits(train(tfg.wrap(build(), interval=interval)), train(build()))


def test_several_stacks_and_blocks_outside_the_forward_train_right():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Stack(3), Stack(2, seed=1)

        def forward(self, x):
            return self.second(self.first(x)) + self.first.blocks[1](x)

    for interval in (1, 2, 3):
        assert_same_bits(train(tfg.wrap(Two(), interval=interval)), train(Two()))


def test_wrapped_models_still_work_with_deepcopied_optimizers_and_hooks():
    model, fired = tfg.wrap(Stack(), interval=2), []
    model.blocks[0].register_forward_hook(lambda m, a, out: fired.append("forward") or out * 2)
    model.blocks[0].register_full_backward_hook(lambda m, i, o: fired.append("backward"))
    twin = tfg.unwrap(copy.deepcopy(model))
    assert_same_bits(train(model), train(twin))
    assert fired.count("forward") == 4 and fired.count("backward") == 4


def test_dynamic_follows_each_batch_where_the_first_layers_are_not_blocks():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).sin()

    model = nn.Sequential(*[Layer() for _ in range(40)])
    tfg.wrap(model, interval="dynamic", blocks=[str(i) for i in range(2, 40)])
    for tokens in (4096, 16, 4096):
        model(torch.randn(1, tokens, 4)).sum().backward()
        here = model[2].__dict__["_tfg_state"].stack.here
        assert here.dial == tfg.dynamic_interval(38, tokens)
