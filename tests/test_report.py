# SPDX-License-Identifier: BSD-3-Clause
"""report: a table for people, a dict for programs, numbers that add up."""

import copy

import pytest
import torch
from small_models import Stack, batch
from torch import nn

import tfg
from tfg.reporting import COUNTS, Report, advise
from tfg.timeline import last_step


def trained_report(**how):
    model = tfg.wrap(Stack(), **how)
    for i in range(2):
        model(batch(i).requires_grad_()).sum().backward()
    return tfg.report(model)


@pytest.mark.parametrize("how", [{"interval": 1}, {"interval": 2}, {"every_n_layers": 2}], ids=str)
def test_rows_are_the_wrapped_blocks_and_count_what_ran(how):
    facts = trained_report(**how).to_dict()
    names = ["blocks.0", "blocks.2"] if "every_n_layers" in how else [f"blocks.{i}" for i in range(4)]
    assert [block["name"] for block in facts["blocks"]] == names
    for block in facts["blocks"]:
        assert block["regions"] == 2 and block["ops_taped"] > 0
        assert block["saved_bytes"] > 0 and block["dropped_bytes"] > 0 and block["ops_replayed"] > 0
        assert all(isinstance(block[count], int) for count in COUNTS)
    assert facts["total"]["replay_ns"] > 0  # a replay's time is the asking block's, its operators are their own block's
    for count in COUNTS:
        assert facts["total"][count] == sum(block[count] for block in facts["blocks"])


def test_the_dict_comes_three_ways():
    report = trained_report(interval=2)
    assert dict(report) == report.to_dict() and report["settings"] == "interval=2"
    report.to_dict()["blocks"][0]["kept_why"]["changed"] = 1
    assert "changed" not in report.to_dict()["blocks"][0]["kept_why"]


def test_the_table_has_a_line_per_block_and_lines_up():
    lines = str(trained_report(interval=2)).splitlines()
    assert lines[0] == "tfg: interval=2, 4 blocks"
    assert all(word in lines[1] for word in ("saved MiB", "kept MiB", "dropped MiB", "taped", "replayed", "replay ms", "kept why"))
    assert [line.split()[0] for line in lines[3:7]] == [f"blocks.{i}" for i in range(4)] and lines[8].startswith("total")
    assert lines[9].startswith("peak ") and lines[10].startswith("now: parameters ")


def test_the_table_shows_why_bytes_were_kept():
    block = {"name": "blocks.0", **dict.fromkeys(COUNTS, 0), "kept_bytes": 3 << 20,
             "kept_why": {"random": 1 << 20, "unknown": 2 << 20, "none": 0}}
    text = str(Report("interval=1", (block, dict(block, name="blocks.1")), {}))
    assert "random 1.00, unknown 2.00" in text and "random 2.00, unknown 4.00" in text and "none" not in text


def test_operators_are_unproven_until_their_first_replay():
    model = tfg.wrap(Stack(), interval=1)
    loss = model(batch()).sum()
    before = tfg.report(model)["total"]
    loss.backward()
    after = tfg.report(model)["total"]
    assert 0 < after["unproven"] < before["unproven"] <= before["ops_taped"]
    assert before["unproven"] - after["unproven"] <= after["ops_replayed"]
    model(batch()).sum().backward()
    assert tfg.report(model)["total"]["unproven"] == after["unproven"]


def test_a_model_that_is_not_wrapped_is_an_error_that_says_so():
    model = Stack()
    for plain in (model, tfg.unwrap(tfg.wrap(copy.deepcopy(model), interval=1))):
        with pytest.raises(tfg.Error, match="Stack is not wrapped.*tfg.wrap"):
            tfg.report(plain)


def test_a_copy_counts_for_itself():
    model = tfg.wrap(Stack(), interval=1)
    twin = copy.deepcopy(model)
    twin(batch()).sum().backward()
    assert tfg.report(twin)["total"]["regions"] == 4 and tfg.report(model)["total"]["regions"] == 0


def test_nothing_is_counted_without_grad():
    model = tfg.wrap(Stack(), interval=2)
    with torch.no_grad():
        model(batch())
    assert tfg.report(model)["total"]["ops_taped"] == 0


def test_part_of_a_model_can_be_reported():
    model = nn.ModuleDict({"a": Stack(2), "b": Stack(3)})
    tfg.wrap(model, interval=1, blocks=["a.blocks.*", "b.blocks.*"])
    assert len(tfg.report(model["b"])["blocks"]) == 3


# -- memory --------------------------------------------------------------------------------------------------------------------
def budgeted(n_steps=3):
    """A model wrapped under a budget that is none too tight, after n_steps."""
    model = tfg.wrap(Stack(), budget="1GiB")
    for i in range(n_steps):
        model(batch(i)).sum().backward()
    return model


@pytest.fixture
def no_budget_afterwards():
    yield
    tfg.set_budget(None)


def test_the_report_says_where_the_peak_was_and_what_memory_is_made_of(no_budget_afterwards):
    model = budgeted()
    tfg.cpu.reset_peak_memory_stats()
    large = torch.randn(512, 64, 8)
    model(large).sum().backward()
    memory = tfg.report(model)["memory"]
    assert memory["budget"] == 2**30 and memory["peak"]["bytes"] == tfg.cpu.max_memory_allocated()
    own = sum(p.nbytes for p in model.parameters())
    assert memory["parameters"] == memory["gradients"] == own
    assert memory["peak"]["phase"] in ("forward", "backward") and memory["peak"]["block"].startswith("blocks.")
    assert memory["peak"]["what"] and memory["peak"]["activations_kept"] > large.nbytes
    text = str(tfg.report(model))
    assert f"at: {memory['peak']['phase']} · {memory['peak']['block']}" in text and "budget: 1.00 GiB on cpu" in text


def test_advice_is_given_where_dropping_can_not_help():
    peak = {"bytes": 100 << 20, "activations_kept": 1 << 20, "phase": "outside the blocks", "what": "", "block": ""}
    memory = {"budget": None, "parameters": 10 << 20, "gradients": 10 << 20, "activations_kept": 0, "other": 0, "peak": peak}
    assert "chunked loss" in advise(memory) and "1.00 MiB" in advise(memory)
    assert "freeze" in advise(dict(memory, parameters=60 << 20))
    assert "one block's working set" in advise(dict(memory, peak=dict(peak, phase="replay", block="blocks.3")))
    assert "logits" in advise(dict(memory, peak=dict(peak, phase="backward", what="NllLossBackward0")))
    assert advise(dict(memory, peak=dict(peak, activations_kept=50 << 20))) == ""


def test_the_plot_is_a_picture_of_the_last_step(no_budget_afterwards, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    model = budgeted()
    tfg.report(model).plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[1:4] == b"PNG"


def test_the_last_whole_step_is_the_one_before_the_last_that_began():
    begin = (0, 1, 0, "step begins")
    one, two, three = ((i, i, 0, "forward") for i in (1, 2, 3))
    assert last_step([one, begin, two, begin, three]) == [begin, two]
    assert last_step([one, begin, two]) == [begin, two] and last_step([one, two]) == [one, two]
