# SPDX-License-Identifier: BSD-3-Clause
"""Kinds of fault that checkpointing is known for, each a small program that has to give plain's bits, or its error.

A program takes `ck`, the way a region is called. It runs plain, then in regions: as it is, and under both stress modes.
"""

import contextlib
import ctypes
import functools
import gc
import os
import pickle
import signal
import threading

import pytest
import torch
import torch.nn.functional as F
from bitwise import copied, differences, stress
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import tfg
from tfg import _C

PROGRAMS = {}
STRESS = {"as it is": {}, "drop": {"drop": True}, "verify": {"verify": True}, "both": {"drop": True, "verify": True},
          "budget": {"room_bytes": 0}, "kept, then dropped": {"room_bytes": 2**40, "drop": True}}
pytestmark = pytest.mark.filterwarnings("ignore")


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def leaf(*shape, seed=0, **how):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **how).requires_grad_()


def gradients(loss, *leaves, **how):
    loss.backward(**how)
    return [loss.detach().clone(), *copied(t.grad for t in leaves)]


def curvy(x):
    """Every operator but one saves something that no one else holds."""
    return ((x.sin() * 1.5).cos() + x).tanh()


def perceptron(width=4, depth=2, dropout=0.0, seed=0):
    torch.manual_seed(seed)
    layers = ((nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(depth))
    return nn.Sequential(*[layer for group in layers for layer in group])


@pytest.fixture(autouse=True)
def no_trace(one_thread):
    hooks = torch._C._autograd._top_saved_tensors_default_hooks
    yield
    assert not _C.in_region()
    assert hooks(True) is None
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


# ------------------------------------------------------------------------------------------------- asking for gradients
@program
def retained_graph_is_walked_three_times(ck):
    x, net = leaf(2, 4), perceptron(dropout=0.4)
    loss = ck(net, x).sum()
    return [gradients(loss, x, *net.parameters(), retain_graph=i < 2) for i in range(3)]


@program
def backward_twice_without_retaining_raises(ck):
    x = leaf(4)
    loss = ck(curvy, x).sum()
    loss.backward()
    return refused(loss.backward)


@program
def third_derivative_through_a_region(ck):
    x, w = leaf(4), leaf(4, seed=1)
    y = ck(lambda x: curvy(x * w) * x, x).sum()
    found = []
    for _ in range(3):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        found.append(y.detach().clone())
        y = y.sum()
    return found, gradients(y, w)


@program
def gradient_of_part_of_the_outputs(ck):
    x, w = leaf(4), leaf(4, seed=1)
    a, b = ck(lambda x: (curvy(x) * w, (x * w).exp()), x)
    first = torch.autograd.grad(a.sum(), (x, w), retain_graph=True)
    return first, torch.autograd.grad(b.sum(), (x, w)), refused(lambda: torch.autograd.grad(b.sum(), (x, w)))


@program
def gradient_with_respect_to_what_is_inside(ck):
    inner = []

    def f(x):
        inner.append(x.sin())
        return curvy(inner[0]) * inner[0]
    x = leaf(4)
    y = ck(f, x)
    return torch.autograd.grad(y.sum(), (inner[0], x))


@program
def backward_inside_a_region(ck):
    x, w = leaf(4), leaf(4, seed=1)

    def f(x):
        ck(lambda: curvy(x.detach() * w)).sum().backward()
        return curvy(x) * w.grad
    return gradients(ck(f, x).sum(), x, w)


@program
def inputs_of_a_backward(ck):
    x, net = leaf(2, 4), perceptron()
    loss = ck(net, x).sum()
    loss.backward(inputs=[net[0].weight])
    return copied([x.grad, net[0].weight.grad, net[3].weight.grad])


# ------------------------------------------------------------------------------------------------- modes, dtypes, layouts
@program
def autocast_around_inside_and_switched_off(ck):
    x, net = leaf(3, 8), perceptron(8)

    def f(x):
        with torch.autocast("cpu", enabled=False):
            h = net(x.float())
        return net(h) + h
    with torch.autocast("cpu", torch.bfloat16):
        y = ck(f, x) * ck(net, x)
    return y.detach(), gradients(y.float().sum(), x, *net.parameters())


@program
def autocast_inside_a_region_with_its_cache(ck):
    x, net = leaf(3, 8), perceptron(8)

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(net(x)).float()
    return gradients(ck(f, ck(f, x)).sum(), x, *net.parameters())


@program
def complex_numbers_and_their_views(ck):
    def f(z):
        w = (z.conj() @ z.mH).exp()
        return torch.fft.ifft(w.conj() * z.imag).abs() + torch.view_as_real(w * 0.1).sum(-1), w.conj(), w.imag.neg()
    z = leaf(3, 3, dtype=torch.complex64)
    a, b, c = ck(f, z * 0.5)
    return b.is_conj(), c.is_neg(), gradients(a.sum() + b.abs().sum() + c.sum(), z)


@program
def sparse_tensors_pass_through(ck):
    at = torch.tensor([[0, 1, 2], [2, 0, 1]])
    v, x = leaf(3), leaf(3, 4, seed=1)

    def f(v, x):
        s = torch.sparse_coo_tensor(at, v.sin() * 2, (3, 3))
        h = torch.sparse.mm(s, x.cos() * 1.5)
        return curvy(h) + torch.sparse.sum(s) * x.exp()
    return gradients(ck(f, v, x).sum(), v, x)


@program
def sparse_gradient_of_an_embedding(ck):
    table = nn.Embedding(6, 3, sparse=True)
    with torch.no_grad():
        table.weight.copy_(leaf(6, 3).detach())
    ck(lambda i: curvy(table(i) * 2), torch.tensor([1, 1, 4])).sum().backward()
    return table.weight.grad.to_dense()


@program
def tensors_of_size_zero(ck):
    x, e, net = leaf(0, 4), leaf(0), perceptron()
    y = ck(net, x).sum() + ck(lambda e: curvy(torch.cat([e, e * 2])).sum() + e.reshape(0, 3).sum(), e)
    return gradients(y, x, e, *net.parameters())


@program
def float64_and_integers(ck):
    def f(x):
        n = (x * 3).to(torch.int64)
        return curvy(x) * n + x.double().exp().float() * (n // 2).clamp(min=1) + x ** (n > 0).double()
    x = leaf(5, dtype=torch.float64)
    return gradients(ck(f, x).sum(), x)


@program
def quantised_and_nested_tensors_pass_through(ck):
    x = leaf(2, 4)

    def f(x):
        q = torch.quantize_per_tensor(x.detach().sin(), 0.1, 0, torch.qint8)
        n = torch.nested.nested_tensor([x.detach()[0] * 2, x.detach()[1, :2]])
        return curvy(x * q.dequantize()) * n.to_padded_tensor(0.5)
    return gradients(ck(f, x).sum(), x)


@program
def inference_tensors_and_no_grad_regions(ck):
    x, net = leaf(2, 4), perceptron(dropout=0.3)
    with torch.no_grad():
        a = ck(net, x)
    with torch.inference_mode():
        b = ck(net, x)
        scale = torch.ones(4) * 2
    c = ck(lambda x: net(x) * scale.clone(), x)
    return a, b.clone(), a.requires_grad, b.is_inference(), gradients(c.sum(), x, *net.parameters())


# ------------------------------------------------------------------------------------------------- functions, operators, hooks
class Keeps(torch.autograd.Function):
    """Saves input, intermediate and output; reads the saved tensors as often as asked."""

    @staticmethod
    def forward(ctx, x, n_reads):
        h = x.sin()
        y = h.exp()
        ctx.save_for_backward(x, h, y)
        ctx.scale, ctx.n_reads = h.abs() + 1, n_reads
        return y

    @staticmethod
    def backward(ctx, g):
        for _ in range(ctx.n_reads):
            x, h, y = ctx.saved_tensors
        return g * x.cos() * y * ctx.scale + 0 * h, None


@program
def custom_function_reads_what_it_saved_once_twice_never(ck):
    x = leaf(4)
    y = sum(ck(lambda x, n: curvy(Keeps.apply(x * 2, n)) * n, x, n) for n in (1, 2, 3))
    return gradients(y.sum(), x)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 + 0 * x


@program
def custom_function_that_writes_its_input(ck):
    x = leaf(4)
    return gradients(ck(lambda x: curvy(InPlace.apply(x.sin())), x).sum(), x)


@torch.library.custom_op("tfg_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * by)


@torch.library.custom_op("tfg_test::bumped_", mutates_args=("x",))
def bumped_(x: torch.Tensor) -> None:
    x.numpy()[...] += 1


scaled.register_autograd(lambda ctx, g: (g * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]))


@program
def python_operators_run_once(ck):
    x = leaf(4)

    def f(x):
        h = torch.ops.tfg_test.scaled(x.sin(), 3.0)
        k = h.detach().clone()
        torch.ops.tfg_test.bumped_(k)
        return curvy(h) * k
    return gradients(ck(f, x).sum(), x)


@program
def operators_of_other_libraries_with_a_body_in_cpp(ck):
    x, w = leaf(3, 4), leaf(4, 4, seed=1)

    def f(x):
        packed = torch.ops.mkldnn._linear_pointwise(x.detach(), w.detach(), None, "none", [], "")
        return curvy(x * packed) + packed.relu()
    if not torch.backends.mkldnn.is_available():
        return None
    return gradients(ck(f, x).sum(), x)


@program
def hooks_on_tensors_and_nodes_inside(ck):
    fired, x = [], leaf(4)

    def f(x):
        h = x.sin() * 2
        h.register_hook(lambda g: fired.append("tensor") or g * 3)
        y = curvy(h)
        y.grad_fn.register_hook(lambda inputs, outputs: fired.append("node") or tuple(i * 2 for i in inputs))
        y.grad_fn.register_prehook(lambda outputs: fired.append("before") or tuple(o + 1 for o in outputs))
        h.retain_grad()
        kept.append(h)
        return y
    kept = []
    x.register_post_accumulate_grad_hook(lambda t: fired.append("leaf"))
    return gradients(ck(f, x).sum(), x), fired, kept[0].grad


@program
def module_hooks_fire_once(ck):
    fired, net, x = [], perceptron(), leaf(2, 4)
    net[0].register_forward_pre_hook(lambda m, a: fired.append("pre") or (a[0] * 2,))
    net[1].register_forward_hook(lambda m, a, out: fired.append("post") or out + 1)
    net[3].register_full_backward_hook(lambda m, gi, go: fired.append("back") or (gi[0] * 3,))
    return gradients(ck(net, x * 1).sum(), x, *net.parameters()), fired


@program
def outer_hooks_on_saved_tensors_are_obeyed(ck):
    x, net, calls = leaf(2, 4), perceptron(dropout=0.2), []

    def unpack(a):
        calls.append("unpack")
        return torch.from_numpy(a)
    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), unpack):
        y = ck(net, x * 2) * 2
    with save_on_cpu():
        y = ck(net, y)
    out = gradients(y.sum(), x, *net.parameters())
    return out, bool(calls)


