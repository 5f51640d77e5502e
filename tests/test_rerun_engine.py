# SPDX-License-Identifier: BSD-3-Clause
"""The rerun engine, use_reentrant=False: it does what the stock does, program by program, and where it differs it says so."""

import functools

import pytest
import torch
import torch.utils.checkpoint as stock
from bitwise import differences
from rerun_programs import COUNTING, PROGRAMS, Counted, tensor
from torch.utils.checkpoint import CheckpointError, GraphExecGroup, set_checkpoint_debug_enabled

import tfg
from tfg import _C


def rerun(function, *args, **keywords):
    with tfg.engine("rerun"):
        return tfg.checkpoint(function, *args, **{"use_reentrant": False, **keywords})


def theirs(function, *args, **keywords):
    return stock.checkpoint(function, *args, **{"use_reentrant": False, **keywords})


def replay(function, *args, **keywords):
    return tfg.checkpoint(function, *args, **keywords)


STOCK_KEYWORDS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}


def plain(function, *args, **keywords):
    return function(*args, **{name: value for name, value in keywords.items() if name not in STOCK_KEYWORDS})


ENGINES = {"rerun": rerun, "replay": replay}


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@pytest.fixture(autouse=True)
def no_trace():
    """Whatever a test did, the thread is as before."""
    before = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    yield
    assert top_hooks() is None
    assert before == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))


# -- the stock as oracle ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_the_plain_result(name, engine):
    wanted = PROGRAMS[name](plain)
    assert not differences(PROGRAMS[name](ENGINES[engine]), wanted)
    assert not differences(PROGRAMS[name](theirs), wanted)


@pytest.mark.parametrize("name", COUNTING)
def test_function_runs_as_often_as_with_the_stock(name):
    assert not differences(COUNTING[name](rerun), COUNTING[name](theirs))


def test_2000_regions_in_one_graph():
    for how in ({}, {"use_reentrant": True}):
        x = y = tensor()
        for _ in range(2000):
            y = rerun(torch.sin, y, **how)
        y.sum().backward()
        wanted = z = tensor()
        for _ in range(2000):
            z = z.sin()
        assert not differences(x.grad, torch.autograd.grad(z.sum(), wanted)[0])


def test_30_regions_inside_each_other():
    def nest(depth):
        return Counted() if depth == 0 else lambda t: rerun(nest(depth - 1), t.sin()).cos()
    x, twin = tensor(), tensor()

    def plain_nest(t, depth):
        return Counted()(t) if depth == 0 else plain_nest(t.sin(), depth - 1).cos()
    assert not differences(torch.autograd.grad(rerun(nest(30), x).sum(), x), torch.autograd.grad(plain_nest(twin, 30).sum(), twin))


def test_sequential_runs_its_last_segment_once():
    for use in (rerun_sequential, functools.partial(stock.checkpoint_sequential, use_reentrant=False)):
        layers, x = [Counted() for _ in range(4)], tensor()
        use(layers, 2, x).sum().backward()
        assert [layer.n_calls for layer in layers] == [2, 2, 1, 1]


def rerun_sequential(*args, **keywords):
    with tfg.engine("rerun"):
        return tfg.checkpoint_sequential(*args, use_reentrant=False, **keywords)


# -- non-determinism ----------------------------------------------------------------------------------------------------------
def three(x):
    return x.sin().exp().sin()


def two(x):
    return x.sin().exp()


def two_wider(x):
    return x.sin() * torch.ones(2, 4, 4)


def first_then(first, second):
    runs = iter([first])
    return lambda x: next(runs, second)(x)


DIFFERENT = {
    "fewer": (three, two, {}, "A different number of tensors was saved during the original forward and recomputation."),
    "fewer, no early stop": (three, two, {"early_stop": False}, "A different number of tensors was saved during the original forward"),
    "more": (two, three, {"early_stop": False}, "trying to save more tensors during recomputation than during the original forward pass."),
    "another shape": (two, two_wider, {}, "Recomputed values for the following tensors have different metadata than during the forward pass."),
}


@pytest.mark.parametrize("call", [rerun, theirs], ids=["rerun", "stock"])
@pytest.mark.parametrize("case", DIFFERENT)
def test_a_second_run_that_differs_is_a_checkpoint_error(case, call):
    first, second, keywords, words = DIFFERENT[case]
    x = tensor()
    y = call(first_then(first, second), x, **keywords)
    with pytest.raises(CheckpointError) as raised:
        y.sum().backward()
    assert str(raised.value).startswith("torch.utils.checkpoint: " + words)
    assert all(word in str(raised.value) for word in ("debug=True", "set_checkpoint_debug_enabled(True)", "mark_dynamic", "_set_lru_cache(False)")) or case == "more"
    assert x.grad is None


