# SPDX-License-Identifier: BSD-3-Clause
"""A raw pointer to a parameter, taken before the region, writes between forward and backward: plain's bits or tfg.Error.

At a later step every operator of the call site has been proven, so nothing but the parameter's own bytes can tell.
"""

import contextlib

import pytest
import torch
from bitwise import same_bits

import tfg
from tfg._engine import C

SHAPES = {"large weight": (200, 200), "small weight": (200, 8), "large bias": (20000,), "small bias": (8,)}


def region(x, parameter):
    y = x @ parameter if parameter.dim() == 2 else x[:, :1] + parameter
    return (y.sin() * 2).cos()


def plainly(function, *args):
    return function(*args)


def at_a_new_call_site():
    """tfg.checkpoint as called from a place that no other test has proven, or found to differ."""
    key = C.new_key("unseen")
    return lambda function, *args: C.run(C.LET_GO, key, function, args, {})


def kept_and_evicted():
    """As at_a_new_call_site, for a region that keeps; what it keeps leaves before the next one and before its backward."""
    key = C.new_key("unseen")

    def call(function, *args):
        return C.run(C.KEEP, key, function, args, {})

    call.before_backward = lambda: C.evict(2**40)
    return call


@contextlib.contextmanager
def roomy_budget():
    C.set_budget(C.live_bytes() + 2**40, False)
    try:
        yield
    finally:
        C.set_budget(-1, False)


def train(call, shape, written_at, n_steps=3):
    """Gradients of the last of n_steps; the parameter is written through NumPy before that step's backward."""
    generator = torch.Generator().manual_seed(5)
    parameter = torch.randn(shape, generator=generator, requires_grad=True)
    raw = parameter.detach().numpy()
    x = torch.randn(4, 200, generator=generator, requires_grad=True)
    for step in range(n_steps):
        x.grad = parameter.grad = None
        y = call(region, x, parameter)
        if step == written_at:
            raw += 1
        getattr(call, "before_backward", int)()
        y.sum().backward()
    return x.grad, parameter.grad


@pytest.mark.parametrize("written_at", [0, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_raw_write_to_a_parameter_is_never_silent(shape, written_at):
    n_steps = written_at + 1
    plain = train(plainly, shape, written_at, n_steps)
    try:
        got = train(at_a_new_call_site(), shape, written_at, n_steps)
    except tfg.Error:
        return
    assert all(map(same_bits, plain, got))


@pytest.mark.parametrize("written_at", [0, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_raw_write_before_an_eviction_is_never_silent(shape, written_at):
    n_steps = written_at + 1
    plain = train(plainly, shape, written_at, n_steps)
    with roomy_budget():  # under no pressure when the region ends
        try:
            got = train(kept_and_evicted(), shape, written_at, n_steps)
        except tfg.Error:
            return
    assert all(map(same_bits, plain, got))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_parameter_that_nobody_writes_is_accepted_after_an_eviction(shape):
    plain = train(plainly, shape, written_at=None)
    with roomy_budget():
        assert all(map(same_bits, plain, train(kept_and_evicted(), shape, written_at=None)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_parameter_that_nobody_writes_is_accepted(shape):
    plain = train(plainly, shape, written_at=None)
    assert all(map(same_bits, plain, train(at_a_new_call_site(), shape, written_at=None)))


def walk_twice(call):
    generator = torch.Generator().manual_seed(5)
    parameter = torch.randn(200, 200, generator=generator, requires_grad=True)
    raw = parameter.detach().numpy()
    x = torch.randn(4, 200, generator=generator, requires_grad=True)
    call(region, x, parameter).sum().backward()  # proves the call site
    x.grad = parameter.grad = None
    loss = call(region, x, parameter).sum()
    loss.backward(retain_graph=True)
    raw += 1
    loss.backward()
    return x.grad, parameter.grad


def test_a_raw_write_between_two_walks_of_one_graph_is_never_silent():
    plain = walk_twice(plainly)
    try:
        got = walk_twice(at_a_new_call_site())
    except tfg.Error:
        return
    assert all(map(same_bits, plain, got))
