# SPDX-License-Identifier: BSD-3-Clause
"""(e) The memory-time curve of a Llama-like stack (hidden 256, batch 4 x 256 tokens, float32, one thread): time over plain at a
share of plain's peak above the step's base, beside the stock's forms. Writes results/memory_time_<blocks>.csv and .png.

Aim: at most 1.01 where the batch fits, 1.02 at 0.60, 1.04 at 0.45, 1.12 at 0.30; at the stock's own peak 0.93 of its time.
"""

import copy
import csv
from pathlib import Path

import harness
import pytest
import torch

import tfg
from tfg import _C
from tfg.demo import Decoder

TOKENS, BATCH, HIDDEN = 256, 4, 256
PERCENTS = {8: (90, 75, 60, 45, 30, 20), 16: (75, 45, 30)}
RESULTS = Path(__file__).parent / "results"


def step(model, ids, call=None):
    def go():
        model(ids, ids).backward()
        model.zero_grad()
    return go


def under(room_bytes, go):
    """go() with a budget of so much above what is alive."""
    def limited():
        _C.set_budget(tfg.cpu.memory_allocated() + room_bytes, True, 0)
        try:
            go()
        finally:
            _C.set_budget(-1, False, 0)
    return limited


def first_blocks(proto, n):
    """The stock on the first n blocks only."""
    model = copy.deepcopy(proto)
    seen = [0]

    def call(block, *args):
        seen[0] += 1
        return (harness.stock if (seen[0] - 1) % len(model.blocks) < n else harness.plain)(block, *args)
    model.call_block = call
    return model


def kept(proto):
    model = tfg.wrap(copy.deepcopy(proto), budget="auto")
    tfg.set_budget(None)
    return model


def contenders(proto, ids, plain_peak):
    n = len(proto.blocks)
    runs = {"plain": step(proto, ids), "plain again": step(copy.deepcopy(proto), ids), "fits": under(2**40, step(kept(proto), ids))}
    for percent in PERCENTS[n]:
        runs[f"budget {percent}%"] = under(plain_peak * percent // 100, step(kept(proto), ids))
    runs["stock, all blocks"] = step(harness.with_call(proto, harness.stock), ids)
    for part in (3, 2, 1) if n == 8 else (2,):
        runs[f"stock, first {n * part // 4}"] = step(first_blocks(proto, n * part // 4), ids)
    runs["selective"] = step(harness.with_call(proto, harness.selective), ids)
    return runs


@pytest.mark.parametrize("n_blocks", [8, 16])
def test_the_memory_time_curve(benchmark, n_blocks):
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (BATCH, TOKENS))
    proto = Decoder(n_blocks, HIDDEN)
    step(proto, ids)()
    plain_peak = harness.exact_peak_bytes(step(proto, ids))
    runs = contenders(proto, ids, plain_peak)
    stock_peak = harness.exact_peak_bytes(runs["stock, all blocks"])
    runs["budget = stock's peak"] = under(stock_peak, step(kept(proto), ids))
    race = harness.Race(**runs)
    harness.run(benchmark, race, rounds=6, warm_up=4)
    rows = []
    for name, run in runs.items():
        share = harness.exact_peak_bytes(run) / plain_peak
        low, high = race.spread(name, "plain")
        fastest = race.fastest(name, "plain")
        rows.append((name, *(round(figure, 3) for figure in (share, race.ratio(name, "plain"), fastest, low, high))))
        harness.tell(benchmark, f"{n_blocks} blocks, {name}", share=share, time=race.ratio(name, "plain"), fastest=fastest, low=low, high=high)
    harness.tell(benchmark, f"{n_blocks} blocks, budget = stock's peak, against the stock",
                 time=race.ratio("budget = stock's peak", "stock, all blocks"),
                 fastest=race.fastest("budget = stock's peak", "stock, all blocks"))
    write(n_blocks, rows)


def write(n_blocks, rows):
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"memory_time_{n_blocks}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("contender", "share of plain's peak", "time over plain", "of the fastest rounds", "low", "high"))
        writer.writerows(rows)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    ours = sorted((share, time) for name, share, time, *_ in rows if name.startswith("budget") or name == "fits")
    axes.plot(*zip(*ours), "o-", color="#3a7ca5", label="tfg, budget")
    for name, share, time, *_ in rows:
        if name.startswith(("stock", "selective", "plain")):
            axes.plot(share, time, "s", color="#c8553d")
            axes.annotate(name, (share, time), textcoords="offset points", xytext=(5, 4), fontsize="small")
    axes.set(xlabel="peak above the step's base, over plain's", ylabel="time over plain, median of the rounds", xlim=(0, 1.1))
    axes.legend()
    figure.savefig(RESULTS / f"memory_time_{n_blocks}.png", dpi=120)
