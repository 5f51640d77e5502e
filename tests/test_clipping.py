# SPDX-License-Identifier: BSD-3-Clause
"""tfg.clip_grad_norm_ against torch's function and against exact sums. What must be bitwise is compared bitwise; where a tolerance
stands, its reason stands beside it."""

import math
import warnings

import pytest
import torch
from bitwise import copied, differences, same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_ as torchs

import tfg
from tfg import clipping

KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ORDERS = [2.0, 1.0, math.inf]

# Relative, of torch's norm: it adds float32 in float32, up to 1e5 elements here, and rounds each tensor's norm to the tensor's dtype.
# Ours has one rounding to the dtype that is returned.
TORCHS_ERROR = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-9}
ONE_ROUNDING = {torch.float64: 2**-44, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def parameters_with(gradients):
    parameters = []
    for gradient in gradients:
        parameter = torch.zeros(gradient.shape, dtype=gradient.dtype, requires_grad=True)
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def run(clip, gradients, *args, **kwargs):
    """(norm, gradients) after clipping copies of `gradients`, each in the layout of its own."""
    mine = copied(gradients)
    return clip(parameters_with(mine), *args, **kwargs), mine


def exact_norm(gradients, order):
    """Correctly rounded, up to the last square root; of what the elements are."""
    sizes = [abs(x) for gradient in gradients for x in gradient.double().reshape(-1).tolist()]
    if order == math.inf:
        return max(sizes)
    return math.fsum(sizes) if order == 1 else math.sqrt(math.fsum(x * x for x in sizes))


@pytest.fixture
def ours(monkeypatch):
    """Fails the test where torch's function is called."""
    monkeypatch.setattr(clipping, "stock", lambda *args: pytest.fail("torch's function was called"))


@pytest.fixture
def only_torchs(monkeypatch):
    """A list that says how often torch's function was called."""
    calls = []
    monkeypatch.setattr(clipping, "stock", lambda *args: calls.append(1) or torchs(*args))
    return calls


shapes = st.sampled_from([(), (1,), (3,), (7, 5), (0,), (2, 0, 3), (1025,), (13, 79)])


@st.composite
def lists_of_gradients(draw, kinds=KINDS):
    made = []
    for shape in draw(st.lists(shapes, min_size=1, max_size=6)):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
        scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
        gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(draw(st.sampled_from(kinds)))
        made.append(gradient.T if draw(st.booleans()) and gradient.dim() == 2 else gradient)
    return made


@settings(max_examples=200, deadline=None)
@given(lists_of_gradients(), st.sampled_from([2.0, 1.0]), st.sampled_from([1e-3, 0.5, 1.0, 5.0, 1e9]))
def test_clips_as_torch_does(gradients, order, max_norm):
    norm, mine = run(tfg.clip_grad_norm_, gradients, max_norm, order)
    theirs, expected = run(torchs, gradients, max_norm, order)
    assert norm.dtype == theirs.dtype and norm.shape == () and not norm.requires_grad
    widest = max(TORCHS_ERROR[gradient.dtype] for gradient in gradients)
    torch.testing.assert_close(norm, theirs, rtol=widest, atol=0)
    for gradient, a, b in zip(gradients, mine, expected):
        # The coefficient has the norm's error, and the product one rounding more on either side. Below 2**-14 float16 is 2**-24 apart:
        # the product's rounding, and that of torch's coefficient, which is float16 where the norm is.
        apart = 2**-24 + 2**-25 * max(gradient.abs().flatten().tolist(), default=0) if a.dtype == torch.float16 else 0
        torch.testing.assert_close(a, b, rtol=2 * widest + 2 * ONE_ROUNDING[a.dtype], atol=apart)


@settings(max_examples=100, deadline=None)
@given(lists_of_gradients(), st.sampled_from(ORDERS))
def test_the_norm_is_rounded_once(gradients, order):
    if order == math.inf and not all(gradient.numel() for gradient in gradients):
        gradients = [gradient for gradient in gradients if gradient.numel()] or [torch.ones(1)]
    norm, _ = run(tfg.clip_grad_norm_, gradients, 1.0, order)
    exact = exact_norm(gradients, order)
    # 2**-44: the sum's own bound, see csrc/core/clip.h
    assert abs(norm.double().item() - exact) <= exact * (ONE_ROUNDING[norm.dtype] * 1.001 + 2**-44)


@settings(max_examples=100, deadline=None)
@given(lists_of_gradients(), st.sampled_from(ORDERS), st.floats(1e-3, 10))
def test_what_is_written_is_one_product(gradients, order, max_norm):
    gradients = [gradient for gradient in gradients if gradient.numel()] or [torch.ones(1)]
    norm, mine = run(tfg.clip_grad_norm_, gradients, max_norm, order)
    if norm.dtype != torch.float64:
        return  # only there the returned norm is the one that was divided by
    coefficient = min(1.0, max_norm / (norm.item() + 1e-6))
    for before, after in zip(gradients, mine):
        wide = before if before.dtype == torch.float64 else before.float()
        assert same_bits(after, (wide * torch.tensor(coefficient, dtype=wide.dtype)).to(before.dtype))


@settings(max_examples=50, deadline=None)
@given(lists_of_gradients(), st.sampled_from(ORDERS))
def test_nothing_to_clip_is_bitwise_as_it_was(gradients, order):
    gradients = [gradient for gradient in gradients if gradient.numel()] or [torch.ones(1)]
    _, mine = run(tfg.clip_grad_norm_, gradients, math.inf, order)
    _, theirs = run(torchs, gradients, math.inf, order)
    assert not differences(mine, gradients) and not differences(mine, theirs)


@settings(max_examples=50, deadline=None)
@given(lists_of_gradients())
def test_the_largest_is_exactly_torchs(gradients):
    gradients = [gradient for gradient in gradients if gradient.numel()] or [torch.ones(1)]
    norm, _ = run(tfg.clip_grad_norm_, gradients, 1.0, math.inf)
    assert same_bits(norm, run(torchs, gradients, 1.0, math.inf)[0])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=9), st.sampled_from(KINDS),
       st.sampled_from(ORDERS), st.sampled_from([-1.0, 0.0, 1.0, math.inf, math.nan]), st.booleans())
