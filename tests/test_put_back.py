# SPDX-License-Identifier: BSD-3-Clause
"""What a replay has put back is a new storage: who writes it during backward is seen as who writes the first one."""

import contextlib

import pytest
import torch
from bitwise import same_bits

import tfg
from tfg import _C


def through_data(a):
    a.data.zero_()


def through_numpy(a):
    a.numpy()[:] = 0


class Scratch(torch.autograd.Function):
    """Twice its input; backward uses what it saved as scratch where `write` is set."""

    write = None

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * 2

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        if Scratch.write:
            Scratch.write(a)
        return grad * 2


def block(x):
    a = x.sin()
    c = a.sin().exp()
    return Scratch.apply(a).sum() + c.sum()


def gradient(call):
    x = torch.linspace(-3, 3, 1000).requires_grad_()
    call(block, x).backward()
    return x.grad


@contextlib.contextmanager
def no_room():
    _C.set_budget(_C.live_bytes(), False)
    try:
        yield
    finally:
        _C.set_budget(-1, False)


@pytest.mark.parametrize("around", [contextlib.nullcontext, no_room])
@pytest.mark.parametrize("write", [through_data, through_numpy])
def test_a_writer_that_moves_no_version_during_backward_is_seen(monkeypatch, write, around):
    key = _C.new_key("put back")
    flags = _C.LET_GO if around is contextlib.nullcontext else _C.KEEP
    with around():
        for now in (None, None, write, write, None):  # at first every operator is proven
            monkeypatch.setattr(Scratch, "write", now and staticmethod(now))
            wanted = gradient(lambda function, x: function(x))
            assert same_bits(gradient(lambda function, x: _C.run(flags, key, function, (x,), {})), wanted)


# -- a region in a region -------------------------------------------------------------------------------------------------------
def nested(inner_call, n_before):
    def inner(a):
        return a.sin().sin()

    def outer(x):
        for _ in range(n_before):
            x = x.cos()
        return inner_call(inner, x).cos()

    return outer


@pytest.mark.parametrize("n_before", [1, 8])
def test_a_region_in_a_region_keeps_no_more_than_a_flat_one(n_before):
    def bytes_after(inner_call):
        x = torch.randn(1 << 16, requires_grad=True)
        before = tfg.cpu.memory_allocated()
        y = tfg.checkpoint(nested(inner_call, n_before), x)
        held = tfg.cpu.memory_allocated() - before
        assert same_bits(torch.autograd.grad(y.sum(), x)[0],
                         torch.autograd.grad(nested(lambda f, a: f(a), n_before)(x).sum(), x)[0])
        return held

    assert bytes_after(tfg.checkpoint) == bytes_after(lambda function, a: function(a))


def test_a_region_in_a_region_can_be_evicted_like_a_flat_one():
    def evicted(inner_call):
        x = torch.randn(1 << 16, requires_grad=True)
        y = _C.run(_C.KEEP, _C.new_key("nested"), nested(inner_call, 8), (x,), {})
        freed = _C.evict(2**40)
        y.sum().backward()
        return freed

    assert evicted(tfg.checkpoint) == evicted(lambda function, a: function(a)) > 0