@program
def hooks_on_saved_tensors_inside_a_region(ck):
    x = leaf(4)

    def f(x):
        with saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            h = curvy(x)
        return curvy(h)
    return gradients(ck(f, x).sum(), x)


# ------------------------------------------------------------------------------------------------- writes
@program
def writes_to_what_plain_saved_raise_as_in_plain(ck):
    x = leaf(4)
    h = x * 2
    y, z = ck(curvy, h), ck(lambda: h.exp() * h)
    h.add_(1)
    return refused(y.sum().backward), refused(z.sum().backward)


@program
def write_to_an_output_that_was_saved_raises_as_in_plain(ck):
    x = leaf(4)
    y = ck(lambda x: (x * 2).exp(), x)
    y.mul_(2)
    return refused(y.sum().backward)


@program
def parameter_changed_between_forward_and_backward(ck):
    x, net = leaf(2, 4), perceptron()
    y = ck(net, x)
    with torch.no_grad():
        net[3].weight.add_(1)
    return refused(y.sum().backward)


@program
def running_statistics_are_written_once(ck):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 3), nn.InstanceNorm2d(2))
    x = leaf(2, 2, 8, 8)
    out = [gradients(ck(net, x).square().sum(), x, *net.parameters()) for _ in range(2)]
    return out, copied(net.buffers())


