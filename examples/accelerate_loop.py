# SPDX-License-Identifier: BSD-3-Clause
"""Accelerate: a loop with accumulation and clipping, plain and with tfg. tfg.wrap comes before prepare.

    python examples/accelerate_loop.py          or: accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
"""

import sys

import torch
from accelerate import Accelerator

import tfg
from tfg.demo import Decoder, batches, corpus


def train(run, budget=None):
    torch.manual_seed(0)
    model = Decoder(n_blocks=6, hidden=128, dropout=0.1)
    if budget:
        tfg.wrap(model, budget=budget)  # the one line
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses, _ = [], tfg.cpu.reset_peak_memory_stats()
    for ids, labels in batches(corpus(), 4, 4, 256, seed=run.process_index):
        with run.accumulate(model):
            losses.append(model(ids, labels))
            run.backward(losses[-1])
            if run.sync_gradients:
                run.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack([*losses, *[p.sum() for p in model.parameters()]]).detach(), tfg.cpu.max_memory_allocated()


if __name__ == "__main__":
    run = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain, plain_peak = train(run)
    ours, our_peak = train(run, budget=plain_peak * 6 // 10)
    is_equal = torch.equal(plain, ours)
    print(f"{'equal to the last bit' if is_equal else 'DIFFERENT'}, peak {our_peak / plain_peak:.2f} of plain's")
    sys.exit(not is_equal)