def test_a_mismatch_names_position_and_both_metadata():
    y = rerun(first_then(two, two_wider), tensor())
    with pytest.raises(CheckpointError, match=r"tensor at position 1:\nsaved metadata: shape \[4, 4\], dtype torch.float32, device cpu\n"
                                              r"recomputed metadata: shape \[2, 4, 4\], dtype torch.float32, device cpu"):
        y.sum().backward()


@pytest.mark.parametrize("call", [rerun, theirs], ids=["rerun", "stock"])
def test_early_stop_hides_more_and_none_hides_another_shape(call):
    x, twin = tensor(), tensor()
    call(first_then(two, three), x).sum().backward()
    assert not differences(x.grad, torch.autograd.grad(two(twin).sum(), twin)[0])

    def f(t, n=[]):  # noqa: B006
        n.append(1)
        return t.sin() * torch.ones(1 if len(n) > 1 else 4, 1)
    call(f, tensor(), determinism_check="none").sum().backward()
    with pytest.raises(CheckpointError, match="different metadata"):
        call(lambda t, n=[]: (n.append(1), t.sin() * torch.ones(1 if len(n) > 1 else 4, 1))[1], tensor()).sum().backward()  # noqa: B006


def test_a_failed_run_leaves_nothing_behind():
    f = Counted()
    broken = first_then(f, two)
    x = tensor()
    y = rerun(broken, x)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="A different number"):
            y.sum().backward(retain_graph=True)
    runs = iter([f, two])
    y = rerun(lambda t: next(runs, f)(t), x)
    with pytest.raises(CheckpointError):
        y.sum().backward(retain_graph=True)
    assert not differences(torch.autograd.grad(y.sum(), x), torch.autograd.grad(f(x).sum(), x))


@pytest.mark.parametrize("how", ["argument", "context"])
def test_debug_tells_the_operators_of_both_runs(how):
    if how == "argument":
        y = rerun(first_then(two, two_wider), tensor(), debug=True)
    else:
        with set_checkpoint_debug_enabled(True):
            y = rerun(first_then(two, two_wider), tensor())
    with pytest.raises(CheckpointError) as raised:
        y.sum().backward()
    words = str(raised.value)
    assert words.startswith("An error happened while unpacking tensors; dumping logs of latest computation")
    assert "You are seeing this error because you passed `debug=True` to checkpoint" in words
    first, second = words.split("== Operators executed during the original forward:")[1].split("== Operators executed during recomputation:")
    assert "float32[4, 4] = aten.exp.default(float32[4, 4])" in first and "aten.exp.default" not in second and "aten.ones" in second
    assert "test_rerun_engine.py" in words and ":two\n" in words
    assert isinstance(raised.value.__cause__, CheckpointError) and "different metadata" in str(raised.value.__cause__)


def test_debug_may_be_switched_off_from_outside_and_changes_no_result():
    with set_checkpoint_debug_enabled(False):
        y = rerun(first_then(two, two_wider), tensor(), debug=True)
    with pytest.raises(CheckpointError, match="^torch.utils.checkpoint: Recomputed values"):
        y.sum().backward()
    f, x = Counted(), tensor()
    assert not differences(torch.autograd.grad(rerun(f, x, debug=True).sum(), x), torch.autograd.grad(f(x).sum(), x))


# -- arguments that do not go together ----------------------------------------------------------------------------------------
def contexts():
    return stock.noop_context_fn()


@pytest.mark.parametrize("call", [rerun, theirs], ids=["rerun", "stock"])
def test_refused_arguments(call):
    with pytest.raises(ValueError, match="debug=True is incompatible with non-default context_fn"):
        call(torch.sin, tensor(), debug=True, context_fn=contexts)
    with set_checkpoint_debug_enabled(True), pytest.raises(ValueError, match="debug=True is incompatible with non-default context_fn"):
        call(torch.sin, tensor(), context_fn=contexts)
    with pytest.raises(ValueError, match=r"determinism_check should be one of \['default', 'none'\], but got strict"):
        call(torch.sin, tensor(), determinism_check="strict")
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        call(lambda x: x, tensor(), scale=1)


def test_a_missing_use_reentrant_is_warned_of_under_rerun_alone():
    with tfg.engine("rerun"):
        with pytest.warns(UserWarning, match="^torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly") as seen:
            tfg.checkpoint(torch.sin, tensor())
        assert seen[0].filename == __file__
        with pytest.warns(UserWarning, match="^torch.utils.checkpoint.checkpoint_sequential: the use_reentrant parameter") as seen:
            tfg.checkpoint_sequential([torch.sin, torch.cos], 2, tensor())
        assert seen[0].filename == __file__ and len(seen) == 1
    tfg.checkpoint(torch.sin, tensor())
    tfg.checkpoint_sequential([torch.sin, torch.cos], 2, tensor())


