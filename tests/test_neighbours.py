# SPDX-License-Identifier: BSD-3-Clause
"""Other memory libraries around a wrapped model: what composes is bitwise plain, what would do the work twice is refused."""

import contextlib
import functools

import pytest
import torch
from bitwise import differences
from small_models import Block, Stack, batch, train
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

import tfg
from tfg import neighbours

pytestmark = pytest.mark.usefixtures("one_thread", "no_budget_left")
WAYS = ({"interval": 1}, {"interval": 2}, {"budget": "8GiB"})


def wrap_in_place(model, wrapper=checkpoint_wrapper):
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Block))
    return model


def forwards(model):
    return sum(module.n_forwards for module in model.modules() if isinstance(module, Block))


# -- checkpoint_wrapper ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("impl", CheckpointImpl)
def test_wrap_over_checkpoint_wrappers_is_refused(impl):
    model = wrap_in_place(Stack(), functools.partial(checkpoint_wrapper, checkpoint_impl=impl))
    with pytest.raises(ValueError, match=r"blocks.0 is a CheckpointWrapper.*checkpoint_fn=tfg.checkpoint"):
        tfg.wrap(model, interval=1)
    assert not any("_tfg_state" in vars(module) for module in model.modules())


def test_a_checkpoint_wrapper_inside_a_block_is_refused():
    model = Stack()
    model.blocks[1].up = checkpoint_wrapper(model.blocks[1].up)
    with pytest.raises(ValueError, match=r"blocks.1.up is a CheckpointWrapper"):
        tfg.wrap(model, budget="8GiB")


def test_checkpoint_wrappers_with_tfg_s_function_run_once():
    model = wrap_in_place(Stack(), functools.partial(checkpoint_wrapper, checkpoint_fn=tfg.checkpoint))
    assert not differences(train(model), train(Stack()))
    assert forwards(model) == 2 * 4
    assert not differences(train(tfg.wrap(wrap_in_place(Stack(), functools.partial(checkpoint_wrapper, checkpoint_fn=tfg.checkpoint)),
                                          interval=2)), train(Stack()))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("impl", CheckpointImpl)
def test_checkpoint_wrappers_over_wrapped_blocks_are_right(impl, way, caplog, monkeypatch):
    """Put on afterwards, where wrap can not see them: blocks stand aside where the wrapper will call them again."""
    model = wrap_in_place(tfg.wrap(Stack(), **way), functools.partial(checkpoint_wrapper, checkpoint_impl=impl))
    monkeypatch.setattr(neighbours, "_has_stood_aside", False)
    assert not differences(train(model), train(Stack()))
    if impl is CheckpointImpl.NO_REENTRANT:
        assert tfg.report(model).to_dict()["total"]["regions"] == 0
        assert caplog.text.count("is called inside torch.utils.checkpoint") == 1


def test_composable_checkpoint_is_refused_and_right_when_put_on_afterwards():
    model = Stack()
    composable_checkpoint(model.blocks[0])
    with pytest.raises(ValueError, match=r"blocks.0 has torch.distributed._composable.checkpoint"):
        tfg.wrap(model, interval=1)
    model = tfg.wrap(Stack(), interval=1)
    for block in model.blocks:
        composable_checkpoint(block)
    assert not differences(train(model), train(Stack()))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_stock_s_checkpoint_around_several_wrapped_blocks_is_right(use_reentrant, way):
    class Checkpointed(Stack):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=use_reentrant)

    assert not differences(train(tfg.wrap(Checkpointed(), **way)), train(Checkpointed()))


# -- offloading ------------------------------------------------------------------------------------------------------------
class Counting(saved_tensors_hooks):
    """An offloading library: moves (here: copies) what autograd saves above a size, and brings it back."""

    def __init__(self):
        self.n_packed = self.n_unpacked = 0
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        if isinstance(tensor, torch.nn.Parameter) or tensor.numel() < 16:
            return tensor
        self.n_packed += 1
        return (tensor.device, tensor.detach().clone())

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        self.n_unpacked += 1
        return packed[1].to(packed[0])


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("hooks", [lambda: save_on_cpu(pin_memory=False), Counting], ids=["save_on_cpu", "counting"])
def test_offloading_around_the_model_is_right(hooks, way):
    def left(model):
        torch.manual_seed(0)
        with hooks():
            loss = model(batch()).square().sum()
        loss.backward()
        return [loss.detach(), *[p.grad for p in model.parameters()]]

    assert not differences(left(tfg.wrap(Stack(), **way)), left(Stack()))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_offloading_inside_a_block_is_right(way):
    class Offloading(Block):
        def forward(self, x, scale=1.0):
            with save_on_cpu(pin_memory=False):
                x = self.down(torch.relu(self.up(self.norm(x))))
            return super().forward(x, scale)

    assert not differences(train(tfg.wrap(Stack(block=Offloading), **way)), train(Stack(block=Offloading)))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("is_first", [True, False], ids=["offload first", "wrap first"])
def test_offload_wrapper_around_blocks_is_right(is_first, way, monkeypatch):
    monkeypatch.setattr("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.save_on_cpu",
                        lambda pin_memory=False: save_on_cpu(pin_memory=False))  # pinning needs an accelerator
    model = Stack()
    if is_first:
        model = tfg.wrap(wrap_in_place(model, offload_wrapper), **way)
    else:
        model = wrap_in_place(tfg.wrap(model, **way), offload_wrapper)
    assert not differences(train(model), train(Stack()))


def test_what_is_kept_goes_to_the_hooks_and_what_is_dropped_does_not():
    plain_hooks, our_hooks = Counting(), Counting()
    with plain_hooks:
        Stack()(batch()).sum()
    with our_hooks:
        tfg.wrap(Stack(), interval=1)(batch()).sum()
    assert 0 < our_hooks.n_packed < plain_hooks.n_packed


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_hooks_that_come_and_go_with_each_step_leave_nothing(way):
    """TRL enters its offloading context around training_step: forward and backward."""
    def left(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            torch.manual_seed(i)
            with Counting() if i % 2 else contextlib.nullcontext():
                model(batch(i)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert not differences(left(tfg.wrap(Stack(), **way)), left(Stack()))
