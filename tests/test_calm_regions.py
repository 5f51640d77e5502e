# SPDX-License-Identifier: BSD-3-Clause
"""A region that keeps, and whose key has long lost nothing, fingerprints nothing where it ends: what leaves after all, does as it leaves."""

import contextlib

import pytest
import torch
from bitwise import same_bits

import tfg
from tfg import _C

N_CALM = 5  # regions of one key, after which it is calm for certain


def block(x, weight, mask):
    return ((x @ weight).sin() * mask).exp().cos()


class Training:
    """One call site that keeps under a budget with room; `weight` and `mask` come from outside, and raw pointers to them are held."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(160, 160, generator=generator, requires_grad=True)
        self.mask = torch.rand(160, 160, generator=generator)
        self.raw = {"weight": self.weight.detach().numpy(), "mask": self.mask.numpy()}
        self.x = torch.randn(160, 160, generator=generator, requires_grad=True)
        self.key = _C.new_key("calm")

    def forward(self, is_plain=False):
        given = self.x, self.weight, self.mask
        return block(*given) if is_plain else _C.run(_C.KEEP, self.key, block, given, {})

    def gradients(self, y):
        return torch.autograd.grad(y.sum(), (self.x, self.weight))

    def run(self, n_regions):
        for _ in range(n_regions):
            self.gradients(self.forward())


@pytest.fixture(autouse=True)
def roomy_budget():
    _C.set_budget(_C.live_bytes() + 2**40, False)
    yield
    _C.set_budget(-1, False)


def test_what_leaves_a_calm_region_comes_back_to_the_bit_and_calm_returns():
    training = Training()
    plain = training.gradients(training.forward(is_plain=True))
    for _ in range(3):
        training.run(N_CALM)
        y = training.forward()
        assert _C.evict(2**40) > 0
        for got in (training.gradients(y), training.gradients(training.forward())):
            assert all(map(same_bits, plain, got))
    assert _C.stats(training.key)["ops_replayed"] > 0


@pytest.mark.parametrize("written", ["weight", "mask"])
@pytest.mark.parametrize("is_evicted_first", [False, True])
def test_a_raw_write_to_what_a_calm_region_leans_on_is_found_by_the_replay(written, is_evicted_first):
    training = Training()
    training.run(N_CALM)
    y = training.forward()
    if is_evicted_first:
        _C.evict(2**40)
    training.raw[written][:] += 1
    if not is_evicted_first:
        _C.evict(2**40)
    with pytest.raises(tfg.Error, match="did not give the bits of the forward"):  # a region that is not calm names the tensor
        training.gradients(y)


def test_the_first_regions_are_not_calm():
    training = Training()
    y = training.forward()
    training.raw["mask"][:] += 1
    _C.evict(2**40)
    with pytest.raises(tfg.Error, match="came from outside the region and was changed"):
        training.gradients(y)


def test_an_operator_that_a_calm_region_never_ran_before_is_watched():
    """Its result is written behind tfg's back before the region ends: what was never met is fingerprinted, calm or not."""
    training = Training()
    training.run(N_CALM)

    def extended(x, weight, mask):
        y = block(x, weight, mask).sinh()
        address_of_y = y.data_ptr()
        z = y.cosh()
        import ctypes

        ctypes.c_float.from_address(address_of_y).value = 3.0
        return z

    def gradients(call):
        with contextlib.suppress(tfg.Error):
            y = call()
            _C.evict(2**40)
            return training.gradients(y)

    given = training.x, training.weight, training.mask
    plain = gradients(lambda: extended(*given))
    got = gradients(lambda: _C.run(_C.KEEP, training.key, extended, given, {}))
    assert got is None or all(map(same_bits, plain, got))


def test_a_walk_after_another_eviction_is_compared_again():
    training = Training()
    training.run(N_CALM)
    y = training.forward()
    plain = training.gradients(training.forward(is_plain=True))
    for _ in range(3):
        _C.evict(2**40)
        got = torch.autograd.grad(y.sum(), (training.x, training.weight), retain_graph=True)
        assert all(map(same_bits, plain, got))
    _C.evict(2**40)
    training.raw["weight"][:] += 1
    with pytest.raises(tfg.Error):
        training.gradients(y)