@program
def one_scratch_buffer_serves_every_region(ck):
    scratch, x = torch.zeros(4), leaf(4)
    y = x

    def f(x):
        with torch.no_grad():
            scratch.copy_(x).mul_(2)
        return curvy(x * scratch.clone()) + (x + scratch).exp()
    for _ in range(4):
        y = ck(f, y) * 0.3
    return gradients(y.sum(), x), scratch.clone()


@program
def cache_grown_by_every_region(ck):
    cache, x = [], leaf(2, 4)

    def f(x):
        cache.append(x.sin())
        return torch.cat(cache).tanh().sum(0, keepdim=True) * x
    y = ck(f, ck(f, ck(f, x)))
    return gradients(y.sum(), x), len(cache)


# ------------------------------------------------------------------------------------------------- random numbers
@program
def random_numbers_of_every_kind(ck):
    own = torch.Generator().manual_seed(9)

    def f(x):
        h = F.dropout(x.sin(), 0.5) + torch.rand(6) * torch.randn_like(x) + torch.empty(6).uniform_().add_(1)
        h = h * torch.randperm(6) + torch.rand(6, generator=own) + torch.empty_like(x).bernoulli_(0.5).div_(0.5) * h
        return curvy(F.rrelu(h * 0.1, training=True)) * torch.bernoulli(torch.full((6,), 0.7))
    x = leaf(6)
    y = ck(f, ck(f, x))
    between = torch.rand(2)
    return gradients(y.sum(), x), between, torch.get_rng_state(), own.get_state()


