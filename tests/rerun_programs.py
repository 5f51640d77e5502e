# SPDX-License-Identifier: BSD-3-Clause
"""Programs that use a checkpoint, as functions of `call(function, *args, **keywords)`. Each returns everything that can be observed:
values, gradients, how often functions ran. The stock, the rerun engine and a plain call must agree on them (test_rerun_engine.py).

    @program                 every engine gives the plain result
    @program(counts=True)    also observes how often the function runs: the plain run and replay differ
"""

import contextlib
import dataclasses
import threading

import torch
from torch import nn
from torch.utils.checkpoint import GraphExecGroup, set_checkpoint_early_stop

import tfg

PROGRAMS, COUNTING = {}, {}


def program(function=None, *, counts=False):
    if function is None:
        return lambda f: program(f, counts=counts)
    (COUNTING if counts else PROGRAMS)[function.__name__] = function
    return function


def tensor(seed=1, *sizes, grad=True):
    return torch.randn(*(sizes or (4, 4)), generator=torch.Generator().manual_seed(seed), requires_grad=grad)


class Counted:
    """x -> cos(sin(x w) w); counts its calls."""

    def __init__(self, weight=None):
        self.n_calls, self.weight = 0, tensor(7) if weight is None else weight

    def __call__(self, x, *rest, **named):
        self.n_calls += 1
        return ((x @ self.weight).sin() @ self.weight).cos()


def grads(y, *of, **how):
    return torch.autograd.grad(y.square().sum(), of, **how)


# -- results ------------------------------------------------------------------------------------------------------------------
@program
def function_and_parameters(call):
    f, x = Counted(), tensor()
    y = call(f, x)
    return y, grads(y, x, f.weight)


@program
def module(call):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)), tensor()
    y = call(net, x)
    y.sum().backward()
    return y, x.grad, [p.grad for p in net.parameters()]


@program
def many_regions(call):
    x = y = tensor()
    for _ in range(300):
        y = call(torch.sin, y)
    return grads(y, x)


@program
def grad_with_inputs_and_accumulation(call):
    f, x = Counted(), tensor()
    call(f, x).sum().backward(inputs=[x])
    call(f, x).sum().backward(inputs=[f.weight, x])
    return x.grad, f.weight.grad


@program
def second_and_third_derivative(call):
    f, x = Counted(), tensor()
    first = grads(call(f, x), x, create_graph=True)[0]
    second = grads(first, x, f.weight, create_graph=True)
    return first, second, torch.autograd.grad(second[0].sum(), (x, f.weight))


@program
def three_deep(call):
    f, x = Counted(), tensor()

    def inner(t):
        return call(f, t.sin()).exp()

    def middle(t, scale=1.0):
        return call(inner, t * scale) + call(inner, t).cos()

    y = call(lambda t: call(middle, t, scale=0.5).tanh(), x)
    first = grads(y, x, create_graph=True)[0]
    return y, first, grads(first, x, f.weight)


@program
def side_by_side_with_shared_input(call):
    f, x = Counted(), tensor()
    h = x.exp()
    return grads(call(f, h) * call(f, h).sin() + h, x, f.weight)


@program
def retained_and_repeated(call):
    f, x = Counted(), tensor()
    loss = call(f, x).sum()
    return [torch.autograd.grad(loss, (x, f.weight), retain_graph=i < 2) for i in range(3)]


@program
def backward_in_a_hook(call):
    a, b = tensor(1), tensor(2)
    y, z = call(lambda t: t.sin().exp(), a), call(lambda t: t.cos().exp(), b)
    loss = z.sum()
    y.register_hook(lambda g: loss.backward())
    y.sum().backward()
    return a.grad, b.grad


