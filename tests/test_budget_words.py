# SPDX-License-Identifier: BSD-3-Clause
"""The budget's words: what each form means in bytes, what is refused and how, what the machine has, whose budget it is.

The binary is not called: what it would have been told is noted instead.
"""

import copy
import gc
import logging
import os
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from small_models import Language, Stack
from torch import nn

from tfg import budget
from tfg.budget import (
    ask,
    describe,
    fixed_base_bytes,
    format_bytes,
    machine_memory,
    own_bytes,
    parse,
    release,
    set_budget,
)

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
TOTAL, AUTO = 64 * GIB, 57 * GIB
WHERE = "the machine's memory"


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """(n_bytes or None, is_strict, base_bytes) per call into the binary; a machine of 64 GiB that counts, nothing asked yet."""
    told = []
    monkeypatch.setattr(budget, "_tell", lambda *what: told.append(what))
    monkeypatch.setattr(budget, "_is_counted", lambda tensor: True)
    monkeypatch.setattr(budget, "machine_memory", lambda: (TOTAL, WHERE))
    monkeypatch.setattr(budget, "is_counting", True)
    monkeypatch.setattr(budget, "is_disabled", False)
    before = budget._in_force, list(budget._asked)
    budget._forget()
    yield told
    budget._forget()
    budget._in_force = before[0]
    budget._asked.extend(before[1])


