# SPDX-License-Identifier: BSD-3-Clause
"""(a) What one region adds to forward and backward, in µs, next to the stock's three forms.

Aim: at most 10 µs and at most a quarter of the stock's.
"""

import harness
import pytest
import torch

N_REGIONS = 200  # in one sample
FUNCTIONS = {"saves its input": torch.sin, "saves one intermediate": lambda x: (x * 2).sin()}


def steps(call, function, x):
    def go():
        for _ in range(N_REGIONS):
            call(function, x).backward()
    return go


@pytest.mark.parametrize("what", FUNCTIONS)
def test_region_adds_a_few_microseconds(benchmark, what):
    x = torch.randn((), requires_grad=True)
    race = harness.Race(**{name: steps(call, FUNCTIONS[what], x) for name, call in harness.CALLS.items()})
    harness.run(benchmark, race, rounds=40)
    added = {f"{name} µs": race.added_ns(name, "plain") / N_REGIONS / 1e3 for name in harness.CALLS if name != "plain"}
    harness.tell(benchmark, f"region that {what}, added", **added, share=added["tfg µs"] / added["stock µs"],
                 selective_share=added["tfg selective µs"] / added["selective µs"])
