# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel on two ranks: a wrapped model against a plain one under the same engine. Run by test_distributed.py."""

import contextlib
import gc

import torch
import torch.distributed as dist
from bitwise import differences
from ranks import IS_THOROUGH, case
from small_models import Block, Stack
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tfg

WAYS = ({"interval": 2}, {"budget": "8GiB"}, *([{"interval": 1}, {"every_n_layers": 2}] if IS_THOROUGH else []))


class Choosy(Stack):
    """Leaves its last block out in odd steps."""

    def forward(self, x):
        x = super().forward(x)
        return x if getattr(self, "step", 0) % 2 else self.last(x)

    def __init__(self):
        super().__init__(3)
        self.last = Block()


class Shared(Stack):
    """Two blocks called twice, and one weight that all four use."""

    def __init__(self):
        super().__init__(2)
        self.order = [0, 1, 0, 1]
        self.blocks[1].up.weight = self.blocks[0].up.weight


def rows(i, length=3):
    """This rank's micro-batch i."""
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))


def left_by(model, lengths=(3,), n_micro=1, first_sync=0, **how):
    """Losses, gradients and weights of three optimizer steps."""
    model = DDP(model, **how)
    fired = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: fired.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = []
    for i in range(3):
        model.module.step = i
        for micro in range(n_micro):
            torch.manual_seed(10 * i + micro + dist.get_rank())
            with model.no_sync() if micro + 1 < n_micro and i >= first_sync else contextlib.nullcontext():
                loss = model(rows(i, lengths[(i + dist.get_rank()) % len(lengths)])).square().sum()
                loss.backward()
        left += [loss.detach(), *[None if p.grad is None else p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    left += [p.detach().clone() for p in model.parameters()]
    return left, len(fired)


def compared(build, **how):
    wanted = left_by(build(), **how)
    odd = []
    for way in WAYS:
        model = tfg.wrap(build(), **way)
        odd += [f"{way}: {words}" for words in differences(left_by(model, **how), wanted)]
        if "budget" not in way and not tfg.report(model).to_dict()["total"]["ops_replayed"]:
            odd.append(f"{way}: nothing was replayed")
    return odd


@case
def as_it_comes():
    return compared(Stack)


@case
def gradients_as_views_of_buckets():
    return compared(Stack, gradient_as_bucket_view=True, bucket_cap_mb=0.001)


@case
def finding_unused_parameters():
    return compared(Choosy, find_unused_parameters=True)


@case
def a_static_graph():
    return compared(Stack, static_graph=True)


@case
def a_static_graph_with_shared_layers():
    return compared(Shared, static_graph=True)


@case
def shared_layers_and_weights():
    return compared(Shared)


@case
def accumulation_without_sync():
    return compared(Stack, n_micro=3)


@case
def accumulation_without_sync_in_a_static_graph():
    """From the second step on: in the first one plain DDP itself fails an assertion."""
    return compared(Stack, n_micro=2, static_graph=True, first_sync=1)


@case
def accumulation_while_finding_unused():
    return compared(Choosy, n_micro=2, find_unused_parameters=True)


@case
def lengths_that_differ_by_rank():
    return compared(Stack, lengths=(3, 9))


@case
def wrapped_after_ddp():
    def late(model, way):
        model = DDP(model)
        if way:
            tfg.wrap(model, **way)
        torch.manual_seed(dist.get_rank())
        model(rows(0)).square().sum().backward()
        names = list(model.state_dict())
        return [p.grad.clone() for p in model.parameters()], names

    wanted = late(Stack(), None)
    return [odd for way in WAYS for odd in differences(late(Stack(), way), wanted)]


@case
def a_region_around_the_whole_model_before_two_backwards():
    def two(call):
        model = DDP(Stack())
        torch.manual_seed(dist.get_rank())
        losses = [call(model, rows(i)).square().sum() for i in range(2)]
        with model.no_sync():
            losses[0].backward()
        losses[1].backward()
        return [p.grad.clone() for p in model.parameters()]

    return differences(two(tfg.checkpoint), two(lambda model, x: model(x)))


@case
def a_comm_hook_and_a_budget_that_presses():
    def build(way):
        model = nn.Sequential(*[Block(32) for _ in range(4)])
        return tfg.wrap(model, **way) if way else model

    def trained(way):
        torch.manual_seed(0)
        model = DDP(build(way), bucket_cap_mb=0.01)
        model.register_comm_hook(None, lambda state, bucket: _mean(bucket))
        torch.manual_seed(dist.get_rank())
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
        model(x).square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        return grads, tfg.report(model).to_dict()["total"]["evictions"] if way else 0

    wanted, _ = trained(None)
    gc.collect()  # what earlier cases left in cycles would leave room when it goes
    got, n_evicted = trained({"budget": tfg.cpu.memory_allocated() + 2**17})
    tfg.set_budget(None)
    return differences(got, wanted) + ([] if n_evicted else ["nothing was evicted"])


def _mean(bucket):
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])
