# SPDX-License-Identifier: BSD-3-Clause
"""DeepSpeed's ZeRO on two ranks: a wrapped model against a plain one under the same engine. Run by test_distributed.py."""

import gc
import os

os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bitwise import differences  # noqa: E402
from ranks import case  # noqa: E402

import tfg  # noqa: E402
from tfg.demo import Decoder, batches, corpus  # noqa: E402

WAYS = ({"interval": 1}, {"interval": 2}, {"budget": "8GiB"}, {"budget": "pressed"})


def engine_of(stage, way, is_late=False):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Decoder(n_blocks=3, hidden=64, dropout=0.1)
    if way == {"budget": "pressed"}:
        way = {"budget": tfg.cpu.memory_allocated() + 5 * 2**20}
    if way and not is_late:
        tfg.wrap(model, **way)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}  # ZeRO-3 takes the small ones apart too
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=settings)[0]
    if way and is_late:
        tfg.wrap(engine.module, **way)
    return engine


def weights(engine, stage):
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            yield parameter.detach().clone()


def left_by(stage, way, is_late=False):
    """Losses and weights after three steps; what was replayed."""
    gc.collect()
    engine = engine_of(stage, way, is_late)
    losses = []
    for i, (ids, labels) in enumerate(batches(corpus(), 3, 2, 160, seed=dist.get_rank())):
        torch.manual_seed(10 * dist.get_rank() + i)
        losses.append(engine(ids, labels))
        engine.backward(losses[-1])
        engine.step()
    n_replayed = tfg.report(engine.module).to_dict()["total"]["ops_replayed"] if way else 0
    tfg.set_budget(None)
    return [[loss.detach() for loss in losses], list(weights(engine, stage))], n_replayed


def compared(stage):
    wanted, _ = left_by(stage, None)
    odd = []
    for way in WAYS:
        for is_late in (False, True):
            got, n_replayed = left_by(stage, way, is_late)
            odd += [f"{way}, {is_late}: {words}" for words in differences(got, wanted)]
            if way != {"budget": "8GiB"} and not n_replayed:
                odd.append(f"{way}, {is_late}: nothing was replayed")
    return odd


@case
def zero_1():
    return compared(1)


@case
def zero_2():
    return compared(2)


@case
def zero_3():
    return compared(3)


@case
def zero_3_keeps_no_gathered_parameters():
    """Live bytes after a forward of a few tokens: no more than plain has, far from all blocks' parameters."""
    def added_bytes(way):
        engine, ids, added = engine_of(3, way), torch.zeros(1, 4, dtype=torch.long), []
        for _ in range(2):
            gc.collect()
            before = tfg.cpu.memory_allocated()
            loss = engine(ids, ids)
            added.append(tfg.cpu.memory_allocated() - before)
            engine.backward(loss)
            engine.step()
        return added

    plain = added_bytes(None)
    ours = [added_bytes(way) for way in WAYS[:3]]
    return [f"{way}: {added} and plain {plain}" for way, added in zip(WAYS, ours) if any(a > p for a, p in zip(added, plain))]
