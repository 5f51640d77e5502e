# SPDX-License-Identifier: BSD-3-Clause
"""The copies table: every way to copy a wrapped model trains its own weights, bitwise right, and stays wrapped."""

import copy
import io
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from small_models import Block, Stack, assert_same_bits, batch, one_step, plain, train
from torch import nn
from torch.func import functional_call

import tfg
from tfg.subclass import STATE, Wrapped, state_of


def through_pickle(model, protocol=pickle.DEFAULT_PROTOCOL):
    return pickle.loads(pickle.dumps(model, protocol))


def through_save(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "pickle 2": lambda m: through_pickle(m, 2), "torch.save": through_save}


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_is_wrapped_apart_and_trains_its_own_weights(make, interval):
    model = Stack()
    wanted = plain(model)
    tfg.wrap(model, interval=interval)
    before = [p.detach().clone() for p in model.parameters()]
    twin = make(model)
    assert all(isinstance(b, Block) and isinstance(b, Wrapped) for b in twin.blocks)
    states, twins = [state_of(b) for b in model.blocks], [state_of(b) for b in twin.blocks]
    assert all(a is not b and a.key != b.key for a, b in zip(states, twins))
    assert len({id(s.stack) for s in twins}) == 1 and twins[0].stack is not states[0].stack
    assert_same_bits(train(twin), wanted)
    assert_same_bits([p.detach() for p in model.parameters()], before)
    assert_same_bits(train(model), wanted)


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_unwrapping_a_copy_leaves_the_original_wrapped(make):
    model = Stack()
    keys, wanted = [set(vars(m)) for m in model.modules()], plain(model)
    twin = tfg.unwrap(make(tfg.wrap(model, interval=2)))
    assert [set(vars(m)) for m in twin.modules()] == keys and type(twin.blocks[0]) is Block
    assert STATE in vars(model.blocks[0])
    assert_same_bits(train(twin), wanted)


def test_copy_copy_of_a_block_shares_its_weights():
    model = tfg.wrap(Stack(), interval=2)
    block = model.blocks[1]
    twin = copy.copy(block)
    assert twin is not block and isinstance(twin, Wrapped) and twin.up.weight is block.up.weight
    twin._modules = dict(twin._modules, up=nn.Linear(8, 16))
    plain_twin = tfg.unwrap(copy.deepcopy(twin))
    results = []
    for module in (twin, plain_twin):
        torch.manual_seed(0)
        results.append(one_step(module, batch()))
    assert_same_bits(*results)
    assert twin.up.weight.grad is not None and block.up.weight.grad is None
    tfg.unwrap(twin)
    assert type(twin) is Block and isinstance(block, Wrapped) and state_of(block) is not None


def test_copy_copy_of_a_model_trains_the_shared_weights():
    model = Stack()
    wanted = plain(model)
    assert_same_bits(train(copy.copy(tfg.wrap(model, interval=2))), wanted)


def test_state_dicts_are_the_plain_ones_both_ways():
    model, twin = tfg.wrap(Stack(seed=1), interval=2), Stack()
    twin.load_state_dict(model.state_dict())
    model.load_state_dict(twin.state_dict())
    assert list(model.state_dict()) == list(twin.state_dict())
    assert_same_bits(train(model), train(twin))


def replicate(model):
    """What DataParallel does: shallow replicas of every module, with their own copies of the parameters."""
    modules = list(model.modules())
    replicas = {id(m): m._replicate_for_data_parallel() for m in modules}
    for module in modules:
        replica = replicas[id(module)]
        for name, child in module._modules.items():
            replica._modules[name] = replicas[id(child)]
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach().clone().requires_grad_())
    return replicas[id(model)]


def replica_grads(replica, x):
    leaves = [vars(m)[n] for b in replica.blocks for m in (b.norm, b.up, b.down) for n in ("weight", "bias")]
    return list(torch.autograd.grad(replica.eval()(x).square().sum(), leaves))