@pytest.mark.parametrize("call", [rerun, theirs], ids=["rerun", "stock"])
def test_a_context_must_not_swallow_the_functions_exception(call):
    class Swallows:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return True

    def fails(x):
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="^torch.utils.checkpoint: the forward context provided by context_fn suppressed an exception "
                                           "raised during the checkpointed forward"):
        call(fails, tensor(), context_fn=lambda: (Swallows(), Swallows()))


def test_contexts_of_a_traced_call_must_be_dispatch_modes():
    from torch.fx.experimental.proxy_tensor import make_fx
    with pytest.raises(AssertionError, match="must generate a tuple of two `TorchDispatchMode`s"):
        make_fx(lambda x: rerun(torch.sin, x, context_fn=contexts))(tensor())


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_call_is_traced_through(mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    def slope(x):
        return torch.autograd.grad(rerun(two, x).sum(), x)[0]
    assert not differences(make_fx(slope, tracing_mode=mode)(tensor())(tensor()), slope(tensor()))


def test_functorch_gradients_are_refused_in_cores_words():
    for call in (rerun, theirs):
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            torch.func.grad(functools.partial(call, torch.sin))(tensor(grad=False).sum())
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"), pytest.raises(RuntimeError, match="none here"):
            call(torch.sin, tensor())


# -- once per backward --------------------------------------------------------------------------------------------------------
class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (a,), (b,) = ctx.saved_tensors, ctx.saved_tensors
        return g * (a + b).div(2).cos()


@pytest.mark.parametrize("call", [rerun, theirs], ids=["rerun", "stock"])
def test_a_saved_tensor_is_handed_out_once_per_backward(call):
    with pytest.raises(CheckpointError, match="Unpack is being triggered for a tensor that was already unpacked once."):
        call(lambda t: ReadsTwice.apply(t * 1), tensor()).sum().backward()


def test_replay_hands_out_as_often_as_asked():
    x, twin = tensor(), tensor()
    replay(lambda t: ReadsTwice.apply(t * 1), x).sum().backward()
    assert not differences(x.grad, torch.autograd.grad(twin.sin().sum(), twin)[0])


@pytest.mark.parametrize("call", [rerun, theirs], ids=["rerun", "stock"])
def test_overlapping_backwards_in_a_group_raise(call):
    loss = call(two, tensor()).sum()
    with GraphExecGroup():
        loss.backward(retain_graph=True)
        with pytest.raises(CheckpointError, match="(?s)already unpacked once. Performing two backward calls that overlap"):
            loss.backward()
    with GraphExecGroup(), pytest.raises(RuntimeError, match="GraphExecGroup contexts cannot be nested"), GraphExecGroup():
        pass


# -- changed in place ---------------------------------------------------------------------------------------------------------
MODIFIED = "has been modified by an inplace operation"


@pytest.mark.parametrize("call", [rerun, theirs, replay, plain], ids=["rerun", "stock", "replay", "plain"])
def test_a_tensor_argument_changed_before_backward_raises(call):
    x = tensor() * 1
    y = call(two, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


@pytest.mark.parametrize("call", [rerun, theirs], ids=["rerun", "stock"])
def test_a_tensor_in_a_container_changed_before_backward_is_not_noticed(call):
    leaf = tensor()
    x = leaf * 1
    y = call(lambda box: two(box[0]), [x])
    x.add_(1)
    y.sum().backward()


@pytest.mark.parametrize("call", [rerun, replay, plain], ids=["rerun", "replay", "plain"])
def test_a_parameter_written_before_backward_raises_as_in_a_plain_run(call):
    f, x = Counted(), tensor()
    y = call(f, x)
    with torch.no_grad():
        f.weight.mul_(2)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


def test_a_parameter_that_backward_does_not_ask_for_may_be_written():
    def last(call):
        w, x = tensor(2), tensor()
        y = call(lambda t: (t.sin() + w).sum() + (t * w.detach()).sum(), x)
        with torch.no_grad():
            w.mul_(2)
        return torch.autograd.grad(y, w)
    assert not differences(last(rerun), last(theirs))


@pytest.mark.parametrize("call", [rerun, replay, plain], ids=["rerun", "replay", "plain"])
def test_a_function_that_overwrites_what_it_saved_raises_as_in_a_plain_run(call):
    def f(x):
        y = x.sin()
        z = y.cos()
        y.add_(1)
        return z * x
    with pytest.raises(RuntimeError, match=MODIFIED):
        call(f, tensor()).sum().backward()


# -- the stop -----------------------------------------------------------------------------------------------------------------
def test_a_function_that_catches_the_stop_may_go_on():
    def f(x):
        y = x.sin()
        for _ in range(3):
            try:
                y = y.exp()
            except Exception:
                pass
        return y.cos()
    x, twin = tensor(), tensor()
    assert not differences(torch.autograd.grad(rerun(f, x).sum(), x), torch.autograd.grad(f(twin).sum(), twin))


def test_always_called_module_hooks_see_the_end_of_a_stopped_run():
    called = []
    module = torch.nn.Linear(4, 4)
    module.register_forward_hook(lambda *_: called.append(1), always_call=True)
    x = tensor()
    rerun(lambda t: module(t.sin()), x).sum().backward()
    assert len(called) == 2


def test_a_function_that_reads_its_own_graph_is_told():
    box = []

    def f(x):
        if box:
            box[0].grad_fn._saved_result  # noqa: B018
        return two(x)
    box.append(rerun(f, tensor()))
    with pytest.raises(RuntimeError, match="Does it read its own graph"):
        box[0].sum().backward()
    box.clear()


# -- hooks --------------------------------------------------------------------------------------------------------------------
def test_selective_contexts_find_the_users_hooks_below_ours():
    seen = []

    def f(x):
        pack = top_hooks()[0]
        seen.append((pack, pack._checkpoint_internal, pack._user_hooks))
        return two(x)

    def mine(x):
        return x
    with torch.autograd.graph.saved_tensors_hooks(mine, mine):
        y = rerun(lambda x: rerun(f, x), tensor())
    y.sum().backward()
    pack, is_internal, below = seen[0]
    assert is_internal and below[0]._checkpoint_internal and seen[0][0]._user_hooks is None
    rerun(f, tensor())
    assert seen[-1][2] is None
    with torch.autograd.graph.saved_tensors_hooks(mine, mine):
        rerun(f, tensor())
    assert seen[-1][2] == (mine, mine) and seen[-1][0]._user_hooks is None


def test_selective_checkpointing_under_rerun_is_the_stocks():
    saved = [torch.ops.aten.mm.default]
    contexts = functools.partial(stock.create_selective_checkpoint_contexts, saved)
    results = []
    for call in (rerun, theirs):
        f, x, n_mm = Counted(), tensor(), []

        class Count(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                n_mm.append(op is saved[0])  # noqa: B023
                return op(*args, **(kwargs or {}))
        with Count():
            loss = call(f, x, context_fn=contexts).sum()
            got = torch.autograd.grad(loss, (x, f.weight), retain_graph=True)
        results.append((f.n_calls, sum(n_mm), got))
        with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
            loss.backward()
    assert not differences(*results)


def test_respect_saved_tensors_hooks_is_refused_where_torch_has_it_not():
    contexts = functools.partial(stock.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    rerun(Counted(), tensor(), context_fn=contexts, respect_saved_tensors_hooks=False)
    rerun(Counted(), tensor(), respect_saved_tensors_hooks=True)
    if hasattr(contexts()[0], "respect_saved_tensors_hooks"):
        rerun(Counted(), tensor(), context_fn=contexts, respect_saved_tensors_hooks=True)
        return
    with pytest.raises(ValueError, match="this torch's selective checkpointing contexts can not"):
        rerun(Counted(), tensor(), context_fn=contexts, respect_saved_tensors_hooks=True)


def test_regions_of_both_engines_inside_each_other():
    f, x = Counted(), tensor()
    wanted = torch.autograd.grad(f(f(x).sin()).sum(), (x, f.weight))
    for outer, inner in ((rerun, replay), (replay, rerun)):
        def g(t):
            return f(inner(f, t).sin())  # noqa: B023
        with tfg.engine("replay" if inner is replay else "rerun"):
            y = outer(g, x)
        assert not differences(torch.autograd.grad(y.sum(), (x, f.weight)), wanted)


def test_a_compiled_function_inside_a_region():
    compiled = torch.compile(two, backend="aot_eager")
    x, twin = tensor(), tensor()
    rerun(lambda t: compiled(t).sin(), x).sum().backward()
    assert not differences(x.grad, torch.autograd.grad(two(twin).sin().sum(), twin)[0])


def test_wrong_calls_of_the_binary_are_type_errors():
    for arguments in ((), (0, torch.sin), (0,) * 7):
        with pytest.raises(TypeError, match="rerun"):
            _C.rerun(*arguments)
        with pytest.raises(TypeError, match="rerun_reentrant"):
            _C.rerun_reentrant(*arguments)
