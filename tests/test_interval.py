# SPDX-License-Identifier: BSD-3-Clause
"""Segments: where tapes start and end, and the interval formula."""

import math
import threading

import pytest
import torch
from small_models import Stack, assert_same_bits, batch, plain, train

import tfg
from tfg import segments


class Spy:
    """Stands in for the binary in tfg.segments: notes which tape each region ran on and which tapes were closed."""

    def __init__(self, real):
        self.real, self.tapes, self.closed = real, [], []

    def __getattr__(self, name):
        return getattr(self.real, name)

    def Tape(self):
        spy, real = self, self.real.Tape()

        class Watched:
            n_handles = property(lambda self: real.n_handles)

            def close(self):
                spy.closed.append(self)
                real.close()

        watched = Watched()
        watched.real = real
        return watched

    def run(self, tape, key, function, args, kwargs):
        self.tapes.append(tape)
        return self.real.run(getattr(tape, "real", tape), key, function, args, kwargs)

    def pattern(self):
        """The tapes in order of first use, 'aabb'."""
        order = list(dict.fromkeys(map(id, self.tapes)))
        return "".join("abcdefghij"[order.index(id(tape))] for tape in self.tapes)


@pytest.fixture
def spy(monkeypatch):
    spy = Spy(segments.C)
    monkeypatch.setattr(segments, "C", spy)
    return spy


@pytest.mark.parametrize("interval, pattern", [(2, "aabbcc"), (3, "aaabbb"), (4, "aaaabb"), (6, "aaaaaa")])
def test_a_tape_starts_every_k_calls_and_none_stays_open(spy, interval, pattern):
    model = tfg.wrap(Stack(6), interval=interval)
    model(batch())
    assert spy.pattern() == pattern
    assert {id(t) for t in spy.closed} == {id(t) for t in spy.tapes}


def test_interval_one_needs_no_tape_of_ours(spy):
    tfg.wrap(Stack(3), interval=1)(batch())
    assert spy.tapes == [segments.C.LET_GO] * 3


@pytest.mark.parametrize("order, pattern", [([0, 1, 3, 4], "aabb"), ([1, 0, 1, 2], "abbb"), ([2, 2, 3], "abb"), ([4, 3, 2], "abc")])
def test_a_tape_starts_where_the_order_breaks(spy, order, pattern):
    model = Stack(6)
    model.order = order
    wanted = plain(model)
    tfg.wrap(model, interval=3)
    model(batch())
    assert spy.pattern() == pattern
    assert_same_bits(train(model), wanted)


def test_a_second_forward_starts_anew_and_both_backwards_are_right(spy):
    def two(model):
        torch.manual_seed(0)
        losses = [model(batch(i)).square().sum() for i in (0, 1)]
        for loss in losses:
            loss.backward()
        return [p.grad for p in model.parameters()]

    model = Stack(3)
    wanted = two(Stack(3))
    assert_same_bits(two(tfg.wrap(model, interval=2)), wanted)
    assert spy.pattern() == "aabccd"


def test_a_segment_does_not_outlive_its_backward(spy):
    model = tfg.wrap(Stack(4), interval=4)
    model.order = [0, 1]
    model(batch()).sum().backward()
    model.order = [2, 3]
    model(batch()).sum().backward()
    assert spy.pattern() == "aabb"


def test_without_grad_no_tape_is_made_and_the_open_one_ends(spy):
    model = tfg.wrap(Stack(4), interval=4)
    model.blocks[0](batch())
    with torch.no_grad():
        model.blocks[1](batch())
    model.blocks[2](batch())
    assert spy.tapes[1] is None and spy.tapes[2] is not spy.tapes[0] and spy.closed == [spy.tapes[0]]


def test_each_thread_has_its_own_segment(spy):
    model = tfg.wrap(Stack(4), interval=4)
    x = model.blocks[0](batch())
    worker = threading.Thread(target=lambda: model.blocks[1](x.detach()))
    worker.start()
    worker.join()
    model.blocks[1](x)
    assert spy.pattern() == "aba"


def test_an_exception_closes_the_segment(spy):
    model = tfg.wrap(Stack(4), interval=4)
    x = model.blocks[0](batch())
    with pytest.raises(RuntimeError):
        model.blocks[1](x[..., :3])
    assert spy.closed == [spy.tapes[0]]
    model.blocks[2](x)
    assert spy.pattern() == "aab"


def test_every_n_layers_takes_block_i_where_i_is_a_multiple(spy):
    model = tfg.wrap(Stack(7), every_n_layers=3)
    model(batch())
    assert spy.tapes == [segments.C.LET_GO] * 3
    assert [b["name"] for b in tfg.report(model).to_dict()["blocks"]] == ["blocks.0", "blocks.3", "blocks.6"]


def test_layers_skipped_at_random_train_right():
    class Dropping(Stack):
        def forward(self, x):
            for block in self.blocks:
                if torch.rand(()) > 0.4:
                    x = block(x)
            return x

    for interval in (1, 2, 3):
        assert_same_bits(train(tfg.wrap(Dropping(6), interval=interval), n_steps=6), train(Dropping(6), n_steps=6))


# -- the formula ------------------------------------------------------------------------------------------------------------
def formula(total_layers, seq_len, low, high):
    quotient = total_layers / math.sqrt(seq_len)
    return min(total_layers, max(low, min(high, math.floor(quotient + 0.5))))


def test_dynamic_interval_is_the_methods_formula():
    for total_layers in (1, 2, 3, 12, 32, 80, 400):
        for seq_len in (1, 4, 16, 100, 128, 1024, 131072):
            for low, high in ((2, 12), (1, 1), (3, 40)):
                wanted = formula(total_layers, seq_len, low, high)
                assert tfg.dynamic_interval(total_layers, seq_len, low=low, high=high) == wanted, (total_layers, seq_len, low, high)
    assert tfg.dynamic_interval(32, 4096) == 2 and tfg.dynamic_interval(5, 4, low=1) == 3  # 2.5 goes away from zero


@pytest.mark.parametrize("name", ["total_layers", "seq_len", "low", "high"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None, float("nan")])
def test_dynamic_interval_refuses_what_is_not_a_count(name, value):
    arguments = {"total_layers": 8, "seq_len": 128, "low": 2, "high": 12, name: value}
    with pytest.raises(ValueError, match=name) as raised:
        tfg.dynamic_interval(**arguments)
    assert repr(value) in str(raised.value)


def test_dynamic_interval_refuses_crossed_bounds():
    with pytest.raises(ValueError, match="5 > 4"):
        tfg.dynamic_interval(8, 128, low=5, high=4)