@program
def two_threads_through_one_graph(call):
    f, x = Counted(), tensor()
    loss, seen = call(f, x).sum(), [None, None]

    def walk(i):
        seen[i] = torch.autograd.grad(loss, (x, f.weight), retain_graph=True)

    threads = [threading.Thread(target=walk, args=(i,)) for i in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return seen


# -- arguments and outputs ----------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: object


@program
def mixed_arguments_and_results(call):
    x, w = tensor(1), tensor(2)

    def f(a, none, number, text, box, pair, *, named, flag=False):
        y = (a * number + box["w"]).sin() * named[0]
        return {"y": y, "text": text, "none": none}, [y.exp(), 3], Pair(y * pair.left, flag)

    out, rest, pair = call(f, x, None, 2.5, "text", {"w": w}, Pair(w.cos(), 1), named=[w.exp()], flag=True)
    return out["y"], out["text"], rest[1], pair.right, grads(out["y"] + rest[0] + pair.left, x, w)


@program
def no_tensor_at_all(call):
    return call(lambda a, b: (a + b, None), 1, 2), call(lambda: "x")


@program
def outputs_that_are_inputs(call):
    x = tensor()
    same, other = call(lambda t: (t, t.sin()), x)
    return same is x, grads(same * other, x)


@program
def no_argument_needs_a_gradient(call):
    f, x = Counted(), tensor(grad=False)
    y = call(f, x)
    return y.requires_grad, grads(y, f.weight)


@program
def outputs_keep_their_requires_grad(call):
    y, z = call(lambda t: (t.sin(), t.detach().cos()), tensor())
    return y.requires_grad, z.requires_grad


@program
def detached_parts(call):
    x = tensor()

    def f(t):
        with torch.no_grad():
            scale = t.exp()
        return (t.detach().sin() * t * scale).cos()

    return grads(call(f, x), x)


@program
def a_saved_tensor_without_gradient_is_the_same_object(call):
    mask, seen = tensor(3, grad=False), []

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, m):
            ctx.save_for_backward(m)
            return x * m

        @staticmethod
        def backward(ctx, g):
            m, = ctx.saved_tensors
            seen.append(m is mask)
            return g * m, None

    x = tensor()
    return grads(call(lambda t: Masked.apply(t.sin(), mask), x), x), seen


@program
def without_grad_mode(call):
    x = tensor()
    with torch.no_grad():
        y = call(torch.sin, x)
    with torch.inference_mode():
        z = call(torch.sin, x)
    return y.requires_grad, z.is_inference(), y


# -- what stands around -------------------------------------------------------------------------------------------------------
@program
def dropout_draws_the_same(call):
    x = tensor()
    torch.manual_seed(3)
    y = call(lambda t: nn.functional.dropout(t.sin(), 0.5).exp(), x)
    torch.rand(5)
    before = torch.get_rng_state()
    got = grads(y, x)
    return y, got, torch.equal(before, torch.get_rng_state())


@program
def dropout_without_preserved_state_still_works(call):
    x = tensor()
    y = call(lambda t: nn.functional.dropout(t, 0.0).exp(), x, preserve_rng_state=False)
    return grads(y, x)


@program
def autocast_in_forward_only(call):
    f, x = Counted(), tensor()
    with torch.autocast("cpu", dtype=torch.float16):
        y = call(f, x)
    return y, grads(y.float(), x, f.weight), torch.is_autocast_enabled("cpu")