@example([math.inf, 1.0], torch.float16, 2.0, math.inf, False)
def test_odd_numbers_go_where_torch_lets_them_go(values, kind, order, max_norm, is_strict):
    gradients = [torch.tensor(values, dtype=kind), torch.ones(3, dtype=kind)]
    results = []
    for clip in (tfg.clip_grad_norm_, torchs):
        try:
            norm, after = run(clip, gradients, max_norm, order, is_strict)
            results.append((norm, after))
        except RuntimeError as refused:
            results.append(str(refused))
    if isinstance(results[1], str):
        assert results[0] == results[1]
        return
    for a, b in zip([results[0][0], *results[0][1]], [results[1][0], *results[1][1]]):
        torch.testing.assert_close(a, b, rtol=2 * TORCHS_ERROR[kind], atol=0, equal_nan=True)


@pytest.mark.parametrize("order", ORDERS)
def test_any_number_of_threads_gives_the_same_bits(ours, order):
    generator = torch.Generator().manual_seed(1)
    sizes = [3, 65536, 65537, 1, 300001, 0 if order != math.inf else 2, 70000]
    gradients = [torch.randn(n, generator=generator, dtype=torch.float64).to(kind) for n in sizes for kind in KINDS]
    before, results = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2, 3, 7):
            torch.set_num_threads(n_threads)
            results.append(run(tfg.clip_grad_norm_, gradients, 1.0, order))
    finally:
        torch.set_num_threads(before)
    assert not any(differences(results[0], other) for other in results[1:])


def test_several_threads_are_used():
    """Compiled without OpenMP, at::parallel_for would quietly run on one."""
    if torch.__config__.parallel_info().find("ATen parallel backend: OpenMP") < 0:
        pytest.skip("this torch's threads are not OpenMP's")
    from pathlib import Path

    from tfg import _C
    binary = Path(_C.__file__).read_bytes()
    assert b"GOMP_parallel" in binary or b"kmpc_fork" in binary, "csrc/torch/clipping.cpp is to be compiled with -fopenmp"


