# SPDX-License-Identifier: BSD-3-Clause
"""use_reentrant=True: one node, a backward inside backward, and the stock's restrictions. The stock is the oracle."""

import collections
import threading
import warnings

import pytest
import torch
import torch.utils.checkpoint as stock
from bitwise import differences
from rerun_programs import Counted, tensor
from torch import nn
from torch.utils.checkpoint import CheckpointError

import tfg


def ours(function, *args, **keywords):
    return tfg.checkpoint(function, *args, use_reentrant=True, **keywords)


def theirs(function, *args, **keywords):
    return stock.checkpoint(function, *args, use_reentrant=True, **keywords)


BOTH = pytest.mark.parametrize("call", [ours, theirs], ids=["tfg", "stock"])
EITHER_ENGINE = pytest.mark.parametrize("engine", ["replay", "rerun"])


def agree(program):
    """The program's observations under ours, once they are the stock's bit for bit."""
    got = program(ours)
    assert not differences(got, program(theirs))
    return got


# -- results ------------------------------------------------------------------------------------------------------------------
@EITHER_ENGINE
def test_gradients_are_plain_and_the_function_runs_twice(engine):
    def program(call):
        f, x = Counted(), tensor()
        call(f, x).square().sum().backward()
        return f.n_calls, x.grad, f.weight.grad
    f, x = Counted(), tensor()
    f(x).square().sum().backward()
    with tfg.engine(engine):
        assert not differences(agree(program), (2, x.grad, f.weight.grad))


def test_modules_sequences_and_nesting():
    def program(call):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), tensor()
        y = call(lambda t: call(net, t.sin()).cos() * call(net, t), x)
        y.sum().backward()
        return y, x.grad, [p.grad for p in net.parameters()]
    agree(program)
    agree(lambda call: _sequential(call is ours))


def _sequential(is_ours):
    layers, x = [Counted() for _ in range(4)], tensor()
    (tfg if is_ours else stock).checkpoint_sequential(layers, 2, x, use_reentrant=True).sum().backward()
    return x.grad, [(layer.n_calls, layer.weight.grad) for layer in layers]


@pytest.mark.parametrize("inner_first", [True, False])
def test_mixed_with_the_other_form(inner_first):
    def program(call):
        def other(function, *args):
            return (tfg if call is ours else stock).checkpoint(function, *args, use_reentrant=False)
        f, x = Counted(), tensor()
        outer, inner = (call, other) if inner_first else (other, call)
        with tfg.engine("rerun"):
            y = outer(lambda t: inner(f, t.sin()).exp(), x)
        y.sum().backward()
        return x.grad, f.weight.grad
    agree(program)


def test_arguments_and_results_of_every_kind():
    def program(call):
        x, box, number = tensor(), [tensor(2)], 2.5
        y, none, text, same, whole, held = call(lambda t, b, n, s: (t * b[0].detach() * n, None, s, t, torch.arange(3), [t]), x, box, number, "s")
        (y + same).sum().backward()
        return (x.grad, none, text, whole, whole.requires_grad, held[0] is x, same is x, box[0].grad, type(held).__name__)
    agree(program)


