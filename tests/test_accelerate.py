# SPDX-License-Identifier: BSD-3-Clause
"""Accelerate: a wrapped model goes through prepare, accumulate, clip_grad_norm_ and find_executable_batch_size as a plain one."""

import pytest
import torch
from bitwise import differences
from small_models import Stack, batch

import tfg

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread", "no_budget_left")]


def left_by(model, is_late=False, how=None, precision="no"):
    """All that three optimizer steps of two micro-batches leave."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    run = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if is_late:
        tfg.wrap(model, **how)
    left = []
    for i in range(6):
        torch.manual_seed(i)
        with run.accumulate(model):
            loss = model(batch(i)).square().mean()
            run.backward(loss)
            norm = run.clip_grad_norm_(model.parameters(), 0.1) if run.sync_gradients else torch.zeros(())
            left += [loss.detach(), norm, *[p.grad.clone() for p in model.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
    return left + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("how", [{"interval": 1}, {"interval": 2}, {"budget": "8GiB"}], ids=str)
def test_prepare_before_and_after_wrap_is_plain(how, precision):
    wanted = left_by(Stack(), precision=precision)
    assert not differences(left_by(tfg.wrap(Stack(), **how), precision=precision), wanted)
    assert not differences(left_by(Stack(), is_late=True, how=how, precision=precision), wanted)


def test_a_smaller_batch_is_found_after_our_out_of_memory_error():
    model, sizes = tfg.wrap(Stack(), interval=1), []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=12)
    def train(size):
        sizes.append(size)
        tfg.cpu.set_memory_limit(tfg.cpu.memory_allocated() + 16_000)
        try:
            model(torch.ones(size, 4, 8)).sum().backward()
        finally:
            tfg.cpu.set_memory_limit(None)

    train()
    assert len(sizes) > 2 and sizes == sorted(sizes, reverse=True) and model.blocks[0].up.weight.grad is not None
    wanted = Stack()
    model.zero_grad()
    for each in (wanted, model):
        torch.manual_seed(0)
        each(batch()).sum().backward()
    assert not differences([p.grad for p in model.parameters()], [p.grad for p in wanted.parameters()])
