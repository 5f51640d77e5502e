# SPDX-License-Identifier: BSD-3-Clause
"""Standing in for torch.utils.checkpoint: its names, its two ways, its policies, its callers."""

import contextlib
import functools
import subprocess
import sys
import threading

import pytest
import torch
import torch.utils.checkpoint as stock
from bitwise import differences
from small_models import Stack, assert_same_bits, batch, one_step
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as Policy

import tfg
from tfg import _C
from tfg.checkpoint import _key
from tfg.engines import is_rerun

MM = torch.ops.aten.mm.default


class Counted:
    """Two matrix products with pointwise operators; counts its calls."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.n_calls, self.weight = 0, torch.randn(6, 6, generator=generator, requires_grad=True)

    def __call__(self, x):
        self.n_calls += 1
        return ((x @ self.weight).sin() @ self.weight).cos()


def x_of():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2), requires_grad=True)


def gradients(y, *of, **how):
    return torch.autograd.grad(y.square().sum(), of, **how)


def plain_gradients(function, x):
    return gradients(function(x), x, function.weight)


# -- names --------------------------------------------------------------------------------------------------------------------
def test_every_name_of_the_stock_is_there():
    assert [name for name in stock.__all__ if not hasattr(tfg, name) or name not in tfg.__all__] == []


# -- the two ways -------------------------------------------------------------------------------------------------------------
def test_replay_calls_once_and_rerun_twice():
    for name, n_calls in (("replay", 1), ("rerun", 2)):
        function, x = Counted(), x_of()
        with tfg.engine(name):
            y = tfg.checkpoint(function, x)
        got = gradients(y, x, function.weight)
        assert function.n_calls == n_calls and not differences(got, plain_gradients(function, x))


def test_an_engine_is_chosen_for_this_thread_and_put_back():
    with tfg.engine("rerun"):
        seen = []
        thread = threading.Thread(target=lambda: seen.append(is_rerun()))
        thread.start()
        thread.join()
        with tfg.engine("replay"):
            assert not is_rerun()
        assert is_rerun() and seen == [False]
    with contextlib.suppress(KeyError), tfg.engine("rerun"):
        raise KeyError
    assert not is_rerun()
    with pytest.raises(ValueError, match="'replay' or 'rerun', not 'again'"), tfg.engine("again"):
        pass


@pytest.mark.parametrize("name, words", [("rerun", "2"), ("", "1"), ("replay", "1"), ("twice", "TFG_ENGINE: 'replay' or 'rerun', not 'twice'")])
def test_the_environment_chooses_an_engine(name, words):
    program = ("import torch, tfg\nn = []\ndef f(x):\n    n.append(1)\n    return x.sin()\n"
               "x = torch.ones(3, requires_grad=True)\ntfg.checkpoint(f, x).sum().backward()\nprint(len(n))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**__import__("os").environ, "TFG_ENGINE": name})
    assert words in done.stdout + done.stderr


def test_the_reentrant_form_is_the_stocks():
    function, x = Counted(), x_of()
    y = tfg.checkpoint(function, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="incompatible with .grad"):
        gradients(y, x)
    x = x_of()
    tfg.checkpoint(function, x, use_reentrant=True).square().sum().backward()
    twin = x_of()
    assert not differences([x.grad, function.weight.grad], plain_gradients(function, twin))
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        tfg.checkpoint(function, x, use_reentrant=True, scale=2)
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        tfg.checkpoint(function, x, use_reentrant=True, debug=True)


def test_a_custom_context_fn_surrounds_forward_and_recompute():
    entered, n_made = [], []

    @contextlib.contextmanager
    def around(name):
        entered.append(name)
        yield

    def contexts():
        n_made.append(1)
        return around("forward"), around("recompute")

    function, x = Counted(), x_of()
    y = tfg.checkpoint(function, x, context_fn=contexts)
    assert entered == ["forward"] and len(n_made) == 1
    assert not differences(gradients(y, x, function.weight), plain_gradients(function, x))
    assert entered == ["forward", "recompute"] and len(n_made) == 1
    with pytest.raises(ValueError, match="debug=True is incompatible with non-default context_fn"):
        tfg.checkpoint(function, x, context_fn=contexts, debug=True)


# -- selective ------------------------------------------------------------------------------------------------------------------
def save_products(context, op, *args, **kwargs):
    return Policy.MUST_SAVE if op is MM else Policy.PREFER_RECOMPUTE


def as_bool(context, op, *args, **kwargs):
    return op is MM


def made_by_partial(policy):
    return functools.partial(tfg.create_selective_checkpoint_contexts, policy)


def made_by_call(policy):
    return lambda: stock.create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("made", [made_by_partial, made_by_call])
@pytest.mark.parametrize("policy", [save_products, as_bool, [MM]], ids=["policy", "bool", "list"])
def test_a_policy_decides_what_is_replayed(made, policy):
    function, x = Counted(), x_of()
    wanted = plain_gradients(function, x)
    function.n_calls = 0
    before = _C.stats(_key(function))
    y = tfg.checkpoint(function, x, context_fn=made(policy))
    for _ in range(3):  # the stock allows one backward
        assert not differences(gradients(y, x, function.weight, retain_graph=True), wanted)
    after = _C.stats(_key(function))
    assert function.n_calls == 1
    assert after["ops_replayed"] - before["ops_replayed"] == 3  # sin, once per backward; no product
    assert after["kept_why"]["chosen by a policy"] - before["kept_why"].get("chosen by a policy", 0) == 2 * 4 * 6 * 4


@pytest.mark.parametrize("policy, n_replayed", [(Policy.MUST_SAVE, 0), (Policy.PREFER_SAVE, 0), (Policy.MUST_RECOMPUTE, 3), (Policy.PREFER_RECOMPUTE, 3),
                                                (None, 3), (True, 0), (False, 3)])
def test_each_policy_means_what_it_does_in_the_stock(policy, n_replayed):
    function, x = Counted(), x_of()
    before = _C.stats(_key(function))["ops_replayed"]
    y = tfg.checkpoint(function, x, context_fn=made_by_partial(lambda *_, **__: policy))
    assert not differences(gradients(y, x, function.weight), plain_gradients(function, x))
    assert _C.stats(_key(function))["ops_replayed"] - before == n_replayed


def test_a_policy_sees_what_a_dispatch_mode_sees():
    seen, theirs = [], []

    def look(into):
        def policy(context, op, *args, **kwargs):
            into.append((op, [type(a) for a in args], sorted(kwargs), context.is_recompute, torch.is_tensor(context.op_output)))
            return False
        return policy

    def function(x):
        y = torch.softmax(x.to(torch.float64), -1).sum(0, keepdim=True)
        return torch.cat([y, y.clamp(min=0.1)]).add(1, alpha=2).float()

    x = x_of()
    y = tfg.checkpoint(function, x, context_fn=made_by_partial(look(seen)))
    stock.checkpoint(function, x, use_reentrant=False, context_fn=made_by_partial(look(theirs)))
    assert seen == theirs and len(seen) >= 6
    assert not differences(gradients(y, x), gradients(function(x), x))


def test_a_policy_that_raises_is_heard_and_nothing_is_left_behind():
    def broken(context, op, *args, **kwargs):
        raise KeyError("no such layer")

    function, x = Counted(), x_of()
    with pytest.raises(KeyError, match="no such layer"):
        tfg.checkpoint(function, x, context_fn=made_by_partial(broken))
    assert not _C.in_region()
    for wrong in ([torch.ops.aten.mm], 3):
        with pytest.raises((ValueError, TypeError)) as ours:
            tfg.checkpoint(function, x, context_fn=made_by_partial(wrong))
        with pytest.raises(type(ours.value)) as theirs:
            stock.checkpoint(function, x, use_reentrant=False, context_fn=made_by_partial(wrong))
        assert str(ours.value) == str(theirs.value)
    assert not differences(gradients(tfg.checkpoint(function, x), x, function.weight), plain_gradients(function, x))


def test_a_policy_under_a_budget_keeps_what_it_named():
    function, x = Counted(), x_of()
    try:
        _C.set_budget(_C.live_bytes() + 400, False)
        y = tfg.checkpoint(function, x, context_fn=made_by_partial(save_products))
        assert not differences(gradients(y, x, function.weight), plain_gradients(function, x))
    finally:
        _C.set_budget(-1, False)


# -- forms ------------------------------------------------------------------------------------------------------------------------
def test_the_decorator_form_works_on_functions_and_methods():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Counted()

        @tfg.checkpoint(use_reentrant=False)
        def forward(self, x):
            """Doc."""
            return self.inner(x)

    model, x = Model(), x_of()
    assert Model.forward.__doc__ == "Doc." and Model.forward.__name__ == "forward"
    assert not differences(gradients(model(x), x, model.inner.weight), plain_gradients(model.inner, x))
    assert model.inner.n_calls == 2
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        tfg.checkpoint(scale=2)
    with pytest.raises(TypeError, match="must be callable, but is 3"):
        tfg.checkpoint()(3)


@pytest.mark.parametrize("as_list", [False, True])
def test_sequential_is_the_stocks(as_list):
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(7)])
    functions = list(layers) if as_list else layers
    for segments in (1, 2, 3, 7):
        x = x_of()
        wanted = gradients(stock.checkpoint_sequential(functions, segments, x, use_reentrant=False), x, *layers.parameters())
        got = gradients(tfg.checkpoint_sequential(functions, segments, x, preserve_rng_state=True), x, *layers.parameters())
        assert not differences(got, wanted)
    for wrong in ({"scale": 2}, {"scale": 2, "use_reentrant": False}):
        with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
            tfg.checkpoint_sequential(functions, 2, x, **wrong)
    with pytest.raises(ValueError, match="must not be zero"):
        tfg.checkpoint_sequential(functions, 8, x)
    with pytest.raises(TypeError):
        tfg.checkpoint_sequential(functions, 2)


def test_compiled_models_hand_over_to_the_stock_without_a_graph_break():
    function, x = Counted(), x_of()
    weight = function.weight

    def model(x):
        return tfg.checkpoint(lambda x: ((x @ weight).sin() @ weight).cos(), x) * 2

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(gradients(compiled(x), x, weight), gradients(model(x), x, weight)):
        torch.testing.assert_close(got, wanted)  # the compiler may order sums of gradients differently


# -- callers ------------------------------------------------------------------------------------------------------------------------
def test_torchs_module_wrapper_takes_tfg():
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model, plain = Stack(3), Stack(3)
    wrapper.apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=functools.partial(wrapper.checkpoint_wrapper, checkpoint_fn=tfg.checkpoint),
        check_fn=lambda module: type(module).__name__ == "Block")
    assert type(model.blocks[0]).__name__ == "CheckpointWrapper"
    torch.manual_seed(0)
    wanted = one_step(plain, batch())
    torch.manual_seed(0)
    assert_same_bits(one_step(model, batch()), wanted)
    assert plain.blocks[0].n_forwards == model.blocks[0].n_forwards == 1


def test_a_graph_tracer_sees_the_plain_operators():
    """What the tape brings back would be a constant of the graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def slope(x):
        return torch.autograd.grad(tfg.checkpoint(lambda x: x.sin().exp().tanh(), x).sum(), x)[0]

    a, b = (torch.randn(4, 4, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in (1, 2))
    for mode in ("real", "fake", "symbolic"):
        assert not differences(make_fx(slope, tracing_mode=mode)(a)(b), slope(b))


def test_a_patch_replaces_the_names_and_puts_them_back():
    originals = stock.checkpoint, stock.checkpoint_sequential
    holder = type(sys)("a_module_that_took_it_by_name")
    holder.ck, sys.modules[holder.__name__] = stock.checkpoint, holder
    try:
        with pytest.raises(KeyError), tfg.patch():
            assert stock.checkpoint is tfg.checkpoint and holder.ck is tfg.checkpoint
            assert stock.checkpoint_sequential is tfg.checkpoint_sequential
            function, x = Counted(), x_of()
            gradients(stock.checkpoint(function, x, use_reentrant=False), x)
            assert function.n_calls == 1
            with tfg.engine("rerun"):  # the stock's own, not itself again
                gradients(stock.checkpoint(function, x, use_reentrant=False), x)
            assert function.n_calls == 3
            raise KeyError
        assert (stock.checkpoint, stock.checkpoint_sequential) == originals and holder.ck is originals[0]
        patch = tfg.patch()
        patch.undo()
        patch.undo()
        assert (stock.checkpoint, holder.ck) == (originals[0], originals[0])
    finally:
        del sys.modules[holder.__name__]


def test_transformers_own_checkpointing_goes_through_a_patch():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=40)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))

    def grads():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = grads()
    with tfg.patch():
        model.gradient_checkpointing_enable()
        before = tfg.cpu.memory_allocated()
        assert not differences(grads(), wanted)
    layer = model.model.layers[0]
    assert layer.gradient_checkpointing and before >= 0
    assert "tfg" in layer._gradient_checkpointing_func.func.__module__


