# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2, plain and with tfg: the same bits, a smaller peak. tfg.wrap comes before fully_shard, or after it.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import tfg
from tfg.demo import Decoder, batches, corpus


def train(mesh, budget=None):
    torch.manual_seed(0)
    model = Decoder(n_blocks=6, hidden=128, dropout=0.1)
    if budget:
        tfg.wrap(model, budget=budget)  # the one line
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, _ = [], tfg.cpu.reset_peak_memory_stats()
    for ids, labels in batches(corpus(), 3, 4, 256, seed=dist.get_rank()):
        losses.append(model(ids, labels))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([*losses, *[p.to_local().sum() for p in model.parameters()]]).detach(), tfg.cpu.max_memory_allocated()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    plain, plain_peak = train(mesh)
    ours, our_peak = train(mesh, budget=plain_peak * 6 // 10)
    is_equal = torch.equal(plain, ours)
    print(f"rank {dist.get_rank()}: {'equal to the last bit' if is_equal else 'DIFFERENT'}, peak {our_peak / plain_peak:.2f} of plain's")
    dist.destroy_process_group()
    sys.exit(not is_equal)
