# SPDX-License-Identifier: BSD-3-Clause
"""Tensor parallel (DTensor), plain and with tfg: the same bits, a smaller peak.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tfg
from tfg.demo import Decoder, batches, corpus


def train(mesh, budget=None):
    torch.manual_seed(0)
    model = Decoder(n_blocks=6, hidden=128)
    for block in model.blocks:
        parallelize_module(block.mlp, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})
    if budget:
        tfg.wrap(model, budget=budget)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # split and whole parameters
    losses, _ = [], tfg.cpu.reset_peak_memory_stats()
    for ids, labels in batches(corpus(), 3, 4, 256, seed=0):
        losses.append(model(ids, labels))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return torch.stack([*losses, *[w.sum() for w in weights]]).detach(), tfg.cpu.max_memory_allocated()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    plain, plain_peak = train(mesh)
    ours, our_peak = train(mesh, budget=plain_peak * 6 // 10)
    is_equal = torch.equal(plain, ours)
    print(f"rank {dist.get_rank()}: {'equal to the last bit' if is_equal else 'DIFFERENT'}, peak {our_peak / plain_peak:.2f} of plain's")
    dist.destroy_process_group()
    sys.exit(not is_equal)