def test_odd_results():
    pair = collections.namedtuple("pair", "a b")

    def program(call):
        x = tensor()
        return [call(lambda t: t.view(16), x)._is_view(), call(lambda t: None, x), call(lambda t: (), x), call(lambda: 3),
                type(call(lambda t: pair(t.sin(), 1), x)).__name__, call(lambda t: {"y": t.sin()}, x)["y"].requires_grad,
                call(lambda t: t.sin(), x).grad_fn.name()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree(program)


@BOTH
def test_a_view_of_an_argument_may_not_be_written(call):
    y = call(lambda t: t[0], tensor() * 1)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.add_(1)


def test_every_output_is_made_to_require_a_gradient():
    assert agree(lambda call: [t.requires_grad for t in call(lambda t: (t.sin(), t.detach(), t.long()), tensor())]) == [True, True, False]


def test_an_output_nobody_uses_counts_as_zeros():
    def program(call):
        f, x = Counted(), tensor()
        y, _ = call(lambda t: (t.sin(), f(t)), x)
        y.sum().backward()
        return x.grad, f.weight.grad
    agree(program)


def test_without_grad_mode_nothing_is_kept():
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert agree(lambda call: (call(torch.sin, tensor()).requires_grad, call(torch.sin, tensor()).grad_fn)) == (False, None)


def test_retained_graphs_run_again():
    def program(call):
        f, x = Counted(), tensor()
        loss = call(f, x).sum()
        for i in range(3):
            loss.backward(retain_graph=i < 2)
        return f.n_calls, x.grad, f.weight.grad
    assert agree(program)[0] == 4


# -- what stands around -------------------------------------------------------------------------------------------------------
def test_random_state_and_autocast_are_put_back():
    def program(call):
        x, w, seen = tensor(), tensor(2), []

        def f(t):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()))
            return nn.functional.dropout((t @ w).sin(), 0.5).exp()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.float16):
            y = call(f, x)
        torch.rand(3)
        before = torch.get_rng_state()
        y.float().sum().backward()
        return x.grad, w.grad, seen, torch.equal(before, torch.get_rng_state()), torch.is_autocast_enabled("cpu")
    assert agree(program)[2] == [(True, torch.float16, False), (True, torch.float16, True)]


def test_without_preserved_state_it_still_works():
    def program(call):
        x = tensor()
        call(lambda t: nn.functional.dropout(t.sin(), 0.0), x, preserve_rng_state=False).sum().backward()
        return x.grad
    agree(program)


def test_hooks_around_see_the_arguments():
    def program(call):
        packed, x = [], tensor()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t * 1):
            y = call(lambda t, u: t.sin() @ u, x, tensor(2))
        y.sum().backward()
        return packed, x.grad
    assert len(agree(program)[0]) == 2
    agree(_on_cpu)


def _on_cpu(call):
    x = tensor()
    with torch.autograd.graph.save_on_cpu():
        y = call(lambda t: t.sin().exp(), x)
    y.sum().backward()
    return x.grad


def test_the_device_in_force_is_that_of_the_forward():
    seen, x = [], tensor()
    with torch.device("meta"):
        y = ours(lambda t: (seen.append(str(torch.empty(1).device)), t.sin())[1], x)
    y.sum().backward()
    assert seen == ["meta", "meta"]


# -- restrictions -------------------------------------------------------------------------------------------------------------
@BOTH
def test_grad_and_inputs_are_refused_and_the_next_backward_works(call):
    words = r"When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad\(\) or passing an `inputs` parameter to .backward\(\)"
    f, x = Counted(), tensor()
    y = call(f, x).sum()
    with pytest.raises(RuntimeError, match=words):
        torch.autograd.grad(y, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=words):
        y.backward(inputs=[x], retain_graph=True)
    y.backward()
    assert f.n_calls == 2 and x.grad is not None


@BOTH
def test_a_function_that_fails_again_leaves_the_thread_as_it_was(call):
    runs = iter([torch.sin])

    def fails(t):
        torch.rand(3)
        raise KeyboardInterrupt("mine")
    x = tensor()
    with torch.autocast("cpu"):
        y = call(lambda t: next(runs, fails)(t), x)
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt, match="mine"):
        y.sum().backward()
    assert torch.equal(before, torch.get_rng_state()) and not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    call(torch.sin, x).sum().backward()
    assert not differences(x.grad, tensor().detach().cos())


@BOTH
def test_an_error_inside_the_inner_backward_is_the_users(call):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            raise ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError, match="mine"):
        call(lambda t: Fails.apply(t.sin()), tensor()).sum().backward()
    x = tensor()
    call(torch.sin, x).sum().backward()
    assert torch.is_grad_enabled() and x.grad is not None


@BOTH
def test_no_output_that_requires_a_gradient(call):
    y = call(lambda t: t.detach().sin(), tensor())
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True, this checkpoint\\(\\) is not necessary"):
        y.sum().backward()
    with torch.no_grad():
        runs = iter([torch.sin])
    y = call(lambda t: next(runs, torch.Tensor.detach)(t), tensor())
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        y.sum().backward()


