# SPDX-License-Identifier: BSD-3-Clause
"""A budget: the ceiling holds, nothing changes but time, everything can go wrong and nothing is lost.

Peaks are tfg.cpu's own count: exact, so a test may ask for them to the byte.
"""

import contextlib
import copy
import functools
import gc
import logging
import os
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from bitwise import copied, differences
from small_models import Language, Stack
from torch import nn

import tfg
from tfg import _C, budget, cpu

WIDTH = 32


class Layer(nn.Module):
    """Attention with dropout and a gated MLP, residual: matmuls, pointwise results, a kernel that allocates by itself."""

    def __init__(self, width=WIDTH, dropout=0.1):
        super().__init__()
        self.dropout = dropout
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (nn.Linear(*shape) for shape in ((width, 2 * width), (width, 2 * width), (2 * width, width)))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)), self.dropout)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Layers(Stack):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def new_model(n_layers=6):
    return Layers(n_layers, Layer)


def batch(seed=0, tokens=48):
    return torch.randn(4, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model, x, seed=0):
    """Loss and gradients of one step; the gradients are taken off the model. seed None: the random state is left alone."""
    if seed is not None:
        torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    loss.backward()
    left = [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
    for p in model.parameters():
        p.grad = None
    return left


def measured(model, x):
    """(what a step leaves, its peak above what was alive before)."""
    gc.collect()
    before = cpu.memory_allocated()
    cpu.reset_peak_memory_stats()
    left = step(model, x)
    return left, cpu.max_memory_allocated() - before


def counted(model):
    """Sums of the blocks' counters."""
    stats = [_C.stats(block.__dict__["_tfg_state"].key) if "_tfg_state" in block.__dict__ else {} for block in model.blocks]
    return {name: sum(s.get(name, 0) for s in stats) for name in ("evictions", "evicted_bytes", "ops_replayed", "replayed_again")}


def counts_of(model, call):
    before = counted(model)
    result = call()
    return result, {name: n - before[name] for name, n in counted(model).items()}


def forget_the_queue():
    """After a backward that failed the engine holds what it had queued until this thread's next one, with plain torch too."""
    torch.ones((), requires_grad=True).backward()


@contextlib.contextmanager
def room_of(n_bytes, strict=False):
    """A budget of n_bytes above what is alive."""
    gc.collect()
    _C.set_budget(cpu.memory_allocated() + n_bytes, strict, 0)
    try:
        yield
    finally:
        _C.set_budget(-1, False, 0)


@pytest.fixture(autouse=True)
def no_budget_left_behind():
    threads = torch.get_num_threads()
    yield
    tfg.set_budget(None)
    budget._forget()
    torch.set_num_threads(threads)


def wrapped(model):
    """As tfg.wrap(model, budget=...) leaves it, with the budget itself left to the test."""
    tfg.wrap(model, budget="auto")
    tfg.set_budget(None)
    return model


# -- it holds, and changes nothing -----------------------------------------------------------------------------------------
def test_a_batch_that_fits_keeps_all_that_plain_keeps():
    plain, model = new_model(), wrapped(new_model())
    x = batch()
    with room_of(2**40):
        for _ in range(2):
            wanted, plain_peak = measured(plain, x)
            (got, peak), counts = counts_of(model, lambda: measured(model, x))
            assert not differences(got, wanted)
    assert counts == {"evictions": 0, "evicted_bytes": 0, "ops_replayed": 0, "replayed_again": 0}
    assert peak == plain_peak


@pytest.mark.parametrize("n_threads", [1, 2])
def test_the_ceiling_is_exact_and_the_bits_are_plains(n_threads):
    torch.set_num_threads(n_threads)
    plain, model = new_model(), wrapped(new_model())
    x = batch()
    wanted, plain_peak = measured(plain, x)
    for percent in (100, 95, 90, 80, 70, 60, 50, 45):
        room_bytes = plain_peak * percent // 100
        for _ in range(2):
            with room_of(room_bytes, strict=True):
                got, peak = measured(model, x)
                assert _C.over_budget()[0] == 0
            assert peak <= room_bytes and not differences(got, wanted), percent


def test_peak_and_replay_follow_the_budget():
    torch.set_num_threads(1)
    plain, model = new_model(8), wrapped(new_model(8))
    x = batch()
    _, plain_peak = measured(plain, x)
    for _ in range(5):
        with room_of(plain_peak // 2):
            step(model, x)  # prices settle
    peaks, replayed, left = [], [], []
    for percent in range(105, 35, -5):
        with room_of(plain_peak * percent // 100):
            (_, peak), counts = counts_of(model, lambda: measured(model, x))
        peaks.append(peak)
        replayed.append(counts["ops_replayed"])
        left.append(counts["evicted_bytes"])
    assert all(later <= earlier for earlier, later in zip(peaks, peaks[1:])), peaks
    assert all(later >= 0.98 * earlier for earlier, later in zip(left, left[1:])), left
    # Operators are counted, not weighed: between near budgets a dear one may take the place of two cheap ones.
    assert replayed[0] == 0 < replayed[-1] and replayed[::4] == sorted(replayed[::4]), replayed


def test_sources_are_not_kept_alive_by_a_region_that_keeps():
    def region(x):
        return x.exp().sum()

    key = _C.new_key("region")
    weight = torch.ones((), requires_grad=True)
    with room_of(2**40):
        x = torch.randn(1000)
        address = weakref.ref(x.untyped_storage())
        loss = _C.run(_C.KEEP, key, lambda x: region(x * weight), (x,), {})
        del x
        gc.collect()
        assert address() is not None  # x * weight saves it
        y = torch.randn(1000)
        address = weakref.ref(y.untyped_storage())
        other = _C.run(_C.KEEP, key, lambda y: (y + weight).exp().sum(), (y,), {})
        del y
        assert address() is None
        (loss + other).backward()


@pytest.mark.parametrize("function", [
    lambda x: x.to_sparse().to_dense().sin(), lambda x: torch.sparse.mm(x.to_sparse(), x).exp(),
    lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous()).abs().sin()], ids=["sparse", "sparse product", "complex"])
def test_odd_tensors_are_no_obstacle_to_a_budget(function):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    wanted = torch.autograd.grad(function(x).sum(), x)
    for room_bytes in (2**40, 0):
        with room_of(room_bytes):
            assert not differences(torch.autograd.grad(tfg.checkpoint(function, x).sum(), x), wanted)


@pytest.mark.parametrize("made", [lambda: torch.empty(0), lambda: torch.tensor(2.0), lambda: torch.full((64,), 0.5)],
                         ids=["empty", "scalar", "256 bytes"])
def test_a_small_source_that_dies_is_no_reason_to_keep_what_leans_on_it(made):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def region(small):
        return (x * 2 + (small if small.numel() else small.sum())).sin().cos()

    wanted = torch.autograd.grad(region(made()).sum(), x)
    with room_of(2**40):
        y = _C.run(_C.KEEP, _C.new_key("region"), region, (made(),), {})
        gc.collect()
        assert _C.evict(2**40) >= 2 * x.nbytes
        got = torch.autograd.grad(y.sum(), x)
    assert not differences(got, wanted)


@pytest.mark.parametrize("when", ["inside", "after"])
def test_a_leaf_that_is_written_under_a_budget_is_put_aside(when):
    """Inside: a recorded write to a parameter that evicted values lean on. After: a leaf that is a view of somebody's buffer."""
    def run(call):
        buffer = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        leaf = buffer.detach().requires_grad_()

        def region(leaf):
            y = (leaf * 2 + 1).sin().exp()
            if when == "inside":
                leaf.detach().add_(0.25)
            return y.tanh()

        y = call(region, leaf)
        if when == "after":
            _C.evict(2**40)
            buffer.mul_(0.5)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaf)]

    wanted = run(lambda function, leaf: function(leaf))
    key = _C.new_key("region")
    for room_bytes in (2**40, 0):
        with room_of(room_bytes):
            assert not differences(run(lambda function, leaf: _C.run(_C.KEEP, key, function, (leaf,), {})), wanted)


