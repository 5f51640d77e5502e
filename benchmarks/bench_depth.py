# SPDX-License-Identifier: BSD-3-Clause
"""(d) Overhead against the number of blocks at tiny width (hidden 32, 8 tokens), where cost per operator is all there is.

Aim: below the stock's three forms (non-reentrant, reentrant, selective) at every size.
"""

import copy

import harness
import pytest
import torch

import tfg
from tfg.demo import Decoder

HIDDEN, TOKENS = 32, 8


def step(model, ids):
    def go():
        model(ids, ids).backward()
    return go


@pytest.mark.parametrize("n_blocks", [4, 8, 16, 32, 64])
def test_overhead_is_below_the_stock_at_every_depth(benchmark, n_blocks):
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1, TOKENS))
    proto = Decoder(n_blocks, HIDDEN)
    runs = {name: step(harness.with_call(proto, call), ids) for name, call in harness.CALLS.items() if name != "tfg"}
    runs["tfg"] = step(tfg.wrap(copy.deepcopy(proto), interval=1), ids)
    race = harness.Race(**runs)
    harness.run(benchmark, race, rounds=max(10, 240 // n_blocks))
    ratios = {name: race.ratio(name, "plain") for name in ("tfg", "stock", "reentrant", "selective")}
    harness.tell(benchmark, f"{n_blocks} tiny blocks, time over plain", **ratios)