@program
def autocast_around_backward_only(call):
    f, x = Counted(), tensor()
    y = call(f, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = grads(y, x, f.weight)
        return got, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


@program
def autocast_leaves_no_cached_weight(call):
    weight, x = tensor(2, 64, 64), tensor(1, 64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(lambda t: (t @ weight).sin() @ weight, x)
    before = tfg.cpu.memory_allocated()
    torch.autograd.grad(y.float().sum(), (x, weight), retain_graph=True)
    return tfg.cpu.memory_allocated() <= before


@program
def saved_on_cpu_outside(call):
    x = tensor()
    with torch.autograd.graph.save_on_cpu():
        y = call(lambda t: t.sin().exp(), x * 1)
    return grads(y, x)


@program
def saved_on_cpu_inside(call):
    x = tensor()

    def f(t):
        with torch.autograd.graph.save_on_cpu():
            t = t.sin().exp()
        return t.cos()

    return grads(call(f, x * 1), x)


@program
def forward_mode(call):
    import torch.autograd.forward_ad as fwad
    with fwad.dual_level():
        y = call(lambda t: t.sin().exp(), fwad.make_dual(tensor(), tensor(2, grad=False)))
        return fwad.unpack_dual(y).tangent


@program
def batched_by_vmap(call):
    return torch.func.vmap(lambda t: call(torch.sin, t).sum())(tensor())


@program
def jagged_and_sparse(call):
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, requires_grad=True)
    y = torch.nested.to_padded_tensor(call(lambda t: t.sin().exp(), x), 0.0)
    z = tensor()
    return (torch.autograd.grad(y.sum(), x)[0].values(), grads(call(lambda t: torch.sparse.mm(t.to_sparse(), t).sin(), z), z))


# -- how often ----------------------------------------------------------------------------------------------------------------
@program(counts=True)
def once_forward_once_backward(call):
    f, x = Counted(), tensor()
    loss, seen = call(f, x).sum(), []
    for i in range(3):
        torch.autograd.grad(loss, x, retain_graph=i < 2)
        seen.append(f.n_calls)
    return seen


@program(counts=True)
def nothing_saved_nothing_run_again(call):
    n_calls = []
    x = tensor()
    call(lambda t: n_calls.append(1) or t + 1, x).sum().backward()
    return len(n_calls)


@program(counts=True)
def nested_regions(call):
    f, x = Counted(), tensor()
    call(lambda t: call(lambda u: call(f, u).sin(), t).exp(), x).sum().backward()
    return f.n_calls, x.grad


def _with_steps(call, **keywords):
    steps, x = [], tensor()

    def f(t):
        for name in ("sin", "exp", "neg"):
            steps.append(name)
            t = getattr(t, name)()
        return t

    call(f, x, **keywords).sum().backward()
    return steps


@program(counts=True)
def early_stop(call):
    return _with_steps(call), _with_steps(call, early_stop=False)


@program(counts=True)
def early_stop_set_from_outside(call):
    with set_checkpoint_early_stop(False):
        outer = _with_steps(call, early_stop=True)
        with set_checkpoint_early_stop(True):
            inner = _with_steps(call, early_stop=False)
    return outer, inner


@program(counts=True)
def early_stop_counts_at_forward_time(call):
    steps, x = [], tensor()

    def f(t):
        steps.append("start")
        y = t.exp()
        steps.append("end")
        return y

    with set_checkpoint_early_stop(False):
        y = call(f, x)
    y.sum().backward()
    return steps


@program(counts=True)
def reading_saved_tensors_by_hand(call):
    n_calls, x = [], tensor()
    y = call(lambda t: n_calls.append(1) or t.exp(), x)
    values = [y.grad_fn._saved_result for _ in range(2)]
    y.sum().backward()
    with contextlib.suppress(RuntimeError):
        values.append(y.grad_fn._saved_result)
    return values, len(n_calls)


def _two_outputs(call):
    n_calls, a, b = [], tensor(1), tensor(2)
    y, z = call(lambda s, t: (n_calls.append(1), s.sin().exp(), t.cos().exp())[1:], a, b)
    return n_calls, a, b, y, z


@program(counts=True)
def disjoint_backwards(call):
    n_calls, a, b, y, z = _two_outputs(call)
    y.sum().backward(retain_graph=True)
    z.sum().backward()
    return len(n_calls), a.grad, b.grad


@program(counts=True)
def disjoint_backwards_in_a_group(call):
    n_calls, a, b, y, z = _two_outputs(call)
    with GraphExecGroup():
        y.sum().backward(retain_graph=True)
        z.sum().backward()
    return len(n_calls), a.grad, b.grad


def _backward_inside(call, retain_graph, **keywords):
    n_calls, x = [], tensor()

    def f(t):
        n_calls.append(1)
        z = t.sin().cos()
        inner, = torch.autograd.grad(z.sum(), t, retain_graph=retain_graph)
        return t.cos() * inner * (z if retain_graph else 1)

    call(f, x, **keywords).sum().backward()
    return len(n_calls), x.grad


@program(counts=True)
def backward_inside_a_region(call):
    return [_backward_inside(call, retain, early_stop=stops) for retain in (True, False) for stops in (True, False)]


@program(counts=True)
def contexts_surround_both_runs(call):
    seen, x = [], tensor()

    @contextlib.contextmanager
    def around(name):
        seen.append(f"enter {name}")
        yield
        seen.append(f"leave {name}")

    def contexts():
        seen.append("made")
        return around("forward"), around("recompute")

    y = call(lambda t: (seen.append("run"), t.sin().cos() + 1)[1], x, context_fn=contexts, early_stop=False)
    seen.append("between")
    y.sum().backward()
    with torch.no_grad():
        call(torch.sin, x, context_fn=contexts)
    return seen


@program(counts=True)
def the_device_in_force(call):
    seen, x = [], tensor()
    with torch.device("meta"):
        y = call(lambda t: (seen.append(str(torch.empty(1).device)), t.sin().cos())[1], x)
    y.sum().backward()
    return seen, str(torch.empty(1).device)


@program(counts=True)
def grad_mode_is_forced_on(call):
    seen, x = [], tensor()
    y = call(lambda t: (seen.append(torch.is_grad_enabled()), t.sin().cos())[1], x)
    y.sum().backward()
    return seen, torch.is_grad_enabled()


@program(counts=True)
def outer_hooks_see_arguments_only(call):
    packed, x = [], tensor()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(tuple(t.shape)) or t, lambda t: t):
        y = call(lambda t, n, box: (t * box[0]).sin().exp(), x, 3, [tensor(2, 1, 4)])
    return packed, grads(y, x)


@program(counts=True)
def an_outer_region_owns_the_arguments(call):
    order, x = [], tensor()

    def inner(t):
        order.append("inner")
        return t.sin().exp()

    def outer(t):
        order.append("outer")
        return call(inner, t.cos()).tanh()

    call(outer, x).sum().backward()
    return order, x.grad
