# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2, FSDP1 and tensor parallel on two ranks: a wrapped model against a plain one under the same engine. Run by
test_distributed.py."""

import functools
import gc

import torch
import torch.distributed as dist
from bitwise import differences
from ranks import IS_THOROUGH, case
from small_models import Block, Stack
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import tfg

WAYS = ({"interval": 2}, {"budget": "8GiB"}, *([{"interval": 1}, {"every_n_layers": 2}] if IS_THOROUGH else []))
cpu_mesh = functools.cache(lambda name: dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=(name,)))


def rows(i, length=3):
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))


def local(tensor):
    return None if tensor is None else (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def left_by(model, n_steps=2, n_micro=1, lengths=(3,), same_rows=False):
    """This rank's share of losses, gradients and weights after optimizer steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    left = []
    for i in range(n_steps):
        for micro in range(n_micro):
            if n_micro > 1:
                model.set_requires_gradient_sync(micro + 1 == n_micro)
            torch.manual_seed(10 * i + micro + (0 if same_rows else dist.get_rank()))
            x = torch.randn(2, 4, 8) if same_rows else rows(i, lengths[(i + dist.get_rank()) % len(lengths)])
            loss = model(x).float().square().sum()
            loss.backward()
        left += [local(loss), *[local(p.grad) for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return left + [local(p) for p in model.parameters()], sorted(model.state_dict())


ORDERS = ("wrap first", "shard first")


def compared(build, sharded, orders=ORDERS, is_replayed=True, **how):
    wanted = left_by(sharded(build()), **how)
    odd = []
    for way in WAYS:
        for order in orders if IS_THOROUGH or "interval" in way else orders[:1]:
            model = sharded(tfg.wrap(build(), **way)) if order == "wrap first" else tfg.wrap(sharded(build()), **way)
            odd += [f"{way}, {order}: {words}" for words in differences(left_by(model, **how), wanted)]
            if is_replayed and "budget" not in way and not tfg.report(model).to_dict()["total"]["ops_replayed"]:
                odd.append(f"{way}, {order}: nothing was replayed")
            tfg.set_budget(None)
    return odd


# -- FSDP2 ------------------------------------------------------------------------------------------------------------------
def fsdp2(model, **how):
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh("shards"), **how)
    return fully_shard(model, mesh=cpu_mesh("shards"), **how)


@case
def fsdp2_resharding_after_forward():
    return compared(Stack, fsdp2)


@case
def fsdp2_gathered_until_backward():
    return compared(Stack, functools.partial(fsdp2, reshard_after_forward=False))


@case
def fsdp2_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return compared(Stack, functools.partial(fsdp2, mp_policy=policy))


@case
def fsdp2_offloaded_to_the_cpu():
    return compared(Stack, functools.partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)))


@case
def fsdp2_accumulation():
    return compared(Stack, fsdp2, n_micro=2)


@case
def fsdp2_lengths_that_differ_by_rank():
    return compared(Stack, fsdp2, lengths=(3, 7))


@case
def fsdp2_two_blocks_to_a_unit():
    """A unit may hold several blocks, and a root may hold them all."""
    def root_only(model):
        return fully_shard(model, mesh=cpu_mesh("shards"))

    def pairs(model):
        fully_shard([model.blocks[0], model.blocks[1]], mesh=cpu_mesh("shards"))
        fully_shard([model.blocks[2], model.blocks[3]], mesh=cpu_mesh("shards"))
        return fully_shard(model, mesh=cpu_mesh("shards"))

    return compared(Stack, root_only) + compared(Stack, pairs)


@case
def fsdp2_finer_than_a_block():
    """Every linear layer is a unit of its own: its parameters are gone again while the block's other operators run."""
    def fine(model):
        for block in model.blocks:
            fully_shard(block.up, mesh=cpu_mesh("shards"))
            fully_shard(block.down, mesh=cpu_mesh("shards"))
        return fully_shard(model, mesh=cpu_mesh("shards"))

    return compared(Stack, fine, is_replayed=False)


@case
def fsdp2_a_budget_that_presses():
    def build():
        torch.manual_seed(0)
        model = nn.Module()
        model.blocks = nn.ModuleList([Block(32) for _ in range(4)])
        model.forward = lambda x: functools.reduce(lambda x, block: block(x), model.blocks, x)
        return model

    def grads(model):
        torch.manual_seed(dist.get_rank())
        model(torch.randn(64, 32)).square().sum().backward()
        return [local(p.grad) for p in model.parameters()]

    wanted = grads(fsdp2(build()))
    gc.collect()  # what earlier cases left in cycles would leave room when it goes
    model = build()
    tfg.wrap(model, budget=tfg.cpu.memory_allocated() + 2**17)
    got = grads(fsdp2(model))
    tfg.set_budget(None)
    n_evicted = tfg.report(model).to_dict()["total"]["evictions"]
    return differences(got, wanted) + ([] if n_evicted else ["nothing was evicted"])


# -- FSDP1 ------------------------------------------------------------------------------------------------------------------
def fsdp1(model, **how):
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **how)


@case
def fsdp1_by_blocks():
    return compared(Stack, fsdp1, is_replayed=False)


@case
def fsdp1_with_original_parameters():
    return compared(Stack, functools.partial(fsdp1, use_orig_params=True), is_replayed=False)


# -- tensor parallel ----------------------------------------------------------------------------------------------------------
def split(model):
    for block in model.blocks:
        parallelize_module(block, cpu_mesh("columns"), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def split_in_sequence(model):
    for block in model.blocks:
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(block, cpu_mesh("columns"), plan)
    return model


@case
def tensor_parallel():
    return compared(Stack, split, same_rows=True)


@case
def tensor_and_sequence_parallel():
    """Each rank has its share of the sequence. What autograd saves here are DTensors, or is made from gathered memory that is gone:
    kept, all of it."""
    return compared(Stack, split_in_sequence, is_replayed=False)


@case
def tensor_parallel_inside_fsdp2():
    def both(model):
        return fsdp2_on(split_on(model))

    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))

    def split_on(model):
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    def fsdp2_on(model):
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    return compared(Stack, both, orders=("wrap first",), same_rows=True)