def test_data_parallel_replicas_run_their_own_weights_on_their_threads():
    model, twin = tfg.wrap(Stack(), interval=2), Stack()
    replicas, wanted = [replicate(model) for _ in range(2)], [replicate(twin) for _ in range(2)]
    for i, (ours, plain_one) in enumerate(zip(replicas, wanted)):
        for replica in (ours, plain_one):
            for block in replica.blocks:
                block.up.weight.data.mul_(i + 2)
    got = [None, None]

    def work(i):
        got[i] = replica_grads(replicas[i], batch(i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [t.start() for t in threads], [t.join() for t in threads]
    for i in range(2):
        assert_same_bits(got[i], replica_grads(wanted[i], batch(i)))
    assert all(p.grad is None for p in model.parameters())


def test_functional_call_trains_the_weights_it_is_given():
    def run(model):
        torch.manual_seed(3)
        given = {n: (p.detach() * 1.5).requires_grad_() for n, p in model.named_parameters()}
        y = functional_call(model, given, (batch(),))
        return [y.detach(), *torch.autograd.grad(y.square().sum(), given.values()), *[p.detach() for p in model.parameters()]]

    assert_same_bits(run(tfg.wrap(Stack(), interval=2)), run(Stack()))
    model = tfg.wrap(Stack(), interval=2)
    run(model)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("how", [{"interval": 1}, {"interval": 2}, {"every_n_layers": 2}], ids=str)
def test_a_compiled_model_is_the_plain_one(how):
    def run(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.manual_seed(0)
        return one_step(compiled, batch())

    wanted = Stack().eval()
    assert_same_bits(run(tfg.wrap(Stack(), **how).eval()), run(wanted))


def test_a_parametrized_block_trains_and_unwrap_removes_the_state_only():
    class Double(nn.Module):
        def forward(self, weight):
            return weight * 2

    def build(how):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh())
        if how:
            tfg.wrap(model, **how)
        nn.utils.parametrize.register_parametrization(model[0], "weight", Double())
        return model

    wanted = train(build(None))
    assert_same_bits(train(build({"interval": 1})), wanted)
    assert_same_bits(train(copy.deepcopy(build({"interval": 2}))), wanted)
    model = tfg.unwrap(build({"interval": 2}))
    assert type(model[0]).__name__ == "ParametrizedLinear" and state_of(model[0]) is None and type(model[1]) is nn.Linear
    assert_same_bits(train(model), wanted)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(tfg.unwrap(model)[0]) is nn.Linear


def test_a_class_with_a_reduce_of_its_own_is_copied_its_way():
    assert_same_bits(train(copy.deepcopy(tfg.wrap(Stack(block=Reduced), interval=2))), train(Stack(block=Reduced)))
    twin = copy.deepcopy(tfg.wrap(Stack(block=Reduced), interval=2))
    assert all(isinstance(b, Wrapped) and b.was_reduced for b in twin.blocks)


class Reduced(Block):
    was_reduced = False

    def __reduce__(self):
        return type(self), (8,), dict(vars(self), was_reduced=True)


SHARDED = """
import sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from small_models import Stack, assert_same_bits, train
import tfg

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))

def shard(model):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def plain_bits(items):
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in items]

wanted = plain_bits(train(shard(Stack())))
for how in ({"interval": 1}, {"interval": 2}, {"every_n_layers": 2}):
    assert_same_bits(plain_bits(train(shard(tfg.wrap(Stack(), **how)))), wanted)
    assert_same_bits(plain_bits(train(tfg.wrap(shard(Stack()), **how))), wanted)
model = shard(tfg.wrap(Stack(), interval=1))
assert type(model.blocks[0]).__name__ == "FSDPBlock"
tfg.unwrap(model)
assert type(model.blocks[0]).__name__ == "FSDPBlock" and "_tfg_state" not in vars(model.blocks[0])
assert_same_bits(plain_bits(train(model)), wanted)
assert_same_bits(plain_bits(train(tfg.wrap(shard(tfg.wrap(Stack(), interval=1)), interval=1))), wanted)
print("sharded fine")
dist.destroy_process_group()
"""


def test_fully_shard_afterwards_trains_right_and_unwraps():
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, cwd=os.path.dirname(__file__), timeout=300)
    assert "sharded fine" in done.stdout, done.stderr