# -- when nothing is left to let go of ----------------------------------------------------------------------------------------
def test_going_over_is_said_once_with_what_the_memory_is_made_of(caplog):
    caplog.set_level(logging.INFO, logger="tfg")
    model, x = new_model(), batch()
    own = budget.own_bytes(model)
    wanted = step(new_model(), x)
    tfg.wrap(model, budget=max(own + 1000, cpu.memory_allocated() + 2**16))
    caplog.clear()
    for _ in range(3):
        assert not differences(step(model, x), wanted)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1 and "parameters" in warned[0] and "estimate of the smallest budget" in warned[0]
    needed = _C.over_budget()[1]
    assert needed > cpu.memory_allocated()


def test_the_smallest_budget_that_is_estimated_does_work():
    model, x = wrapped(new_model()), batch()
    wanted = step(new_model(), x)
    with room_of(2**16):
        step(model, x)
        needed = _C.over_budget()[1] - cpu.memory_allocated()
    with room_of(needed + needed // 20, strict=True):
        assert not differences(step(model, x), wanted)


def test_strict_is_torchs_out_of_memory_error_and_the_next_smaller_batch_trains_on():
    model, large, small = wrapped(new_model()), batch(tokens=256), batch(tokens=16)
    wanted = step(new_model(), small)
    small_peak = measured(new_model(), small)[1]
    forget_the_queue()
    gc.collect()
    with room_of(small_peak * 11 // 10, strict=True):
        before = cpu.memory_allocated()
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match="Nothing that could be made again is left.*estimate"):
                step(model, large)
            for p in model.parameters():
                p.grad = None
            forget_the_queue()
            gc.collect()
            assert cpu.memory_allocated() == before and not _C.in_region()
            assert not differences(step(model, small), wanted)


def two_steps(model, x):
    """Two steps of SGD with momentum: parameters and losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for i in range(2):
        torch.manual_seed(i)
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses + copied(model.parameters())


def run_failing_at(k, is_lasting, room_bytes, x, wanted):
    """One run whose k-th allocation fails: whether it got through (then bit for bit), and whether anything failed."""
    model, is_through = wrapped(Layers(2, Layer)), False
    before = cpu.memory_allocated()
    with room_of(room_bytes):
        _C.fail_allocation(k, is_lasting)
        try:
            got = two_steps(model, x)
            is_through = True
        except torch.OutOfMemoryError:
            pass
        finally:
            n_failed = _C.fail_allocation(-1)
        for p in model.parameters():
            p.grad = None
        if is_through:
            assert not differences(got, wanted), k
        got = None
        forget_the_queue()
        gc.collect()
        assert not _C.in_region() and cpu.memory_allocated() == before, k
        assert not differences(two_steps(wrapped(Layers(2, Layer)), x), wanted), k
    return is_through, n_failed > 0


def sweep_failures(room_bytes, stride, is_lasting):
    """Every stride-th allocation of two steps fails in turn, until none is left to: (n runs, n that got through)."""
    x = batch(tokens=8)
    wanted = two_steps(Layers(2, Layer), x)
    n_runs = n_through = 0
    has_failed = True
    while has_failed:
        gc.collect()
        is_through, has_failed = run_failing_at(stride * (n_runs + 1) - 1, is_lasting, room_bytes, x, wanted)
        n_runs, n_through = n_runs + 1, n_through + is_through
    assert is_through
    return n_runs, n_through


@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("room_bytes", [2**40, 2**17], ids=["roomy", "tight"])
def test_any_allocation_may_fail(room_bytes, is_lasting):
    n_runs, n_through = sweep_failures(room_bytes, 37, is_lasting)
    assert n_runs > 8 and n_through >= 1


@pytest.mark.slow
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("room_bytes", [2**40, 2**17, 2**15], ids=["roomy", "tight", "none"])
def test_every_allocation_may_fail(room_bytes, is_lasting):
    sweep_failures(room_bytes, 1, is_lasting)


# -- backward does not thrash ---------------------------------------------------------------------------------------------------
def test_nothing_is_replayed_twice_where_there_is_room():
    model, x = wrapped(new_model()), batch()
    with room_of(2**40):
        loss = model(x.requires_grad_()).square().mean()
        assert _C.evict(2**40) > 0
        _, counts = counts_of(model, loss.backward)
    n_taped = sum(_C.stats(block.__dict__["_tfg_state"].key)["ops_taped"] for block in model.blocks)
    assert 0 < counts["ops_replayed"] <= n_taped and counts["replayed_again"] == 0


def test_a_long_chain_under_a_tight_budget_is_not_quadratic():
    torch.set_num_threads(1)
    n_ops, n_elements = 256, 4096
    key = _C.new_key("chain")

    def chain(x):
        for _ in range(n_ops):
            x = x.sin()
        return x.sum()

    x = torch.randn(n_elements, requires_grad=True)
    chain(x).backward()
    wanted = x.grad
    x.grad = None
    for _ in range(3):
        x.grad, before = None, _C.stats(key)["ops_replayed"]
        with room_of(16 * 4 * n_elements, strict=True):
            _C.run(_C.KEEP, key, chain, (x,), {}).backward()
        assert not differences(x.grad, wanted)
    assert _C.stats(key)["ops_replayed"] - before < 10 * n_ops  # going back over the whole chain each time would be n_ops**2 / 2


# -- several of everything --------------------------------------------------------------------------------------------------------
def accumulated(model, xs):
    """Gradients after all forwards, then all backwards, in order."""
    torch.manual_seed(0)
    losses = [model(x).square().mean() for x in xs]
    for loss in losses:
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    return losses, grads


def test_several_tapes_share_the_ledger():
    plain, model = new_model(4), wrapped(new_model(4))
    xs = [batch(i, tokens) for i, tokens in enumerate((48, 16, 32))]
    gc.collect()
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    wanted = accumulated(plain, xs)
    room_bytes = (cpu.max_memory_allocated() - before) * 55 // 100
    with room_of(room_bytes, strict=True):
        assert not differences(accumulated(model, xs), wanted)


def test_a_reference_model_without_grad_beside_a_trained_one():
    reference, model, plain = wrapped(new_model(3)), wrapped(new_model(3)), new_model(3)
    x = batch()

    def distil(teacher, student):
        torch.manual_seed(0)
        with torch.no_grad():
            target = teacher(x)
        F.mse_loss(student(x) * 2, target).backward()
        return [p.grad.clone() for p in student.parameters()]

    wanted = distil(copy.deepcopy(plain), plain)
    _, plain_peak = measured(new_model(3), x)
    with room_of(plain_peak * 7 // 10):
        assert not differences(distil(reference, model), wanted)


def train_beside_others(n_steps):
    """Two threads under one tight budget while a third draws random numbers; the errors, and what each thread got."""
    def new():
        return Layers(3, functools.partial(Layer, dropout=0.0))

    models = [wrapped(new()) for _ in range(2)]
    wanted = [step(new(), batch(i)) for i in range(2)]
    _, peak = measured(new(), batch())
    errors, is_over = [], threading.Event()

    def trains(i):
        try:
            for _ in range(n_steps):
                if wrong := differences(step(models[i], batch(i), seed=None), wanted[i]):
                    errors.append(wrong)
                    return
        except BaseException as error:
            errors.append(error)

    def draws():
        while not is_over.is_set():
            torch.randn(1000)

    threads = [threading.Thread(target=trains, args=(i,), daemon=True) for i in range(2)]
    third = threading.Thread(target=draws, daemon=True)
    with room_of(peak):
        for thread in (third, *threads):
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        is_over.set()
        third.join()
    return errors


def test_two_threads_share_a_tight_budget_while_a_third_draws_random_numbers():
    assert train_beside_others(20) == []


@pytest.mark.slow
def test_two_threads_share_a_tight_budget_for_200_steps():
    assert train_beside_others(200) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_has_no_ceiling():
    with room_of(2**20, strict=True):
        child = os.fork()
        if child == 0:
            os._exit(0 if _C.budget() == -1 and len(bytes(torch.empty(2**22, dtype=torch.uint8).untyped_storage()[:1])) == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0


# -- fixed policies, clamped --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [{"interval": 3}, {"every_n_layers": 2}, {"interval": "dynamic"}, {"every_n_layers": "dynamic"}], ids=str)
def test_a_fixed_policy_is_clamped_by_the_budget(how):
    plain, model, x = new_model(), new_model(), batch()
    wanted, plain_peak = measured(plain, x)
    gc.collect()
    tfg.wrap(model, budget=cpu.memory_allocated() + plain_peak * 6 // 10, **how)
    (got, peak), counts = counts_of(model, lambda: measured(model, x))
    assert not differences(got, wanted) and _C.over_budget()[0] == 0
    assert tfg.report(model).to_dict()["total"]["evictions"] == counts["evictions"]


def test_dynamic_follows_the_formula_for_each_batch():
    model = Layers(16, Layer)
    for name in ("interval", "every_n_layers"):
        tfg.wrap(model, **{name: "dynamic"})
        for tokens in (1, 4, 9, 48):
            step(model, batch(tokens=tokens))
            stack = model.blocks[0].__dict__["_tfg_state"].stack
            assert stack.here.dial == tfg.dynamic_interval(16, tokens)


def test_dynamic_implies_the_machines_budget():
    tfg.wrap(new_model(), interval="dynamic")
    assert budget.in_force().said == "auto"
    tfg.set_budget(None)


# -- the model as a whole -----------------------------------------------------------------------------------------------------------
def test_the_optimizers_step_stays_below_the_ceiling_too():
    x = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))

    def trained(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for i in range(4):
            torch.manual_seed(i)
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses + copied(model.parameters())

    gc.collect()
    before = cpu.memory_allocated()
    cpu.reset_peak_memory_stats()
    wanted = trained(Language(6, width=WIDTH))
    ceiling = cpu.memory_allocated() + (cpu.max_memory_allocated() - before) * 19 // 20
    model = wrapped(Language(6, width=WIDTH))
    _C.set_budget(ceiling, True, 0)
    cpu.reset_peak_memory_stats()
    assert not differences(trained(model), wanted) and cpu.max_memory_allocated() <= ceiling


@pytest.mark.parametrize("room", [2**21, 2**31], ids=["pressed", "roomy"])
def test_what_is_kept_is_counted_whether_pressed_or_not(room):
    key = _C.new_key("kept")
    x = torch.randn(1 << 14, requires_grad=True)

    def chain(x):
        for _ in range(8):
            x = x.sin().exp()
        return x

    with room_of(room):
        y = _C.run(_C.KEEP, key, chain, (x,), {})
        assert _C.stats(key)["evicted_bytes"] == 0
        assert _C.stats(key)["kept_bytes"] == 8 * x.nbytes  # eight of exp; what sin saved are the same storages
        y.sum().backward()


def test_a_peak_that_is_reset_leaves_no_place_behind():
    x = torch.randn(1 << 14, requires_grad=True)
    tfg.checkpoint(lambda x: x.sin().exp().sin(), x).sum().backward()
    assert _C.peak_place()["what"]
    cpu.reset_peak_memory_stats()
    place = _C.peak_place()
    assert (place["kept_bytes"], place["what"], place["block"]) == (0, "", "")