@BOTH
def test_no_input_that_requires_a_gradient_is_warned_of(call):
    for args in ((tensor(grad=False),), (3,), ([tensor()],)):
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True. Gradients will be None"):
            y = call(lambda t: t if isinstance(t, int) else t[0].sin(), *args)
        assert isinstance(y, int) or not y.requires_grad


def test_the_warning_points_at_the_caller():
    with pytest.warns(UserWarning, match="None of the inputs") as seen:
        ours(torch.sin, tensor(grad=False))
    assert seen[0].filename == __file__


@BOTH
def test_a_second_backward_without_retain_is_cores_error(call):
    y = call(torch.sin, tensor()).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@BOTH
def test_refused_arguments(call):
    for keywords in ({"context_fn": lambda: stock.noop_context_fn()}, {"debug": True}):
        with pytest.raises(ValueError, match="Passing `context_fn` or `debug` is only supported when use_reentrant=False."):
            call(torch.sin, tensor(), **keywords)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale,other"):
        call(torch.sin, tensor(), scale=1, other=2)
    call(torch.sin, tensor(), determinism_check="none", early_stop=False).sum().backward()


def test_more_refused_arguments():
    with pytest.raises(ValueError, match="respect_saved_tensors_hooks"):
        ours(torch.sin, tensor(), respect_saved_tensors_hooks=True)
    with pytest.raises(TypeError, match="must be callable, but is 3"):
        ours(3, tensor())


@BOTH
def test_forward_mode_and_functorch_are_refused(call):
    import torch.autograd.forward_ad as fwad
    with fwad.dual_level(), pytest.raises(NotImplementedError, match="implement.*forward mode AD"):
        call(torch.sin, fwad.make_dual(tensor(), torch.ones(4, 4)))
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError, match="setup_context staticmethod"):
            transform(lambda t: call(torch.sin, t).sum())(tensor(grad=False))


# -- where the stock is silent ------------------------------------------------------------------------------------------------
@BOTH
def test_an_argument_changed_before_backward_raises(call):
    x = tensor() * 1
    y = call(lambda t: t.sin().exp(), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()


def test_an_argument_that_the_function_itself_changes_raises():
    y = ours(lambda t: t.add_(1).sin(), tensor() * 1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives_are_refused():
    x = tensor()
    y = ours(torch.sin, x).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=True has no second derivatives"):
        y.backward(create_graph=True)
    assert x.grad is None


def test_another_number_of_results_is_a_checkpoint_error():
    runs = iter([lambda t: (t.sin(), t.cos())])
    y, _ = ours(lambda t: next(runs, torch.sin)(t), tensor())
    with pytest.raises(CheckpointError, match="returned 2 values the first time and 1 when it was called again"):
        y.sum().backward()


@pytest.mark.parametrize("second", [lambda t: t.sum(0), lambda t: t.double()])
def test_a_result_of_another_shape_or_dtype_is_a_checkpoint_error(second):
    runs, x = iter([torch.sin]), tensor()
    y = ours(lambda t: next(runs, second)(t), x)
    with pytest.raises(CheckpointError, match="result 0 has another shape, dtype or device"):
        y.sum().backward()
    assert x.grad is None


# -- depth and threads --------------------------------------------------------------------------------------------------------
def test_deeper_than_one_thread_may_nest():
    def program(call):
        def nest(depth):
            return torch.sin if depth == 0 else lambda t: call(nest(depth - 1), t.cos())
        x = tensor()
        call(nest(70), x).sum().backward()
        return x.grad
    agree(program)


def test_two_threads_through_their_own_graphs():
    f, results = Counted(), [None, None]

    def work(i):
        x = tensor(i + 1)
        ours(f, x).sum().backward()
        results[i] = x.grad
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    twins = [tensor(1), tensor(2)]
    assert not differences(results, [torch.autograd.grad(f(t).sum(), t)[0] for t in twins])