def test_a_script_runs_under_tfg(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys, torch\nfrom torch.utils.checkpoint import checkpoint\nn = []\ndef f(x):\n    n.append(1)\n    return x.sin()\n"
                      "if __name__ == '__main__':\n    x = torch.ones(3, requires_grad=True)\n"
                      "    checkpoint(f, x, use_reentrant=False).sum().backward()\n    print(sys.argv[1:], len(n), checkpoint.__module__)\n"
                      "    sys.exit(3)\n")
    done = subprocess.run([sys.executable, "-m", "tfg", "run", "--budget", "1GiB", str(script), "--lr", "0.1"], capture_output=True, text=True)
    assert done.stdout.strip() == "['--lr', '0.1'] 1 tfg.checkpoint" and done.returncode == 3, done.stderr
    done = subprocess.run([sys.executable, "-m", "tfg", "run", str(tmp_path / "none.py")], capture_output=True, text=True)
    assert "is not a file" in done.stderr and done.returncode != 0


def test_the_segments_of_checkpoint_sequential_are_call_sites_of_their_own():
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(4)))
    tfg.checkpoint_sequential(layers, 4, torch.randn(2, 4)).sum().backward()
    rows = {row["name"]: row["regions"] for row in tfg.report(layers)["blocks"]}
    assert rows == {"0": 1, "1": 1, "2": 1}  # the last segment is not checkpointed
