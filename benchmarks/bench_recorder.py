# SPDX-License-Identifier: BSD-3-Clause
"""(b) What the recorder adds per operator and per saved tensor, in µs, on tiny tensors, forward only.

Slopes between a short and a long chain, so that the region's own cost is not in them.
Aim: at most 1 µs each over plain.
"""

import harness
import pytest
import torch

SHORT, LONG, N_CALLS = 64, 512, 10
OPERATORS = {"saves nothing": lambda x: x + 1, "saves its input": torch.sin}


def chain(operator, n_ops):
    def go(x):
        for _ in range(n_ops):
            x = operator(x)
        return x
    return go


def calls(call, function, x):
    def go():
        for _ in range(N_CALLS):
            call(function, x)
    return go


def added_per_operator_us(benchmark, operator, rounds):
    x = torch.randn((), requires_grad=True)
    both = {f"{name}_{n}": calls(harness.CALLS[name], chain(operator, n), x) for n in (SHORT, LONG) for name in ("plain", "tfg")}
    race = harness.Race(**both)
    harness.run(benchmark, race, rounds)
    added = race.added_ns(f"tfg_{LONG}", f"plain_{LONG}") - race.added_ns(f"tfg_{SHORT}", f"plain_{SHORT}")
    return added / N_CALLS / (LONG - SHORT) / 1e3


@pytest.mark.parametrize("what", OPERATORS)
def test_recorder_adds_a_microsecond_or_less(benchmark, what):
    added = added_per_operator_us(benchmark, OPERATORS[what], rounds=40)
    harness.tell(benchmark, f"operator that {what}, added", **{"tfg µs": added})