def test_float16_norms_that_do_not_fit_are_infinite_as_in_torch():
    gradients = [torch.full((4,), 3e4, dtype=torch.float16)]
    norm, mine = run(tfg.clip_grad_norm_, gradients, 1.0, 1)
    assert norm.item() == math.inf and not mine[0].any()
    assert not differences((norm, mine), run(torchs, gradients, 1.0, 1))


def test_squares_beyond_float32_do_not_overflow():
    norm, mine = run(tfg.clip_grad_norm_, [torch.full((4,), 1e20)], 1.0)
    assert norm.item() == pytest.approx(2e20, rel=1e-6)
    torch.testing.assert_close(mine[0], torch.full((4,), 0.5))


def test_tiny_gradients_have_a_norm():
    norm, _ = run(tfg.clip_grad_norm_, [torch.full((4,), 1e-30)], 1.0)
    assert norm.item() == pytest.approx(2e-30, rel=1e-6)


def test_parameters_come_as_a_tensor_a_list_a_generator_or_a_model(ours):
    model = torch.nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    whole = tfg.clip_grad_norm_(model.parameters(), math.inf)
    assert same_bits(whole, tfg.clip_grad_norm_(list(model.parameters()), math.inf))
    assert same_bits(whole, tfg.clip_grad_norm_((p for p in model.parameters()), math.inf))
    assert same_bits(whole, tfg.clip_grad_norm_(tuple(model.parameters()), math.inf))
    assert same_bits(tfg.clip_grad_norm_(model.weight, math.inf), torch.tensor(3.0))


def test_nothing_to_clip_at_all():
    without = torch.zeros(3, requires_grad=True)
    assert not differences(tfg.clip_grad_norm_([without], 1.0), torchs([without], 1.0))
    assert not differences(tfg.clip_grad_norm_([], 1.0), torchs([], 1.0))
    with pytest.warns(UserWarning) as caught:
        tfg.clip_grad_norm_((p for p in ()), 1.0)
    with pytest.warns(UserWarning) as expected:
        torchs((p for p in ()), 1.0)
    assert [str(one.message) for one in caught] == [str(one.message) for one in expected]


def outcome(clip, parameters, *args, **kwargs):
    try:
        return clip(parameters, *args, **kwargs)
    except Exception as refused:
        return type(refused), str(refused)


@pytest.mark.parametrize("arguments", [
    dict(max_norm="x"), dict(max_norm=None), dict(max_norm=1.0, norm_type="y"), dict(max_norm=1.0, norm_type=None),
    dict(max_norm=torch.ones(2)), dict(max_norm=1.0, foreach=True, norm_type="z"),
], ids=str)
def test_bad_arguments_are_torchs_errors(arguments):
    parameters = parameters_with([torch.ones(2)])
    assert outcome(tfg.clip_grad_norm_, parameters, **arguments) == outcome(torchs, parameters, **arguments)
    assert isinstance(outcome(torchs, parameters, **arguments), tuple)


@pytest.mark.parametrize("parameters", [3, None, [3], [None]], ids=str)
def test_bad_parameters_are_torchs_errors(parameters):
    assert outcome(tfg.clip_grad_norm_, parameters, 1.0) == outcome(torchs, parameters, 1.0)


def test_numbers_come_as_text_or_tensors_too(ours):
    for max_norm, order in (("1.5", "2"), (torch.tensor(1.5), 2), (1.5, torch.tensor(2.0))):
        _, mine = run(tfg.clip_grad_norm_, [torch.full((4,), 2.0)], max_norm, order)
        torch.testing.assert_close(mine[0], torch.full((4,), 0.75))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_error_touches_no_gradient(kind):
    parameters = parameters_with([torch.ones(5, dtype=kind), torch.tensor([1.0, math.nan], dtype=kind)])
    before, versions = copied([p.grad for p in parameters]), [p.grad._version for p in parameters]
    with pytest.raises(RuntimeError) as refused:
        tfg.clip_grad_norm_(parameters, 0.5, error_if_nonfinite=True)
    assert not differences([p.grad for p in parameters], before) and [p.grad._version for p in parameters] == versions
    with pytest.raises(RuntimeError) as expected:
        torchs(parameters, 0.5, error_if_nonfinite=True)
    assert str(refused.value) == str(expected.value)


