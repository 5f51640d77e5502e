# SPDX-License-Identifier: BSD-3-Clause
"""Every subset of drops gives plain's bits: the test that was written first.

One region with dropout, an in-place write on a view, a `.data` write, a BatchNorm, a mask and a bias that autograd does not
save. All sets of droppable storages are dropped in turn; then again with each change made from outside between forward and
backward, where the rule is plain's bits or a raise, never other numbers.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bitwise import same_bits
from torch import nn

import tfg
from tfg._engine import C


class World:
    """Everything that one trial reads and writes, made anew from a seed."""

    def __init__(self):
        torch.manual_seed(7)
        self.x = torch.randn(8, 6, requires_grad=True)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6))
        self.norm = nn.BatchNorm1d(6)
        self.mask = torch.rand(8, 6)
        self.array = np.random.RandomState(3).rand(8, 6).astype(np.float32)
        self.numpy_input = torch.from_numpy(self.array)

    def region(self, x):
        h = (x @ self.weight + self.bias) * self.mask
        h = F.dropout(h.sin(), 0.3) + self.numpy_input
        g = h * 2
        g[:, 1:3].mul_(0.5)
        g.data[0].add_(1.0)
        g = self.norm(g.cos())
        return (g.exp() * h).tanh()

    def results(self, y):
        y.square().sum().backward()
        leaves = (self.x, self.weight, self.bias, *self.norm.parameters())
        return [y.detach(), *(t.grad for t in leaves), *self.norm.buffers(), torch.get_rng_state()]


def nothing(world):
    pass


def parameter(world):
    with torch.no_grad():
        world.weight.add_(1)


def unsaved_bias(world):
    with torch.no_grad():
        world.bias.add_(1)


def mask(world):
    world.mask.mul_(3)


def numpy_backed(world):
    world.array += 1


def swapped_data(world):
    world.weight.data = torch.ones(6, 6)


def written_data(world):
    world.bias.data.add_(1)


def trial(change, drops):
    """(results or the exception, what could be dropped) of one run; drops None: plain."""
    world = World()
    key, tape = C.new_key("subset"), C.Tape()
    tape.keeps_all = True
    try:
        y = world.region(world.x) if drops is None else C.run(tape, key, world.region, (world.x,), {})
        droppable = [] if drops is None else tape.droppable()
        if drops:
            tape.drop([droppable[i] for i in drops])
        change(world)
        return world.results(y), droppable
    except RuntimeError as error:
        return error, []


def subsets(n):
    return itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(n + 1))


def n_droppable():
    _, droppable = trial(nothing, ())
    return len(droppable)


def test_there_is_something_to_drop():
    assert 4 <= n_droppable() <= 10


@pytest.mark.parametrize("change", [nothing, parameter, unsaved_bias, mask, numpy_backed, swapped_data, written_data])
def test_every_subset_of_drops_gives_plains_bits_or_raises(change):
    plain, _ = trial(change, None)
    for drops in subsets(n_droppable()):
        got, _ = trial(change, drops)
        if isinstance(plain, RuntimeError):
            assert isinstance(got, RuntimeError), f"plain raises, dropping {drops} does not"
        elif isinstance(got, RuntimeError):
            assert change is not nothing and isinstance(got, tfg.Error), f"dropping {drops}: {got}"
        else:
            assert all(map(same_bits, plain, got)), f"other numbers after dropping {drops}"
