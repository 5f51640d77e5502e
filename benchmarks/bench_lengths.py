# SPDX-License-Identifier: BSD-3-Clause
"""(f) Lengths that vary: 12 batches of 2 sequences, 64 to 1024 tokens log-uniform, under one hard limit, 1.15 times the stock's
peak on the longest. An epoch's time over plain's without a limit; what does not fit is not raced.

Aim: at least 1.2 times the throughput of the stock per block, and within 5 % of plain on the batches that fit.
"""

import copy
import math
import random

import harness
import torch

import tfg
from tfg import _C
from tfg.demo import Decoder

HIDDEN, N_BLOCKS, N_BATCHES, SHORTEST, LONGEST = 256, 8, 12, 64, 1024


def batches():
    draw = random.Random(0)
    lengths = [round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST)))) for _ in range(N_BATCHES - 1)] + [LONGEST]
    draw.shuffle(lengths)
    return [torch.randint(0, 256, (2, n), generator=torch.Generator().manual_seed(n)) for n in lengths]


def epoch(model, data, room_bytes=None):
    def go():
        if room_bytes is not None:
            _C.set_budget(tfg.cpu.memory_allocated() + room_bytes, True, 0)
        try:
            for ids in data:
                model(ids, ids).backward()
                model.zero_grad()
        finally:
            _C.set_budget(-1, False, 0)
    return go


def wrapped(proto, **how):
    model = tfg.wrap(copy.deepcopy(proto), **how)
    tfg.set_budget(None)
    return model


def fits(go, limit_bytes):
    return harness.exact_peak_bytes(go) <= limit_bytes


def test_an_epoch_of_mixed_lengths_under_one_limit(benchmark):
    torch.manual_seed(0)
    proto, data = Decoder(N_BLOCKS, HIDDEN), batches()
    longest = [max(data, key=lambda ids: ids.shape[1])]
    stock = harness.with_call(proto, harness.stock)
    limit_bytes = harness.exact_peak_bytes(epoch(stock, longest)) * 115 // 100
    plain_fits = [ids for ids in data if fits(epoch(proto, [ids]), limit_bytes)]
    runs = {"plain, no limit": epoch(proto, data), "stock per block": epoch(stock, data),
            "budget": epoch(wrapped(proto, budget="auto"), data, limit_bytes)}
    for dial in ("interval", "every_n_layers"):
        runs[f'{dial}="dynamic"'] = epoch(wrapped(proto, **{dial: "dynamic"}), data, limit_bytes)
        for k in (1, 2):
            go = epoch(wrapped(proto, **{dial: k}), data)
            if fits(epoch(wrapped(proto, **{dial: k}), longest), limit_bytes):
                runs[f"{dial}={k}"] = go
    runs["short: plain"] = epoch(proto, plain_fits)
    runs["short: budget"] = epoch(wrapped(proto, budget="auto"), plain_fits, limit_bytes)
    race = harness.Race(**runs)
    harness.run(benchmark, race, rounds=3, warm_up=1)
    for name, go in runs.items():
        harness.tell(benchmark, f"mixed lengths, {name}", time=race.ratio(name, "plain, no limit"),
                     throughput_of_stock=1 / race.ratio(name, "stock per block"), peak_of_limit=harness.exact_peak_bytes(go) / limit_bytes)
    harness.tell(benchmark, f"mixed lengths, {len(plain_fits)} of {len(data)} batches that fit", time=race.ratio("short: budget", "short: plain"))
