# SPDX-License-Identifier: BSD-3-Clause
"""tfg.checkpoint's arguments: the stock's keywords are reserved, all others are the function's."""

import functools
import gc

import pytest
import torch
import torch.utils.checkpoint as stock
from small_models import Block, batch
from torch import nn

import tfg
from tfg.checkpoint import _key, _module_keys


def double(x, *, by=2.0, flag=None):
    return (x.sin() * by).cos(), flag


@pytest.mark.parametrize("reserved", [
    {"use_reentrant": None}, {"use_reentrant": False}, {"debug": True}, {"preserve_rng_state": True}, {"preserve_rng_state": False},
    {"determinism_check": "default"}, {"determinism_check": "none"}, {"debug": False}, {"early_stop": True},
    {"early_stop": False}, {"context_fn": None}, {"context_fn": stock.noop_context_fn},
    {"respect_saved_tensors_hooks": None}, {"respect_saved_tensors_hooks": True}], ids=str)
def test_harmless_stock_keywords_are_accepted_and_kept_from_the_function(reserved):
    x = batch().requires_grad_()
    y, flag = tfg.checkpoint(double, x, by=3.0, flag="mine", **reserved)
    wanted = torch.autograd.grad(double(x, by=3.0)[0].sum(), x)[0]
    assert flag == "mine" and torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)


def test_an_unknown_determinism_check_is_the_stocks_error():
    with pytest.raises(ValueError) as ours:
        tfg.checkpoint(double, batch(), determinism_check="strict")
    with pytest.raises(ValueError) as theirs:
        stock.checkpoint(double, batch(), use_reentrant=False, determinism_check="strict")
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("function", [3, "block", torch.ones(2)], ids=str)
def test_a_function_that_cannot_be_called_is_named(function):
    with pytest.raises(TypeError) as raised:
        tfg.checkpoint(function, batch())
    assert repr(function) in str(raised.value)


def test_the_functions_own_errors_are_pythons():
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        tfg.checkpoint(double, batch(), wrong=1)


def test_a_site_is_the_code_or_the_modules_instance():
    block, other = Block(), Block()
    make = lambda: lambda x: x  # noqa: E731
    assert _key(make()) == _key(make()) != _key(double)
    assert _key(block) == _key(block.forward) == _key(functools.partial(block.forward, scale=2.0))
    assert _key(functools.partial(Block.forward, block)) == _key(block) != _key(other)
    assert _key(torch.sin) == _key(torch.cos) and _key(batch().sin) == _key(torch.ones(1).cos)


def test_a_modules_site_dies_with_it_and_leaves_no_trace_on_it():
    block, names = Block(), set(vars(Block()))
    _key(block)
    number = id(block)
    assert set(vars(block)) == names and number in _module_keys
    del block
    gc.collect()
    assert number not in _module_keys


def test_checkpoint_under_the_compiler_is_the_stocks():
    block = Block().eval()
    x = batch().requires_grad_()

    @functools.partial(torch.compile, backend="eager")
    def run(x):
        return tfg.checkpoint(block, x, scale=3.0, use_reentrant=False)

    wanted = torch.autograd.grad(block(x, scale=3.0).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(run(x).sum(), x)[0], wanted)


def test_modules_given_to_checkpoint_show_in_the_report():
    model = nn.Sequential(Block(), Block())
    tfg.checkpoint(model[1], batch().requires_grad_()).sum().backward()
    facts = tfg.report(model).to_dict()
    assert facts["settings"] == "" and [(b["name"], b["regions"]) for b in facts["blocks"]] == [("1", 1)]


def test_mutated_wants_a_tensor():
    tfg.mutated(torch.ones(2))
    with pytest.raises(TypeError, match="not 3"):
        tfg.mutated(3)


def test_memory_limits_are_checked():
    for bad in (1.5, True, "1GiB"):
        with pytest.raises(TypeError, match="bytes"):
            tfg.cpu.set_memory_limit(bad)
    with pytest.raises(ValueError, match="-1"):
        tfg.cpu.set_memory_limit(-1)
