# SPDX-License-Identifier: BSD-3-Clause
"""What lives how long under the rerun engine, and what a region leaves behind: nothing."""

import contextlib
import functools
import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.utils.checkpoint as stock
from bitwise import differences
from rerun_programs import Counted, tensor
from torch.utils.checkpoint import GraphExecGroup

import tfg
from tfg import _C


def region(reentrant):
    def call(function, *args, **keywords):
        with tfg.engine("rerun"):
            return tfg.checkpoint(function, *args, use_reentrant=reentrant, **keywords)
    return call


rerun = region(False)
BOTH_FORMS = pytest.mark.parametrize("call", [rerun, region(True)], ids=["rerun", "reentrant"])


def state():
    return (torch._C._autograd._top_saved_tensors_default_hooks(False), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(), _C.engine(), torch.get_rng_state().sum().item())


# -- lifetime -----------------------------------------------------------------------------------------------------------------
class Watched:
    """A callable with an input and an intermediate result that can be waited for to die."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        y = x.sin()
        self.seen.append(weakref.ref(y))
        return y.exp().cos()


@BOTH_FORMS
@pytest.mark.parametrize("ends", ["backward", "dropped", "retained"])
def test_inputs_function_and_results_die_with_the_graph(call, ends):
    gc.disable()
    try:
        leaf, function = tensor(), Watched()
        x = leaf * 1
        loss = call(function, x).sum()
        inside = function.seen
        watched = [weakref.ref(x), weakref.ref(function)]
        del x, function
        assert watched[0]() is not None and inside[0]() is None
        if ends != "dropped":
            loss.backward(retain_graph=ends == "retained")
        del loss
        assert [ref() for ref in watched + inside] == [None] * (len(inside) + 2)
    finally:
        gc.enable()


@BOTH_FORMS
def test_a_backward_frees_what_it_used_while_the_loss_lives(call):
    function = Counted()
    x = tensor() * 1
    loss = call(function, x).sum()
    dead = weakref.ref(x)
    del x
    loss.backward()
    assert dead() is None and loss is not None


def n_live_tensor_bytes():
    return tfg.cpu.memory_allocated()


@pytest.mark.parametrize("retain", [False, True])
def test_memory_falls_region_by_region_in_backward(retain):
    x, n = tensor(1, 64, 64), 6
    seen, y = [], x
    for _ in range(n):
        y = rerun(lambda t: t.sin().exp().tanh().sigmoid().cos(), y)
        y.register_hook(lambda g: seen.append(n_live_tensor_bytes()))
    base = n_live_tensor_bytes()
    y.sum().backward(retain_graph=retain)
    assert max(seen) - base <= 3 * x.nbytes, [(each - base) / x.nbytes for each in seen]
    assert n_live_tensor_bytes() - base <= x.nbytes + 1024  # x.grad


def test_a_partial_backward_frees_what_it_did_not_use():
    function, x = Counted(tensor(2, 64, 64)), tensor(1, 64, 64)
    loss = rerun(function, x).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    base = n_live_tensor_bytes()
    for _ in range(5):
        torch.autograd.grad(loss, function.weight, retain_graph=True)
        torch.autograd.grad(loss, x, retain_graph=True)
    assert n_live_tensor_bytes() == base


def test_a_failed_backward_frees_what_it_made():
    function, x = Counted(tensor(2, 64, 64)), tensor(1, 64, 64)
    y = rerun(function, x * 1)
    loss = y.sum()

    def fail(grad):
        raise KeyError("mine")
    y.grad_fn.next_functions[0][0].register_hook(lambda *_: fail(None))
    base = n_live_tensor_bytes()
    for _ in range(3):
        with pytest.raises(KeyError):
            loss.backward(retain_graph=True)
        assert n_live_tensor_bytes() == base


def test_a_group_that_is_over_frees_what_was_made_under_it():
    function, x = Counted(tensor(2, 64, 64)), tensor(1, 64, 64)
    loss = rerun(function, x).sum()
    base = None
    for _ in range(4):
        with GraphExecGroup():
            torch.autograd.grad(loss, x, retain_graph=True)
        torch.autograd.grad(loss, x, retain_graph=True)
        base = base or n_live_tensor_bytes()
    assert n_live_tensor_bytes() == base


def test_what_a_pass_made_for_a_part_of_the_graph_dies_with_that_part():
    x = tensor(1, 64, 64)
    y, z = rerun(lambda t: (t.sin().exp().tanh(), t.cos().exp().tanh()), x)
    y, z = y.sum(), z.sum()
    with GraphExecGroup():
        torch.autograd.grad(y, x, retain_graph=True)
        held = n_live_tensor_bytes()
        del z
        assert held - n_live_tensor_bytes() >= 2 * x.nbytes


@BOTH_FORMS
def test_20000_regions_may_be_dropped_at_once(call):
    y = tensor()
    for _ in range(20000):
        y = call(torch.sin, y)
    del y


# -- a thousand times ---------------------------------------------------------------------------------------------------------
def n_objects():
    gc.collect()
    return len(gc.get_objects())


def once(call, fails):
    function, x = Counted(), tensor()

    def breaks(t):
        y = function(t)
        if fails == "forward" or (fails == "again" and function.n_calls == 2):
            raise ValueError("mine")
        return y
    with contextlib.suppress(ValueError):
        loss = call(breaks, x * 1, ).sum()
        loss.backward(retain_graph=True)
        loss.backward()


@BOTH_FORMS
@pytest.mark.parametrize("fails", ["", "forward", "again"])
def test_1000_rounds_grow_nothing(call, fails):
    for _ in range(20):
        once(call, fails)
    before, allocated, blocks = n_objects(), n_live_tensor_bytes(), sys.getallocatedblocks()
    for _ in range(1000):
        once(call, fails)
    assert n_objects() - before < 20 and n_live_tensor_bytes() == allocated
    assert sys.getallocatedblocks() - blocks < 500


def test_1000_retained_backwards_of_one_graph_grow_nothing():
    function, x = Counted(), tensor()
    loss = rerun(function, x).sum()

    def walk():
        torch.autograd.grad(loss, x, retain_graph=True)
    for _ in range(20):
        walk()
    before, allocated, blocks = n_objects(), n_live_tensor_bytes(), sys.getallocatedblocks()
    for _ in range(1000):
        walk()
    assert n_objects() - before < 20 and n_live_tensor_bytes() == allocated and sys.getallocatedblocks() - blocks < 500


def n_references(objects):
    return [sys.getrefcount(each) for each in objects]


@BOTH_FORMS
def test_reference_counts_come_back(call):
    class Function:
        def __call__(self, x, other, text):
            return (x * 2).sin().exp()
    objects = [Function(), object(), "some text of our own", None, _C.StopRerun]
    objects[3] = tensor()

    def go():
        call(objects[0], objects[3], objects[1], objects[2]).sum().backward()
    go()
    before = n_references(objects)
    for _ in range(10):
        go()
    assert n_references(objects) == before


# -- no trace -----------------------------------------------------------------------------------------------------------------
@BOTH_FORMS
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_either_run_restores_everything(call, error):
    for failing_run in (1, 2):
        n_runs = []

        def f(t):
            n_runs.append(1)  # noqa: B023
            torch.rand(3)
            y = t.sin().exp()
            if len(n_runs) == failing_run:  # noqa: B023
                raise error("mine")
            return y.cos()
        x = tensor()
        before = state()
        with pytest.raises(error, match="mine"):
            with torch.autocast("cpu", dtype=torch.float16):
                y = call(f, x, preserve_rng_state=failing_run == 2)
            after_forward = state()
            y.float().sum().backward()
        if failing_run == 2:
            assert after_forward == state()
        else:
            assert before[:-1] == state()[:-1]


def test_hooks_that_the_function_forgot_on_the_stack_go_with_the_region():
    def f(t):
        torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
        return t.sin().exp()
    before, x = state(), tensor()
    rerun(f, x).sum().backward()
    assert state()[:-1] == before[:-1]


def test_contexts_that_fail_leave_no_hooks():
    @contextlib.contextmanager
    def fails(at_enter):
        if at_enter:
            raise ValueError("mine")
        yield
        raise ValueError("mine")

    for at_enter in (True, False):
        before = state()
        with pytest.raises(ValueError, match="mine"):
            rerun(torch.sin, tensor(), context_fn=functools.partial(lambda e: (fails(e), contextlib.nullcontext()), at_enter))
        y = rerun(torch.exp, tensor(), context_fn=functools.partial(lambda e: (contextlib.nullcontext(), fails(e)), at_enter), early_stop=False)
        with pytest.raises(ValueError, match="mine"):
            y.sum().backward()
        assert state() == before


def test_pack_hooks_of_a_user_that_fail_leave_nothing():
    def fails(t):
        raise ValueError("mine")
    before = state()
    with torch.autograd.graph.saved_tensors_hooks(fails, lambda t: t), pytest.raises(ValueError, match="mine"):
        rerun(torch.sin, tensor())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, fails):
        y = rerun(torch.sin, tensor() * 1)
    with pytest.raises(ValueError, match="mine"):
        y.sum().backward()
    assert state() == before


def test_the_engine_of_the_forward_serves_the_backward():
    seen = []

    def inner(t):
        seen.append(_C.engine())
        return t.sin().exp()

    def outer(t):
        return tfg.checkpoint(inner, t.cos(), use_reentrant=False).tanh()
    x, twin = tensor(), tensor()
    wanted = torch.autograd.grad(outer(twin).sum(), twin)[0]
    for chosen in ("rerun", "replay"):
        seen.clear()
        with tfg.engine(chosen):
            y = tfg.checkpoint(outer, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext()))
        assert not differences(torch.autograd.grad(y.sum(), x)[0], wanted)
        assert set(seen) == {_C.RERUN if chosen == "rerun" else _C.INSIDE_RERUN} and _C.engine() == _C.REPLAY


def test_a_tape_inside_a_rerun_region_hides_nothing_from_it():
    f = Counted()

    def watched(t):
        taped.append(_C.in_region())
        return f(t)

    def outer(t):
        with tfg.engine("replay"):
            return tfg.checkpoint(watched, tfg.checkpoint(watched, t).sin()).tanh()
    taped = []
    for _ in range(3):  # at first sight and after
        x, twin = tensor(), tensor()
        wanted = torch.autograd.grad(f(f(twin).sin()).tanh().sum(), (twin, f.weight))
        assert not differences(torch.autograd.grad(rerun(outer, x).sum(), (x, f.weight)), wanted)
    assert taped and not any(taped)


def test_engines_have_numbers():
    for number in (-1, 3):
        with pytest.raises(ValueError, match="no engine"):
            _C.choose_engine(number)
    with pytest.raises(TypeError):
        _C.choose_engine("rerun")


# -- cost, counted ------------------------------------------------------------------------------------------------------------
def python_calls(function):
    """How many Python functions were entered, on this thread."""
    n = 0

    def count(frame, event, argument):
        nonlocal n
        n += event == "call"
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return n


def chain_of(n):
    def f(x):
        for _ in range(n):
            x = torch.sin(x)
        return x
    return f


def test_a_saved_tensor_costs_no_python_call():
    def cost(call, n):
        f, x = chain_of(n), tensor()
        return python_calls(lambda: call(f, x).sum().backward())

    def theirs(f, x):
        return stock.checkpoint(f, x, use_reentrant=False)

    def ours(f, x):
        return tfg.checkpoint(f, x, use_reentrant=False)

    def plain(f, x):
        return f(x)
    with tfg.engine("rerun"):
        for call in (ours, theirs):
            cost(call, 1)
        assert cost(ours, 40) == cost(ours, 10)
        assert cost(theirs, 40) - cost(theirs, 10) >= 30
        added, stocks = cost(ours, 4) - cost(plain, 4), cost(theirs, 4) - cost(plain, 4)
    assert added <= 0.25 * stocks, (added, stocks)


def test_a_reentrant_region_costs_few_python_calls():
    def cost(module):
        f, x = chain_of(4), tensor()
        return python_calls(lambda: module.checkpoint(f, x, use_reentrant=True).sum().backward())
    for module in (tfg, stock):
        cost(module)
    f, x = chain_of(4), tensor()
    plain = python_calls(lambda: f(x).sum().backward())
    assert cost(tfg) - plain <= 0.5 * (cost(stock) - plain), (cost(tfg), cost(stock), plain)


# -- threads ------------------------------------------------------------------------------------------------------------------
def test_many_threads_walk_one_graph_at_once():
    f, x = Counted(), tensor()
    loss = rerun(f, x).sum()
    wanted = torch.autograd.grad(f(x).sum(), (x, f.weight))
    results, barrier = [], threading.Barrier(4)

    def walk():
        barrier.wait()
        for _ in range(25):
            results.append(torch.autograd.grad(loss, (x, f.weight), retain_graph=True))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=walk) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert len(results) == 100 and not any(differences(got, wanted) for got in results)
