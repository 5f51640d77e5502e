# SPDX-License-Identifier: BSD-3-Clause
"""The rerun engine against the stock, which it stands in for: what a region adds to a plain forward and backward, by form and by
how many tensors the region saves.

Aim: at most half of what the stock adds, in both forms.
"""

import harness
import pytest
import torch

import tfg

N_REGIONS = 100  # in one sample


def ours(reentrant):
    def call(function, x):
        return tfg.checkpoint(function, x, use_reentrant=reentrant)
    return call


FORMS = {"non-reentrant": (ours(False), harness.stock), "reentrant": (ours(True), harness.reentrant)}


def saving(n):
    """A function that saves n tensors."""
    def function(x):
        for _ in range(n):
            x = x.sin()
        return x
    return function


def steps(call, function, x):
    def go():
        with tfg.engine("rerun"):
            for _ in range(N_REGIONS):
                call(function, x).backward()
    return go


def twice(function):
    """A plain call that does the work of both runs, without a region: what is left of the difference is the engine's."""
    def call(_, x):
        with torch.no_grad():
            function(x)
        return function(x)
    return call


@pytest.mark.parametrize("n_saved", [1, 8, 64])
@pytest.mark.parametrize("form", FORMS)
def test_rerun_adds_at_most_half_of_the_stock(benchmark, form, n_saved):
    x, function = torch.randn((), requires_grad=True), saving(n_saved)
    mine, theirs = FORMS[form]
    race = harness.Race(plain=steps(twice(function), function, x), tfg=steps(mine, function, x), stock=steps(theirs, function, x))
    harness.run(benchmark, race, rounds=30)
    added = {f"{name} µs": race.added_ns(name, "plain") / N_REGIONS / 1e3 for name in ("tfg", "stock")}
    harness.tell(benchmark, f"rerun, {form}, {n_saved} saved, added", **added, share=added["tfg µs"] / added["stock µs"],
                 time=race.ratio("tfg", "stock"))


def test_nested_regions(benchmark):
    x = torch.randn((), requires_grad=True)

    def nested(call, depth):
        return saving(2) if depth == 0 else lambda t: call(nested(call, depth - 1), t.sin()).cos()
    mine, theirs = FORMS["non-reentrant"]
    race = harness.Race(**{name: steps(call, nested(call, 4), x) for name, call in (("tfg", mine), ("stock", theirs))})
    harness.run(benchmark, race, rounds=12)
    harness.tell(benchmark, "rerun, five regions inside each other", time=race.ratio("tfg", "stock"))
