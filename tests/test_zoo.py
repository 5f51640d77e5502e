# SPDX-License-Identifier: BSD-3-Clause
"""The zoo: wrapped models train as plain ones do, bit for bit, and every module's forward runs as often as in plain.

One model of each family runs in every test run; the other dtypes and schedules are marked slow.
"""

import collections
import contextlib
import copy

import pytest
import torch
from bitwise import differences
from torch import nn
from zoo_models import ZOO

import tfg

WITHOUT_TRANSFORMERS = ("torch_encoder", "in_place", "running_mean")
pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.float64, torch.bfloat16, torch.float16)


def built(name, dtype=torch.float32):
    if name not in WITHOUT_TRANSFORMERS:
        pytest.importorskip("transformers", reason="the zoo's models are built from transformers' configs")
    torch.manual_seed(0)
    model, batch = ZOO[name]()
    return model.to(dtype).train(), batch


# ------------------------------------------------------------------------------------------------- what is compared
@contextlib.contextmanager
def counted_forwards(model):
    names, counts = {id(m): n for n, m in model.named_modules()}, collections.Counter()

    def count(module, args):
        if id(module) in names:
            counts[names[id(module)]] += 1
    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def inputs(batch, i, dtype):
    """Micro-batch i; floating inputs want a gradient too."""
    return {k: v.to(dtype).requires_grad_() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch(i).items()}


def loss_of(model, given):
    out = model(**given)
    return out if torch.is_tensor(out) else out.loss


def noted(model, given, loss):
    return {"loss": loss.detach().clone(), "random": torch.get_rng_state(),
            "grads": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
            "of inputs": {k: v.grad.clone() for k, v in given.items() if getattr(v, "grad", None) is not None},
            "buffers": {n: b.clone() for n, b in model.named_buffers()}}


# ------------------------------------------------------------------------------------------------- schedules
def two_steps(model, batch, dtype):
    """Two optimizer steps, on batches of two lengths."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for i in range(2):
        optimizer.zero_grad()
        given = inputs(batch, i, dtype)
        loss = loss_of(model, given)
        loss.backward()
        found.append(noted(model, given, loss))
        optimizer.step()
    return found


def two_forwards_first(model, batch, dtype):
    """Both forwards, then both backwards, oldest first."""
    given = [inputs(batch, i, dtype) for i in range(2)]
    losses = [loss_of(model, g) for g in given]
    for loss in losses:
        loss.backward()
    return [noted(model, g, loss) for g, loss in zip(given, losses)]


def retained(model, batch, dtype):
    given = inputs(batch, 0, dtype)
    loss = loss_of(model, given)
    loss.backward(retain_graph=True)
    first = noted(model, given, loss)
    loss.backward()
    return first, noted(model, given, loss)


def under_autocast(model, batch, dtype):
    given = inputs(batch, 0, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, given)
    loss.backward()
    return noted(model, given, loss)


SCHEDULES = {f.__name__: f for f in (two_steps, two_forwards_first, retained, under_autocast)}


def trained(proto, batch, schedule, dtype, how):
    model = copy.deepcopy(proto)
    if how:
        assert tfg.wrap(model, **how) is model
    torch.manual_seed(1234)
    with counted_forwards(model) as counts:
        found = schedule(model, batch, dtype)
    return {"found": found, "forwards": dict(counts), "names": list(model.state_dict())}


def check(name, how, schedule="two_steps", dtype=torch.float32):
    proto, batch = built(name, dtype)
    try:
        plain = trained(proto, batch, SCHEDULES[schedule], dtype, None)
    except (RuntimeError, NotImplementedError) as error:
        if dtype == torch.float32:
            raise
        pytest.skip(f"plain does not run in {dtype} on this CPU: {str(error).splitlines()[0]}")
    wrong = differences(plain, trained(proto, batch, SCHEDULES[schedule], dtype, how))
    assert not wrong, "\n".join([f"{len(wrong)} places differ from plain:", *wrong[:8]])


# ------------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("name", ZOO)
def test_every_block_a_region_trains_bitwise(name):
    check(name, {"interval": 1})


@pytest.mark.parametrize("name", ZOO)
def test_segments_with_two_forwards_before_two_backwards_are_bitwise(name):
    check(name, {"interval": 2}, "two_forwards_first")


@pytest.mark.parametrize("name", ["llama", "gpt2", "albert", "resnet", "torch_encoder"])
def test_one_block_in_two_trains_bitwise(name):
    check(name, {"every_n_layers": 2})


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"interval": 1}, {"interval": 3}, {"every_n_layers": 2}], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ZOO)
def test_every_schedule_is_bitwise(name, schedule, how):
    check(name, how, schedule)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", ZOO)
def test_every_float_dtype_is_bitwise(name, dtype):
    check(name, {"interval": 2}, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", ["llama", "torch_encoder", "in_place", "running_mean"])
def test_float_dtypes_are_bitwise(name, dtype):
    check(name, {"interval": 1}, dtype=dtype)


@pytest.mark.parametrize("name", ["llama", "gpt2", "in_place", "running_mean"])
def test_something_is_dropped(name):
    proto, batch = built(name)
    live = []
    for model in (copy.deepcopy(proto), tfg.wrap(copy.deepcopy(proto), interval=1)):
        base = tfg.cpu.memory_allocated()
        loss = loss_of(model, inputs(batch, 0, torch.float32))
        live.append(tfg.cpu.memory_allocated() - base)
        del loss
    assert live[1] < live[0], f"alive after forward: plain {live[0]} bytes, wrapped {live[1]}"