@program
def random_state_set_between_forward_and_backward(ck):
    x = leaf(16)
    y = ck(lambda x: curvy(F.dropout(x, 0.5)) * F.dropout(x.exp(), 0.3), x)
    torch.manual_seed(77)
    return gradients(y.sum(), x), torch.rand(2)


@program
def seed_set_inside_a_region(ck):
    def f(x):
        torch.manual_seed(3)
        h = curvy(F.dropout(x, 0.5))
        torch.manual_seed(3)
        return h * F.dropout(x.sin(), 0.5)
    x = leaf(16)
    return gradients(ck(f, x).sum(), x), torch.rand(2)


# ------------------------------------------------------------------------------------------------- leaving a region early
def refused(function):
    """The class of what `function` raises, or its result."""
    try:
        return function()
    except (RuntimeError, ValueError, TypeError) as error:
        return RuntimeError.__name__ if isinstance(error, RuntimeError) else type(error).__name__


class Boom(Exception):
    pass


def raise_boom(x):
    raise Boom


def interrupt(x):
    signal.raise_signal(signal.SIGINT)
    return x


FAULTS = {"exception": raise_boom, "interrupt": interrupt, "kernel": lambda x: x @ torch.ones(9, 9),
          "out of memory": lambda x: torch.empty(1 << 60), "assertion": lambda x: F.embedding(torch.tensor([9]), x[:2, None])}
STEPS = (torch.sin, lambda h: F.dropout(h, 0.5), lambda h: h.mul_(2), lambda h: torch.stack([h, h]).sum(0), torch.exp, curvy)


@program
def an_error_at_any_operator_leaves_no_trace(ck):
    found = []
    for fault in FAULTS.values():
        for at in range(len(STEPS) + 1):
            found.append((broken_step(ck, fault, at), torch.get_rng_state(), _C.in_region()))
            x = leaf(4, seed=at)
            found.append(gradients(ck(curvy, x).sum(), x))
    return found


