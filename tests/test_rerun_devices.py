# SPDX-License-Identifier: BSD-3-Clause
"""The random state of devices beside the CPU, under the rerun engine: with a device module of our own, since there may be no device."""

import pytest
import torch
from rerun_programs import tensor

import tfg
from tfg import _C, rerun_devices


class Cards:
    """A module like torch.cuda with two cards, whose generator is a counter."""

    def __init__(self, initialized=True):
        self._initialized, self.counters = initialized, [100, 200]

    def device_count(self):
        return 2

    def device(self, index):
        raise AssertionError("makes a card the current one, which wakes it")

    def get_rng_state(self, index):
        return torch.tensor(self.counters[index])

    def set_rng_state(self, state, index):
        self.counters[index] = int(state)

    def draw(self, index):
        self.counters[index] += 1
        return self.counters[index]


@pytest.fixture
def cards(monkeypatch):
    made = Cards()
    monkeypatch.setattr(torch, "cards", made, raising=False)
    monkeypatch.setattr(rerun_devices, "_accelerator", lambda: "cards")
    return made


def drawing(cards, drawn):
    def f(x):
        drawn.append((cards.draw(0), cards.draw(1)))
        return x.sin().exp()
    return f


FORMS = pytest.mark.parametrize("reentrant", [False, True], ids=["rerun", "reentrant"])


@FORMS
def test_every_card_draws_the_same_and_goes_on_where_it_was(cards, reentrant):
    drawn, x = [], tensor()
    with tfg.engine("rerun"):
        y = tfg.checkpoint(drawing(cards, drawn), x, use_reentrant=reentrant)
    cards.draw(1)
    y.sum().backward()
    assert drawn == [(101, 201)] * 2 and cards.counters == [101, 202]


@FORMS
def test_cards_go_on_where_they_were_after_a_failure(cards, reentrant):
    runs = iter([torch.sin])

    def fails(x):
        cards.draw(0)
        raise KeyboardInterrupt
    with tfg.engine("rerun"):
        y = tfg.checkpoint(lambda x: next(runs, fails)(x), tensor(), use_reentrant=reentrant)
    cards.counters[:] = [7, 8]
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert cards.counters == [7, 8]


@FORMS
def test_without_preserved_state_cards_are_left_alone(cards, reentrant):
    drawn, x = [], tensor()
    with tfg.engine("rerun"):
        y = tfg.checkpoint(drawing(cards, drawn), x, use_reentrant=reentrant, preserve_rng_state=False)
    y.sum().backward()
    assert drawn == [(101, 201), (102, 202)]


@FORMS
def test_cards_first_used_inside_a_region_are_an_error(cards, reentrant):
    cards._initialized = False

    def wakes(x):
        cards._initialized = True
        return x.sin()
    words = "PyTorch's device state was initialized in the forward pass of a Checkpoint, which is not allowed."
    with tfg.engine("rerun"):
        with pytest.raises(RuntimeError, match=words):
            tfg.checkpoint(wakes, tensor(), use_reentrant=reentrant)
        cards._initialized = False
        tfg.checkpoint(wakes, tensor(), use_reentrant=reentrant, preserve_rng_state=False)
        cards._initialized = False
        tfg.checkpoint(torch.sin, tensor(), use_reentrant=reentrant)


def test_tensors_on_no_device_with_a_state_need_nothing():
    meta = torch.empty(2, device="meta")
    assert _C.elsewhere((meta, [tensor()], {"a": meta})) == ()
    with tfg.engine("rerun"):
        assert tfg.checkpoint(torch.sin, meta.requires_grad_(), use_reentrant=False).device.type == "meta"


def test_device_types_are_gathered_once_from_all_containers(monkeypatch):
    asked = []
    monkeypatch.setattr(rerun_devices.C, "elsewhere", lambda value: asked.append(value) or ("cards", "other"))
    monkeypatch.setattr(rerun_devices, "_accelerator", lambda: "cards")
    assert rerun_devices.types_of((1,), {"a": 2}) == ("cards", "other") and asked == [(1,), {"a": 2}]
    monkeypatch.setattr(rerun_devices, "_accelerator", lambda: None)
    monkeypatch.setattr(rerun_devices.C, "elsewhere", lambda value: ())
    assert rerun_devices.types_of((), {}) == ()


def test_a_container_that_holds_itself_is_looked_through():
    own = [tensor()]
    own.append(own)
    assert _C.elsewhere((own, {"own": own})) == ()
