# SPDX-License-Identifier: BSD-3-Clause
"""(c) Eight Llama-like blocks (hidden 256, 256 tokens, batch 4): one training step, time and exact peak against the stock.

Aim: interval=1 at the stock's peak or below, and not slower.
"""

import copy

import harness
import pytest
import torch

import tfg
from tfg.demo import Decoder

TOKENS, BATCH, HIDDEN, N_BLOCKS = 256, 4, 256, 8


def step(model, ids):
    def go():
        model(ids, ids).backward()
        model.zero_grad()
    return go


def models(proto):
    wrapped = {f"interval={k}": tfg.wrap(copy.deepcopy(proto), interval=k) for k in (1, 2, 4)}
    wrapped["every_n_layers=2"] = tfg.wrap(copy.deepcopy(proto), every_n_layers=2)
    return {"plain": proto, "stock": harness.with_call(proto, harness.stock), **wrapped}


@pytest.mark.parametrize("n_threads", [1])
def test_stack_is_not_slower_than_the_stock_nor_higher(benchmark, n_threads):
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (BATCH, TOKENS))
    runs = {name: step(model, ids) for name, model in models(Decoder(N_BLOCKS, HIDDEN)).items()}
    with harness.threads(n_threads):
        race = harness.Race(**runs)
        harness.run(benchmark, race, rounds=12)
        peaks = {name: harness.exact_peak_bytes(run) for name, run in runs.items()}
    for name in runs:
        low, high = race.spread(name, "stock")
        harness.tell(benchmark, f"8-block stack, {name}, against the stock", time=race.ratio(name, "stock"), low=low, high=high,
                     peak=peaks[name] / peaks["stock"], **{"peak MiB": peaks[name] / 2**20})