def broken_step(ck, fault, at):
    def f(x):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad() if at == 2 else contextlib.nullcontext():
            x = x * 1
            for i, step in enumerate(STEPS):
                x = step(fault(x) if i == at else x)
        return x
    x = leaf(5, seed=at)
    try:
        return gradients(ck(lambda x: ck(f, x.sin()).cos(), x).float().sum(), x)
    except (Boom, KeyboardInterrupt, RuntimeError, IndexError) as error:
        return "failed", isinstance(error, RuntimeError), isinstance(error, KeyboardInterrupt)


@program
def a_generator_that_is_closed_inside_a_region(ck):
    def numbers(x):
        try:
            for i in range(9):
                yield ck(curvy, x * i)
        finally:
            closed.append(_C.in_region())

    def f(x):
        stream = numbers(x)
        next(stream)
        y = next(stream)
        stream.close()
        return curvy(y)
    closed, x = [], leaf(4)
    return gradients(ck(f, x).sum(), x), len(closed)


@program
def an_error_in_backward_can_be_survived(ck):
    x, armed = leaf(4), [True]

    def fail(g):
        if armed:
            armed.clear()
            raise Boom
        return g

    def f(x):
        h = curvy(x)
        h.register_hook(fail)
        return curvy(h)
    loss = ck(f, x).sum()
    with contextlib.suppress(Boom):
        loss.backward(retain_graph=True)
    return gradients(loss, x)


@program
def an_error_in_an_outer_hook_leaves_no_trace(ck):
    def pack(t):
        raise Boom
    x = leaf(4)
    with contextlib.suppress(Boom), saved_tensors_hooks(pack, lambda t: t):
        ck(curvy, x * 2)
    return gradients(ck(curvy, x).sum(), x)