# -- every form -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("said, wanted", [
    (None, None), (MIB, MIB), (40 * GIB, 40 * GIB), (np.int64(3 * MIB), 3 * MIB), (2**63 - 1, 2**63 - 1),
    ("40GiB", 40 * GIB), ("40 GiB", 40 * GIB), ("40gib", 40 * GIB), (" 40\tGIB ", 40 * GIB), ("512MiB", 512 * MIB),
    ("1.5TiB", 3 * TIB // 2), ("4096KiB", 4 * MIB), (".5GiB", GIB // 2), ("2.GiB", 2 * GIB), ("+2GiB", 2 * GIB),
    ("40GB", 40 * 10**9), ("40 gb", 40 * 10**9), ("2000kB", 2_000_000), ("1.5MB", 1_500_000), ("1TB", 10**12),
    ("0.1GB", 10**8), ("80%", TOTAL * 4 // 5), ("80 %", TOTAL * 4 // 5), ("12.5%", TOTAL // 8), ("100%", TOTAL),
    (0.8, TOTAL * 4 // 5), (0.25, TOTAL // 4), (np.float64(0.5), TOTAL // 2), (np.float32(0.5), TOTAL // 2),
    (Fraction(1, 4), TOTAL // 4), ("auto", AUTO), (" Auto ", AUTO)], ids=repr)
def test_each_form_means_its_bytes(said, wanted):
    got = parse(said, TOTAL, AUTO)
    assert got == wanted and (got is None or type(got) is int)


@pytest.mark.parametrize("percent", range(1, 100))
def test_a_share_is_the_same_bytes_as_percent_and_as_float(percent):
    assert parse(f"{percent}%", 10**10 + 7, AUTO) == parse(percent / 100, 10**10 + 7, AUTO) == (10**10 + 7) * percent // 100


# -- every refusal --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("said, words", [
    (40, "budget=40 is 40 bytes; '40GiB' is 40 GiB"), (1, "budget=1 is one byte; '100%' is all of the device"),
    (0, "budget=0 is no bytes at all; None lifts the budget"), (-5, "budget=-5 is negative"),
    (MIB - 1, "budget=1048575 is 1048575 bytes, and the least is 1 MiB"), (2**63, "is more bytes than can be counted"),
    ("12kB", "budget='12kB' is 12000 bytes, and the least is 1 MiB"), ("0GiB", "is 0 bytes, and the least"),
    ("0.001%", "is 687194 bytes, and the least"), (1e-9, "budget=1e-09 is 68 bytes, and the least"), ("9999999999TiB", "more bytes than can be counted"),
    ("-5GiB", "budget='-5GiB' is negative"), ("-5%", "budget='-5%' is negative"), ("-5", "budget='-5' is negative"),
    ("40", "budget='40' has no unit: '40GiB' or '40%'?"), ("0.8", "'0.8GiB' or '80%'?"),
    ("0%", "budget='0%' is not a share"), ("101%", "budget='101%' is not a share of the device: above 0% and up to 100% is"),
    ("12 bananas", "budget='12 bananas' is not understood"), ("GiB", "budget='GiB' is not understood"), ("", "budget='' is not understood"),
    ("%", "budget='%' is not"), ("40G", "'40G' is not"), ("40Gib it", "is not understood"), ("1e3MiB", "is not understood"),
    ("1_000MiB", "is not understood"), ("1,5GiB", "is not understood"), ("nan%", "is not understood"), ("infGiB", "is not understood"),
    ("None", "is not understood"), ("٤GiB", "is not understood"), ("9" * 5000 + "GiB", "is not understood"), ("40GiB\n40GiB", "is not understood"),
    (1.0, "budget=1.0 may mean all of the device or one byte: say '100%'"), (0.0, "budget=0.0 is a float, which is a share"),
    (40.0, "budget=40.0 is a float, which is a share of the device in (0, 1); did you mean '40GiB' or '40%'?"),
    (4e10, "bytes are an int, 40000000000"), (-0.5, "budget=-0.5 is negative"), (float("nan"), "budget=nan is not a number"),
    (float("inf"), "budget=inf is not a number"), (float("-inf"), "budget=-inf is not a number")], ids=lambda value: repr(value)[:40])
def test_a_bad_value_is_a_value_error_that_names_it_and_what_works(said, words):
    with pytest.raises(ValueError) as raised:
        parse(said, TOTAL, AUTO)
    assert words in str(raised.value) and repr(said) in str(raised.value) and budget.FORMS in str(raised.value)


@pytest.mark.parametrize("said", [True, False, np.bool_(True), [40], ("40GiB",), b"40GiB", {}, object(), 1j, Decimal("0.5"),
                                  torch.tensor(2**30), nn.Linear, GIB.__add__], ids=lambda value: repr(value)[:30])
def test_another_type_is_a_type_error_that_names_it_and_what_works(said):
    with pytest.raises(TypeError) as raised:
        parse(said, TOTAL, AUTO)
    assert f"budget={said!r} is a {type(said).__name__}" in str(raised.value) and budget.FORMS in str(raised.value)


@pytest.mark.parametrize("said", ["'40GiB'", "'40GB'", "'80%'", "0.8", "'auto'", "None"])
def test_the_forms_that_errors_list_do_work(said):
    assert said in budget.FORMS
    parse(eval(said), TOTAL, AUTO)


# -- bytes to words -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n_bytes, wanted", [
    (0, "0 bytes"), (1023, "1023 bytes"), (KIB, "1.00 KiB"), (MIB, "1.00 MiB"), (40 * 10**9, "37.25 GiB"), (GIB - 1, "1.00 GiB"),
    (3 * TIB // 2, "1.50 TiB"), (5000 * TIB, "5000.00 TiB"), (-3 * MIB, "-3.00 MiB")])
def test_bytes_are_shown_in_the_largest_unit(n_bytes, wanted):
    assert format_bytes(n_bytes) == wanted


@pytest.mark.parametrize("said, wanted", [
    ("40GB", "40 GB is 37.25 GiB"), ("2000 KB", "2000 kB is 1.91 MiB"), ("1.5tb", "1.5 TB is 1.36 TiB"), ("40GiB", ""), (GIB, ""), (None, ""),
    ("80 %", f"80% of 64.00 GiB, {WHERE}"), (0.8, f"0.8 of 64.00 GiB, {WHERE}"), (1e-4, f"0.0001 of 64.00 GiB, {WHERE}"),
    (0.00002, f"2e-05 of 64.00 GiB, {WHERE}"), ("Auto", f"90% of 64.00 GiB, {WHERE}")])
def test_what_a_form_stands_for_is_explained(said, wanted):
    assert budget.explain(said, parse(said, TOTAL, AUTO), TOTAL, WHERE) == wanted


# -- what the machine has ---------------------------------------------------------------------------------------------------
def tree(root, cgroup, **limits):
    """A root directory with this proc/self/cgroup; limits: file (dots for slashes) -> what it says."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for path, text in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


V2, V1 = "0::/a/b\n", "9:name=systemd:/x\n4:memory:/a/b\n3:cpu,cpuacct:/c\n0::/\n"


@pytest.mark.parametrize("cgroup, limits, wanted", [
    (V2, {}, 1000), (V2, {"a/b/memory.max": "max\n"}, 1000), (V2, {"a/b/memory.max": "300\n"}, 300),
    (V2, {"a/b/memory.max": "max\n", "a/memory.max": "200\n"}, 200), (V2, {"a/b/memory.max": "300\n", "a/memory.max": "200\n"}, 200),
    (V2, {"memory.max": "100\n"}, 100), (V2, {"a/b/memory.max": "5000\n"}, 1000), (V2, {"a/b/memory.max": "what\n"}, 1000),
    (V2, {"c/memory.max": "50\n"}, 1000), (V2, {"a/b/memory.max": ""}, 1000), (V2, {"unified/a/memory.max": "70\n"}, 70),
    (V1, {"memory/a/b/memory.limit_in_bytes": "300\n"}, 300), (V1, {"memory/memory.limit_in_bytes": "250\n"}, 250),
    (V1, {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, 1000), (V1, {"memory/a/b/memory.max": "10\n"}, 1000),
    (V1, {"c/memory.max": "10\n"}, 1000), ("7:cpu,memory:/a\n", {"cpu,memory/a/memory.limit_in_bytes": "30\n"}, 30),
    ("0::/../b\n", {"b/memory.max": "10\n", "memory.max": "400\n"}, 400), ("0::/a:b\n", {"a:b/memory.max": "60\n"}, 60),
    ("", {"memory.max": "10\n"}, 1000), ("nonsense\n::\n", {}, 1000)], ids=str)
def test_the_machine_has_what_the_lowest_limit_above_the_process_says(tmp_path, cgroup, limits, wanted):
    assert machine_memory(tree(tmp_path, cgroup, **limits), physical_bytes=1000)[0] == wanted


def test_where_the_memory_comes_from_is_told(tmp_path, monkeypatch):
    monkeypatch.undo()
    root = tree(tmp_path, V2, **{"a/memory.max": "200"})
    assert budget.machine_memory(root, 1000) == (200, "the cgroup's memory.max")
    assert budget.machine_memory(root, 100) == (100, "the machine's memory")
    assert budget.machine_memory(tmp_path / "none", 100) == (100, "the machine's memory")


def test_a_limit_that_is_a_directory_is_no_limit(tmp_path):
    (tree(tmp_path, V2) / "sys/fs/cgroup/a/memory.max").mkdir(parents=True)
    assert machine_memory(tmp_path, 1000)[0] == 1000


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="no /proc/meminfo")
def test_this_machine_has_no_more_than_the_kernel_says(monkeypatch):
    monkeypatch.undo()
    with open("/proc/meminfo") as file:
        total_kib = int(file.readline().split()[1])
    assert MIB < machine_memory()[0] <= total_kib * KIB


# -- what the models need -----------------------------------------------------------------------------------------------------
class Weights(nn.Module):
    """n MiB of parameters."""

    def __init__(self, n=2, **how):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n * MIB // 4, **how))


def test_a_models_bytes_are_its_parameters_and_buffers():
    model = Weights()
    model.register_buffer("scale", torch.zeros(KIB, dtype=torch.bfloat16))
    model.register_buffer("temporary", torch.zeros(KIB, dtype=torch.uint8), persistent=False)
    model.register_buffer("none", None)
    assert own_bytes(model) == 2 * MIB + 2 * KIB + KIB
    assert own_bytes() == 0 and own_bytes(nn.Module()) == 0


def test_each_storage_counts_once():
    loose, tied = Language(), Language(tied=True)
    assert own_bytes(loose) - own_bytes(tied) == loose.head.weight.nbytes
    shared = Weights()
    shared.again, shared.view = nn.Parameter(shared.weight.detach()), nn.Parameter(shared.weight.detach()[3:9])
    assert own_bytes(shared) == 2 * MIB and own_bytes(shared, shared) == 2 * MIB


def test_a_view_counts_with_all_of_its_storage():
    model = nn.Module()
    model.register_buffer("row", torch.zeros(100, 10)[3])
    assert own_bytes(model) == 4000


def test_what_has_no_bytes_on_the_cpu_counts_nothing():
    assert own_bytes(Weights(device="meta")) == 0 and own_bytes(nn.LazyLinear(3)) == 0
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(100).to_sparse())
    assert own_bytes(model) == 0
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert own_bytes(Weights()) == 0


def test_wrapper_tensors_count_what_is_inside():
    inner = [torch.zeros(20), torch.zeros(30)]
    model = nn.Module()
    model.register_buffer("jagged", torch.nested.nested_tensor(inner, layout=torch.jagged))
    assert own_bytes(model) >= 50 * 4


def test_the_fixed_base_is_what_the_allocator_did_not_hand_out():
    model, mapped = Weights(2), torch.from_numpy(np.zeros(MIB, dtype=np.float32))
    model.mapped, model.tied = nn.Parameter(mapped), nn.Parameter(mapped[:4])
    foreign = {mapped.untyped_storage()._cdata}
    asked = []

    def is_counted(tensor):
        asked.append(tensor)
        return tensor.untyped_storage()._cdata not in foreign

    assert fixed_base_bytes(model, is_counted=is_counted) == 4 * MIB and len(asked) == 2
    assert fixed_base_bytes(model, model, is_counted=is_counted) == 4 * MIB
    assert fixed_base_bytes(model, is_counted=lambda tensor: True) == 0


# -- set_budget -----------------------------------------------------------------------------------------------------------------
def test_set_budget_tells_the_binary(told):
    for said in ("2GiB", 0.5, "auto", None):
        set_budget(said)
    set_budget("1GB", strict=True)
    assert told == [(2 * GIB, False, 0), (32 * GIB, False, 0), (TOTAL * 9 // 10, False, 0), (None, False, 0), (10**9, True, 0)]
    assert budget.in_force().n_bytes == 10**9 and budget.in_force().is_strict


def test_the_binary_is_told_minus_one_for_none(monkeypatch):
    class Binary:
        calls = []

        def set_budget(self, *what):
            self.calls.append(what)

    monkeypatch.undo()
    monkeypatch.setattr(budget, "C", Binary())
    budget._tell(None, False, 0)
    budget._tell(5 * MIB, True, 3)
    assert Binary.calls == [(-1, False, 0), (5 * MIB, True, 3)]


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu")], ids=str)
def test_the_cpu_is_the_device(told, device):
    set_budget("1GiB", device=device)
    assert told == [(GIB, False, 0)]


@pytest.mark.parametrize("device, error, words", [
    ("cuda", NotImplementedError, "'cuda' has no budgets yet.*only 'cpu' has"), (torch.device("cuda", 1), NotImplementedError, "'cuda:1'.*only 'cpu' has"),
    ("meta", NotImplementedError, "'meta' has no budgets yet"), ("gpu7", ValueError, "'gpu7' is not a device"), (0, TypeError, "not 0"),
    (True, TypeError, "not True"), (["cpu"], TypeError, "not \\['cpu'\\]")], ids=str)
def test_another_device_is_refused(told, device, error, words):
    with pytest.raises(error, match=words):
        set_budget("1GiB", device=device)
    assert told == []


def test_without_a_device_the_one_in_use_is_meant(told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    set_budget("1GiB")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(NotImplementedError, match="'cuda'.*only 'cpu' has"):
        set_budget("2GiB")
    set_budget("3GiB", device="cpu")
    assert ask(Weights(), "4GiB") == 4 * GIB  # its parameters are on the CPU
    assert [n_bytes for n_bytes, _, _ in told] == [GIB, 3 * GIB, 4 * GIB]


@pytest.mark.parametrize("strict", [1, None, "yes"])
def test_strict_is_true_or_false(told, strict):
    with pytest.raises(TypeError, match="strict must be True or False"):
        set_budget("1GiB", strict=strict)
    assert told == []


def test_a_bad_budget_leaves_the_one_in_force(told):
    set_budget("2GiB")
    for bad in (40, "12 bananas", True):
        with pytest.raises((ValueError, TypeError)):
            set_budget(bad)
    assert len(told) == 1 and budget.in_force().said == "2GiB"


def test_a_binary_that_refuses_leaves_the_budget_in_force(monkeypatch):
    def refuse(*what):
        raise RuntimeError("no")

    model = Weights()
    ask(model, "2GiB")
    with monkeypatch.context() as patched:
        patched.setattr(budget, "_tell", refuse)
        for change in (lambda: set_budget("1GiB"), lambda: ask(model, "3GiB"), lambda: release(model)):
            with pytest.raises(RuntimeError):
                change()
    assert budget.in_force().said == "2GiB"
    with pytest.raises(ValueError, match="two models"):
        ask(Weights(), "3GiB")


def test_where_nobody_counts_a_budget_is_an_error_and_none_is_not(told, monkeypatch):
    monkeypatch.setattr(budget, "is_counting", False)
    for change in (lambda: set_budget("1GiB"), lambda: ask(Weights(), "auto")):
        with pytest.raises(budget.Error, match="TFG_CPU_ALLOCATOR"):
            change()
    assert told == []
    set_budget(None)
    assert told == [(None, False, 0)]


def test_where_nobody_counts_a_default_is_a_warning(told, monkeypatch, caplog):
    monkeypatch.setattr(budget, "is_counting", False)
    assert ask(Weights(), "auto", is_default=True) is None
    assert told == [] and [record.levelno for record in caplog.records] == [logging.WARNING] and "TFG_CPU_ALLOCATOR" in caplog.text


def test_a_default_on_another_device_is_a_warning(told, monkeypatch, caplog):
    model = Weights()
    monkeypatch.setattr(budget, "_device_of", lambda model: "cuda")
    assert ask(model, "auto", is_default=True) is None and told == [] and "only the CPU has budgets so far" in caplog.text
    with pytest.raises(NotImplementedError, match="device 'cuda' has no budgets yet"):
        ask(model, "auto")


def test_disabled_checks_the_words_and_does_nothing(told, monkeypatch):
    monkeypatch.setattr(budget, "is_disabled", True)
    set_budget("1GiB")
    assert ask(Weights(), "1GiB") is None and told == [] and budget.in_force().n_bytes is None
    with pytest.raises(ValueError, match="bananas"):
        set_budget("12 bananas")


# -- models that ask --------------------------------------------------------------------------------------------------------------
def test_two_models_with_different_budgets_are_an_error_that_names_both(told):
    first, second = Weights(), Stack()
    ask(first, "2GiB")
    with pytest.raises(ValueError) as raised:
        ask(second, "1GB")
    for words in ("two models", "different budgets", "tfg.wrap(Weights) for 2.00 GiB ('2GiB')", "tfg.wrap(Stack) for 953.67 MiB ('1GB')",
                  "budget=2147483648", "tfg.set_budget(None)"):
        assert words in str(raised.value)
    assert told == [(2 * GIB, False, 0)] and budget.in_force().source == "tfg.wrap(Weights)"


def test_two_models_with_the_same_bytes_agree_however_they_are_said(told):
    first, second = Weights(), Weights()
    assert ask(first, "2GiB") == ask(second, 2048 * MIB) == 2 * GIB
    with pytest.raises(ValueError, match="two models"):
        ask(first, "3GiB")


def test_a_model_may_change_its_own(told):
    model = Weights()
    assert [ask(model, said) for said in ("2GiB", "1GiB", 0.5)] == [2 * GIB, GIB, 32 * GIB]
    assert [n_bytes for n_bytes, _, _ in told] == [2 * GIB, GIB, 32 * GIB]


def test_a_dead_models_claim_is_free(told):
    first, second = Weights(), Weights()
    ask(first, "2GiB")
    del first
    gc.collect()
    assert ask(second, "3GiB") == 3 * GIB and len(budget._asked) == 1


def test_a_model_is_not_kept_alive():
    model = Weights()
    model.weight.requires_grad_(False)
    ask(model, "2GiB")
    dead = torch.utils.weak.WeakTensorKeyDictionary({model.weight: 1})
    del model
    gc.collect()
    assert len(dead) == 0


def test_a_copy_of_a_model_has_asked_for_nothing():
    model = Weights()
    ask(model, "2GiB")
    assert ask(model, "3GiB") == 3 * GIB
    other = copy.deepcopy(model)
    release(other)
    assert budget.in_force().n_bytes == 3 * GIB


def test_a_direct_budget_overrules_models_and_may_lift(told):
    first, second = Weights(), Weights()
    ask(first, "2GiB")
    set_budget("5GiB")
    assert budget.in_force().n_bytes == 5 * GIB
    set_budget(None)
    assert budget.in_force().n_bytes is None
    assert ask(second, "3GiB") == 3 * GIB
    with pytest.raises(ValueError, match="two models"):
        ask(first, "2GiB")


def test_a_default_joins_the_budget_that_is_wanted(told):
    first, second, third = Weights(), Weights(), Weights()
    ask(first, "2GiB")
    assert ask(second, "auto", is_default=True) == 2 * GIB and budget.in_force().source == "tfg.wrap(Weights)"
    set_budget("5GiB", strict=True)
    assert ask(third, "auto", is_default=True) == 5 * GIB and told[-1] == (5 * GIB, True, 0)
    assert ask(first, "3GiB") == 3 * GIB  # joining claims nothing


def test_a_default_does_not_join_what_nobody_wants_any_more(told):
    first, second = Weights(), Weights()
    ask(first, "2GiB")
    del first
    gc.collect()
    assert ask(second, "auto", is_default=True) == TOTAL * 9 // 10
    assert ask(second, "4GiB") == 4 * GIB
    assert ask(second, "auto", is_default=True) == TOTAL * 9 // 10  # its own is no reason to stay


def test_release_lifts_the_budget_with_the_last_model_that_wants_one(told):
    first, second = Weights(), Weights()
    ask(first, "2GiB")
    ask(second, "2GiB")
    release(first)
    assert budget.in_force().n_bytes == 2 * GIB
    release(first)
    release(second)
    assert budget.in_force().n_bytes is None and told[-1] == (None, False, 0) and budget._asked == []
    n_told = len(told)
    release(second)
    release(Weights())
    assert len(told) == n_told


def test_release_leaves_a_direct_budget_alone():
    model = Weights()
    ask(model, "2GiB")
    set_budget("1GiB")
    release(model)
    assert budget.in_force().n_bytes == GIB


def test_asking_for_none_takes_the_claim_back():
    first, second = Weights(), Weights()
    ask(first, "2GiB")
    assert ask(first, None) is None and describe() == "budget: none on cpu (lifted by tfg.wrap(Weights))"
    assert ask(second, "3GiB") == 3 * GIB
    assert ask(first, None) == 3 * GIB


def test_a_budget_below_the_parameters_names_the_smallest_that_could_work(told):
    model = Weights(3)
    for said in ("2MiB", 2 * MIB):
        with pytest.raises(ValueError) as raised:
            ask(model, said)
        for words in (f"budget={said!r} is 2.00 MiB", "parameters and buffers of Weights, 3.00 MiB", "smallest that could work is budget=3145728"):
            assert words in str(raised.value)
    assert told == []
    assert ask(model, 3 * MIB) == 3 * MIB  # what the error named


def test_tied_weights_need_their_bytes_once(told):
    model = Weights(3)
    model.head = nn.Linear(1, 1, bias=False)
    model.head.weight = model.weight
    assert ask(model, "3MiB") == 3 * MIB


def test_all_wrapped_models_must_fit():
    first, second = Weights(3), Stack()
    ask(first, "4MiB")
    ask(second, "4MiB")
    with pytest.raises(ValueError, match="parameters and buffers of Weights and Stack"):
        set_budget("3MiB")
    third = Weights(3)
    with pytest.raises(ValueError, match="smallest that could work"):
        ask(third, "4MiB")
    with pytest.raises(ValueError, match="budget='4MiB' is 4.00 MiB, below"):
        ask(third, "auto", is_default=True)  # joins 4 MiB
    ask(third, None)  # wants none
    del first
    gc.collect()
    set_budget("4MiB")


def test_foreign_weights_are_told_as_the_base_of_any_budget(told, monkeypatch):
    monkeypatch.setattr(budget, "_is_counted", lambda tensor: False)
    first, second = Weights(2), Weights(1)
    ask(first, "1GiB")
    ask(second, None)
    set_budget("2GiB")
    release(second)
    set_budget(None)
    assert told == [(GIB, False, 2 * MIB), (GIB, False, 3 * MIB), (2 * GIB, False, 3 * MIB), (2 * GIB, False, 2 * MIB), (None, False, 0)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_has_no_budget_and_no_claims():
    model, other = Weights(), Weights()  # made here: a child's first parallel kernel may hang in OpenMP
    ask(model, "2GiB")
    with budget._lock:  # held by somebody while the fork happens
        child = os.fork()
        if child == 0:
            is_clear = budget.in_force() == budget.Budget() and not budget._asked and describe() == "budget: none on cpu"
            os._exit(0 if is_clear and ask(other, "1GiB") == GIB else 1)
    assert os.waitpid(child, 0)[1] == 0 and budget.in_force().n_bytes == 2 * GIB


# -- the line -----------------------------------------------------------------------------------------------------------------------
def test_the_line_says_what_the_budget_is_and_where_it_comes_from(caplog):
    caplog.set_level(logging.INFO, logger="tfg")
    assert describe() == "budget: none on cpu"
    model, lines = Weights(), []
    for change in (lambda: set_budget("40GB"), lambda: set_budget("2GiB", strict=True), lambda: ask(model, 0.8), lambda: ask(model, "auto"),
                   lambda: set_budget(None), lambda: set_budget(3 * GIB)):
        change()
        lines.append(describe())
    assert lines == [
        "budget: 37.25 GiB on cpu ('40GB' by tfg.set_budget; 40 GB is 37.25 GiB)",
        "budget: 2.00 GiB on cpu ('2GiB' by tfg.set_budget), strict",
        "budget: 51.20 GiB on cpu (0.8 by tfg.wrap(Weights); 0.8 of 64.00 GiB, the machine's memory)",
        "budget: 57.60 GiB on cpu ('auto' by tfg.wrap(Weights); 90% of 64.00 GiB, the machine's memory)",
        "budget: none on cpu (lifted by tfg.set_budget)",
        "budget: 3.00 GiB on cpu (3221225472 by tfg.set_budget)"]
    assert [record.getMessage() for record in caplog.records] == lines and {record.name for record in caplog.records} == {"tfg"}
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_what_is_no_news_is_not_said_again(caplog):
    caplog.set_level(logging.INFO, logger="tfg")
    model = Weights()
    ask(model, "2GiB")
    ask(model, "2GiB")
    ask(Weights(), "auto", is_default=True)
    assert len(caplog.records) == 1


def test_foreign_weights_are_in_the_line(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="tfg")
    monkeypatch.setattr(budget, "_is_counted", lambda tensor: False)
    model = Weights(2)
    ask(model, "2GiB")
    assert caplog.messages == ["budget: 2.00 GiB on cpu ('2GiB' by tfg.wrap(Weights)), 2.00 MiB of it weights that tfg did not allocate"]