@pytest.mark.parametrize("max_norm", [0.1, math.inf])
def test_versions_move_as_in_torch(max_norm):
    moved = []
    for clip in (tfg.clip_grad_norm_, torchs):
        parameters = parameters_with([torch.ones(5), torch.ones(2, dtype=torch.bfloat16)])
        clip(parameters, max_norm)
        moved.append([p.grad._version for p in parameters])
    assert moved[0] == moved[1]


def test_a_gradient_that_a_graph_has_saved_is_refused_in_its_backward():
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    parameter = torch.zeros(3, requires_grad=True)
    parameter.grad = gradient
    loss = (gradient * gradient).sum()
    tfg.clip_grad_norm_(parameter, 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_every_dense_layout_is_ours(ours):
    base = torch.randn(4, 6, 5, 3)
    layouts = [base.permute(3, 1, 0, 2), base.to(memory_format=torch.channels_last), base.reshape(24, 15).T, base[1:3]]
    for layout in layouts:
        parameter = torch.zeros_like(layout, requires_grad=True)
        parameter.grad = layout.clone(memory_format=torch.preserve_format)
        tfg.clip_grad_norm_(parameter, 1.0)
        torch.testing.assert_close(parameter.grad, layout * (1.0 / (layout.norm() + 1e-6)))


def test_views_of_one_buffer_are_clipped_once_each(ours):
    flat = torch.arange(10.0)
    parameters = parameters_with([flat[:3], flat[3:4], flat[5:]])
    norm = tfg.clip_grad_norm_(parameters, 1.0)
    expected = torch.arange(10.0) / (norm + 1e-6)
    expected[4] = 4.0
    torch.testing.assert_close(flat, expected)


def test_a_lazy_copy_keeps_its_own_numbers():
    gradient = torch.full((8,), 4.0)
    lazy = torch._lazy_clone(gradient)
    tfg.clip_grad_norm_(parameters_with([lazy]), 1.0)
    assert same_bits(gradient, torch.full((8,), 4.0)) and lazy[0].item() < 1


def sparse():
    return [torch.ones(3), torch.sparse_coo_tensor([[0, 2]], [3.0, 4.0], (5,))]


def same_twice():
    one = torch.full((3,), 2.0)
    return [one, one, one[1:]]


FOR_TORCH = {
    "sparse": sparse,
    "complex": lambda: [torch.tensor([3 + 4j]), torch.ones(2)],
    "same memory twice": same_twice,
    "gaps": lambda: [torch.arange(20.0).reshape(4, 5)[:, :3]],
    "negative bit": lambda: [torch.tensor([3 + 4j, 1j]).conj().imag],
    "empty and the largest": lambda: [torch.ones(2), torch.ones(0)],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", FOR_TORCH)
def test_what_is_not_plain_is_torchs(only_torchs, case, order):
    if case != "empty and the largest" or order == math.inf:
        first, second = parameters_with(FOR_TORCH[case]()), parameters_with(FOR_TORCH[case]())
        mine, theirs = outcome(tfg.clip_grad_norm_, first, 1.0, order), outcome(torchs, second, 1.0, order)
        assert not differences(mine, theirs)
        for a, b in zip(first, second):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
        assert only_torchs


def test_several_devices_are_torchs(only_torchs):
    parameters = parameters_with([torch.ones(2)])
    other = torch.zeros(2, device="meta", requires_grad=True)
    other.grad = torch.ones(2, device="meta")
    assert outcome(tfg.clip_grad_norm_, [other, *parameters], 1.0, 2.0)[0] == outcome(torchs, [other, *parameters], 1.0, 2.0)[0]
    assert only_torchs


@pytest.mark.parametrize("foreach", [True, False])
def test_foreach_asks_for_torchs(only_torchs, foreach):
    gradients = [torch.randn(70), torch.randn(3, 3)]
    assert not differences(run(tfg.clip_grad_norm_, gradients, 1.0, foreach=foreach), run(torchs, gradients, 1.0, foreach=foreach))
    assert only_torchs


@pytest.mark.parametrize("order", [0, 3, 0.5, -1, -math.inf, math.nan])
def test_other_orders_are_torchs(only_torchs, order):
    gradients = [torch.randn(70), torch.randn(3, 3)]
    assert not differences(run(tfg.clip_grad_norm_, gradients, 1.0, order), run(torchs, gradients, 1.0, order))
    assert only_torchs


def test_subclasses_are_torchs(only_torchs):
    class Wrapped(torch.Tensor):
        pass

    parameters = parameters_with([torch.ones(2).as_subclass(Wrapped)])
    tfg.clip_grad_norm_(parameters, 1.0)
    assert only_torchs


def test_a_dispatch_mode_sees_the_operators(only_torchs):
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Listening():
        tfg.clip_grad_norm_(parameters_with([torch.ones(2)]), 1.0)
    assert seen and only_torchs


def test_inside_a_region_the_writes_are_taped(only_torchs):
    parameter, = parameters_with([torch.full((3,), 2.0)])
    x = torch.ones(3, requires_grad=True)

    def block(x):
        tfg.clip_grad_norm_(parameter, 1.0)
        return (x * parameter.grad).sin()

    tfg.checkpoint(block, x).sum().backward()
    assert only_torchs
    torch.testing.assert_close(x.grad, parameter.grad * (x.detach() * parameter.grad).cos())


def test_a_region_that_leans_on_a_gradient_notices():
    """The gradient is an input that no one saved; a replay after the clip would use other numbers."""
    parameter, = parameters_with([torch.full((70000,), 2.0)])
    x = torch.ones(70000, requires_grad=True)
    y = tfg.checkpoint(lambda x: (x + parameter.grad).sin(), x)
    expected = (x.detach() + parameter.grad).cos()
    tfg.clip_grad_norm_(parameter, 1.0)
    try:
        y.sum().backward()
    except tfg.Error:
        return
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


def test_compiled_code_calls_torchs():
    parameters = parameters_with([torch.full((4,), 2.0)])

    @torch.compile(backend="eager", fullgraph=True)
    def clip():
        return tfg.clip_grad_norm_(parameters, 1.0)

    torch.testing.assert_close(clip(), torch.tensor(4.0))
    torch.testing.assert_close(parameters[0].grad, torch.full((4,), 0.5))


def test_a_dtensor_gives_torchs_dtensor(only_torchs):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or distributed.is_initialized():
        pytest.skip("no process group of its own can be had here")
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.full((4,), 2.0), mesh, [Shard(0)])
        norm = tfg.clip_grad_norm_([parameter], 1.0)
        assert isinstance(norm, DTensor) and norm.full_tensor().item() == 4.0 and only_torchs
        torch.testing.assert_close(parameter.grad.full_tensor(), torch.full((4,), 0.5))
    finally:
        distributed.destroy_process_group()


def test_forward_mode_tangents_are_torchs(only_torchs):
    import torch.autograd.forward_ad as forward
    with forward.dual_level():
        parameter = torch.zeros((), requires_grad=True)
        parameter.grad = forward.make_dual(torch.tensor(2.0), torch.tensor(1.0))
        outcome(tfg.clip_grad_norm_, [parameter], 1.0)
    assert only_torchs


def test_training_with_it_is_training_with_torchs():
    """Twenty steps in float64: the two norms differ in their last bits at most, and so do the models."""
    def train(clip):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(9, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(16, 9, dtype=torch.float64)).square().sum().backward()
            clip(model.parameters(), 1.0)
            optimizer.step()
        return list(model.parameters())

    for a, b in zip(train(tfg.clip_grad_norm_), train(torchs)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_no_warning_and_no_leak():
    parameters = parameters_with([torch.ones(1000)])
    tfg.clip_grad_norm_(parameters, 1.0)
    before = tfg.cpu.memory_allocated()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            tfg.clip_grad_norm_(parameters, 1.0)
    assert tfg.cpu.memory_allocated() == before