# ------------------------------------------------------------------------------------------------- threads and forks
def in_threads(*functions):
    results = [None] * len(functions)

    def go(i):
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = f"{type(error).__name__}: {error}"
    threads = [threading.Thread(target=go, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@program
def four_threads_train_four_models(ck):
    def train(seed):
        net, x = nets[seed], leaf(8, 8, seed=seed)
        for _ in range(10):
            y = x
            for layer in (net[:2], net[2:5], net[5:]):
                y = ck(layer, y)
            y.square().sum().backward()
        return copied([x.grad, *(p.grad for p in net.parameters())])
    nets = [perceptron(8, 3, seed=s) for s in range(4)]
    return in_threads(*(functools.partial(train, s) for s in range(4)))


@program
def recurrent_layers_with_a_workspace(ck):
    x, layers = leaf(5, 4, 8), [nn.LSTM(8, 8, bidirectional=True), nn.LSTM(8, 8, num_layers=2), nn.GRU(8, 8)]
    return [gradients(ck(layer, x)[0].sum(), x, *layer.parameters()) for layer in layers]


@program
def a_loss_that_leaves_its_table_unwritten(ck):
    def f(x):
        return F.ctc_loss(x.sin().log_softmax(-1), torch.tensor([[1, 2], [3, 4]]), torch.tensor([8, 6]), torch.tensor([2, 2]),
                          reduction="none").exp().sin()
    x, found = leaf(8, 2, 8), []
    for filler in (3.3, 5.5):
        y = ck(f, x)
        for n in (100, 1000, 7168, 30000):  # what the allocator hands out next is not zero
            torch.full((n,), filler)
        found.append(gradients(y.sum(), x))
    return found


@program
def backward_in_other_threads_than_forward(ck):
    x, net = leaf(2, 4), perceptron(dropout=0.3)
    y = ck(net, x)
    first = in_threads(lambda: gradients(y.sum(), x, *net.parameters()))
    (z,) = in_threads(lambda: ck(net, x))
    return first, gradients(z.sum(), x, *net.parameters())


@program
def two_threads_walk_one_retained_graph(ck):
    x = leaf(64)
    loss = ck(lambda x: curvy(curvy(x)), x).sum()
    walks = [lambda: torch.autograd.grad(loss, x, retain_graph=True)] * 4
    return in_threads(*walks)


@program
def a_forked_child_walks_backward(ck):
    x = leaf(8)
    loss = ck(lambda x: curvy(F.dropout(x, 0.4)), x).sum()
    return in_child(lambda: [g.tolist() for g in torch.autograd.grad(loss, x, retain_graph=True)]), gradients(loss, x)


def in_child(function):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        with os.fdopen(write, "wb") as f:
            pickle.dump(function(), f)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        data = f.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


# ------------------------------------------------------------------------------------------------- memory, garbage collector off
@contextlib.contextmanager
def collector_off():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_after(step, counts=(3, 50)):
    """Live bytes after so many steps, garbage collector off."""
    found = []
    with collector_off():
        for i in range(max(counts)):
            step(i)
            if i + 1 in counts:
                found.append(tfg.cpu.memory_allocated())
    return found


def assert_level(step):
    early, late = live_after(step)
    assert late == early, f"{late - early} bytes more are alive after step 50"


def step_with_backward(i, net, x):
    tfg.checkpoint(net[3:], tfg.checkpoint(net[:3], x).sin()).sum().backward()
    net.zero_grad()
    x.grad = None


def step_whose_loss_is_dropped(i, net, x):
    tfg.checkpoint(net[3:], tfg.checkpoint(net[:3], x).sin()).sum()


def step_with_a_shared_tape(i, net, x):
    tape, key = _C.Tape(), SHARED_KEY
    y = x
    for layer in (net[:3], net[3:]):
        y = _C.run(tape, key, lambda y, layer=layer: curvy(layer(y)) * y, (y,), {}).exp() * 0.5  # untaped between
    tape.close()
    if i % 2:
        y.sum().backward()
    net.zero_grad()
    x.grad = None


def step_with_an_output_that_is_its_own_save(i, net, x):
    y = tfg.checkpoint(lambda x: (x * 2).exp().sigmoid(), x)
    z = tfg.checkpoint(lambda y: y.tanh(), y)
    if i % 3:
        z.sum().backward()
    x.grad = None


def step_with_an_exception(i, net, x):
    with contextlib.suppress(Boom):
        tfg.checkpoint(lambda x: raise_boom(curvy(net(x))), x)


def step_with_create_graph(i, net, x):
    (g,) = torch.autograd.grad(tfg.checkpoint(net, x).sum(), x, create_graph=True)
    torch.autograd.grad(tfg.checkpoint(curvy, g).sum(), x)


SHARED_KEY = _C.new_key("shared tape")
LOOPS = [step_with_backward, step_whose_loss_is_dropped, step_with_a_shared_tape, step_with_an_output_that_is_its_own_save,
         step_with_an_exception, step_with_create_graph]


@pytest.mark.parametrize("step", LOOPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", STRESS)
def test_live_bytes_stay_level(step, how):
    net, x = perceptron(64, 2), leaf(64, 64)
    with stress(**STRESS[how]):
        assert_level(lambda i: step(i, net, x))


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_live_bytes_of_a_wrapped_model_stay_level(interval):
    blocks = nn.Sequential(*[perceptron(32, 1, dropout=0.1) for _ in range(5)])
    model = tfg.wrap(nn.Sequential(nn.Linear(32, 32), blocks), interval=interval, blocks="1.*")

    def step(i):
        loss = model(leaf(16, 32, seed=i)).sum()
        if i % 2:
            loss.backward()
        model.zero_grad()
    assert_level(step)


def test_what_a_region_made_dies_with_the_last_reference():
    import weakref
    seen = []

    def f(x):
        h = x * 2
        seen.append(weakref.ref(h))
        return h.cos()
    with collector_off():
        y = tfg.checkpoint(f, leaf(8))
        del y
        assert seen[0]() is None


# ------------------------------------------------------------------------------------------------- unseen writers
def through_numpy(t):
    t.detach().numpy()[...] = 0.25


def through_ctypes(t):
    cells = (ctypes.c_float * t.numel()).from_address(t.data_ptr())
    cells[:] = [0.25] * t.numel()


def through_data(t):
    t.data.fill_(0.25)


def through_dlpack(t):
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(t.detach())).fill_(0.25)


def from_another_thread(t):
    in_threads(lambda: through_numpy(t))


def through_a_storage(t):
    torch.empty(0).set_(t.detach().untyped_storage(), 0, t.shape, t.stride()).fill_(0.25)


WRITERS = (through_numpy, through_ctypes, through_data, through_dlpack, from_another_thread, through_a_storage)


class WrittenBlock(nn.Module):
    """Writes to an activation in ways nobody sees, when `when` says so."""

    def __init__(self, number, when, writer):
        super().__init__()
        self.number, self.when, self.writer = number, when, writer
        self.linear = nn.Linear(4, 4)

    def forward(self, x, step):
        h = self.linear(x).sin()
        early = h * 2
        y = early.cos()
        if (self.number, step, "inside") == self.when:
            self.writer(early)
        LEAKED.append(early)
        return y + h


LEAKED = []
WHEN = {"in the first block": (0, 0, "inside"), "in a later identical block": (2, 0, "inside"),
        "at a later step": (1, 2, "inside"), "after the block": (1, 0, "after"), "after the block, later": (2, 2, "after")}


def train_written(wrap, when, writer):
    torch.manual_seed(0)
    blocks = nn.ModuleList(WrittenBlock(i, when, writer) for i in range(4))
    wrap(blocks)
    found = []
    for step in range(3):
        x = leaf(3, 4, seed=step)
        y = x
        LEAKED.clear()
        for block in blocks:
            y = block(y, step)
        if when[1:] == (step, "after"):
            writer(LEAKED[when[0]])
        found.append(gradients(y.sum(), x, *blocks.parameters()))
    return found


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("how", STRESS)
@pytest.mark.parametrize("writer", WRITERS, ids=lambda f: f.__name__)
def test_unseen_writers_are_right_or_loud(writer, when, interval, how):
    expected = train_written(lambda blocks: None, WHEN[when], writer)
    with stress(**STRESS[how]):
        try:
            got = train_written(lambda blocks: tfg.wrap(blocks, interval=interval), WHEN[when], writer)
        except tfg.Error:
            return
    assert not (wrong := differences(expected, got)), wrong


OUTSIDE = {"numpy input": lambda x, a, net: a.__setitem__(slice(None), 0.5),
           "parameter": lambda x, a, net: through_numpy(net[0].bias),
           "parameter data": lambda x, a, net: setattr(net[3].bias, "data", torch.full((4,), 0.5))}


@pytest.mark.parametrize("what", OUTSIDE)
@pytest.mark.parametrize("how", STRESS)
def test_outside_changes_that_nobody_sees_are_right_or_loud(what, how):
    import numpy

    def train(ck):
        net, x = perceptron(4, 3, dropout=0.2), leaf(2, 4)
        array = numpy.full((2, 4), 1.5, dtype=numpy.float32)
        outside = torch.from_numpy(array)
        y = ck(lambda x: net((x + outside).sin() * outside), x)
        OUTSIDE[what](x, array, net)
        return gradients(y.sum(), x, *net.parameters())
    expected = train(plain)
    with stress(**STRESS[how]):
        try:
            got = train(tfg.checkpoint)
        except tfg.Error:
            return
    assert not (wrong := differences(expected, got)), wrong


def test_mutated_says_it_by_hand():
    def train(ck, said):
        x = leaf(4)

        def f(x):
            h = x * 2
            y = h.cos()
            through_ctypes(h)
            said(h)
            return y
        return gradients(ck(f, x).sum(), x)
    assert not differences(train(plain, id), train(tfg.checkpoint, tfg.mutated))


# ------------------------------------------------------------------------------------------------- all programs
@pytest.mark.parametrize("how", STRESS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_what_plain_gives(name, how):
    torch.manual_seed(1)
    expected = PROGRAMS[name](plain)
    torch.manual_seed(1)
    with stress(**STRESS[how]):
        got = PROGRAMS[name](tfg.checkpoint)
    assert not (wrong := differences(expected, got)), wrong
