# SPDX-License-Identifier: BSD-3-Clause
"""reporting: tfg.report. What was saved, kept, dropped and replayed, per block, since the model was wrapped; where the peak was.

    saved     bytes that autograd asked to save       kept     of these, still held when the region ended
    dropped   bytes let go at a region's end          why      reason -> bytes of what could not be dropped
    evicted   bytes let go since the budget was full  again    operators' results made more than once in one backward
    unproven  operators that can be replayed and whose first replay, which is compared with the forward, has not been needed yet
"""

import dataclasses

from . import budget as budgets
from . import timeline
from ._engine import C, Error, is_disabled
from .budget import format_bytes
from .checkpoint import known_key
from .subclass import state_of

COUNTS = ("regions", "ops_taped", "ops_replayed", "saved_bytes", "kept_bytes", "dropped_bytes", "replay_ns", "evictions",
          "evicted_bytes", "replayed_again", "unproven")


@dataclasses.dataclass(frozen=True)
class Report:
    """settings: as given to wrap, "interval=2"; "" where only tfg.checkpoint was used · blocks: a dict per block, in order ·
    memory: the device's, a dict: see memory()."""

    settings: str
    blocks: tuple
    memory: dict

    def to_dict(self):
        """{"settings", "blocks": [{"name", the COUNTS, "kept_why"}], "total": the same, summed, "memory"}.

        "memory", in bytes: "budget" (None: none), "parameters", "gradients", "activations_kept" and "other" as they are now, and
        "peak": {"bytes", "activations_kept", "phase", "what", "block"} since the peak was last reset.
        """
        blocks = [dict(block, kept_why=dict(block["kept_why"])) for block in self.blocks]
        memory = dict(self.memory, peak=dict(self.memory["peak"])) if self.memory else {}
        return {"settings": self.settings, "blocks": blocks, "total": _total(blocks), "memory": memory}

    def keys(self):
        return self.to_dict().keys()

    def __getitem__(self, key):
        return self.to_dict()[key]

    def __str__(self):
        return "\n".join([_table(self.to_dict()), *_sentences(self.to_dict())])

    def plot(self, path):
        """Draw the device's memory over the last step with the budget as a line, by kind, to `path` (.png, .svg, .pdf).

        tfg.Error before a step has run under a budget, ImportError without matplotlib.
        """
        timeline.draw(path, self.memory)


def report(model):
    """A Report: prints itself as a table; to_dict() (or dict()) for programs. tfg.Error where `model` is not wrapped.

    Modules of `model` that were given to tfg.checkpoint directly have rows too.
    """
    if is_disabled:
        return Report("disabled", (), {})
    found = [(name, module, state_of(module)) for name, module in model.named_modules()]
    rows = [_row(state.name if state else name, state.key if state else known_key(module)) for name, module, state in found
            if state or known_key(module) is not None]
    if not rows:
        raise Error(f"report: this {type(model).__name__} is not wrapped and none of its modules ran in tfg.checkpoint; "
                    "call tfg.wrap(model) first")
    return Report(next((state.label for _, _, state in found if state), ""), tuple(rows), _memory(model))


def _memory(model):
    C.count_parameters_of(list(model.parameters()))
    place = C.peak_place()
    peak = {"bytes": C.peak_bytes(), "activations_kept": place["kept_bytes"], "phase": place["phase"], "what": place["what"],
            "block": place["block"]}
    return {"budget": budgets.in_force().n_bytes, **C.make_up(), "peak": peak}


def _row(name, key):
    stats = C.stats(key)
    counts = {count: stats[count] for count in COUNTS}
    return {"name": name or "(model)", **counts, "kept_why": dict(stats["kept_why"])}


def _total(blocks):
    total = {count: sum(block[count] for block in blocks) for count in COUNTS}
    why = {}
    for block in blocks:
        for reason, n_bytes in block["kept_why"].items():
            why[reason] = why.get(reason, 0) + n_bytes
    return {**total, "kept_why": why}


# -- the table ------------------------------------------------------------------------------------------------------------
HEADER = ("block", "regions", "saved MiB", "kept MiB", "dropped MiB", "evicted MiB", "taped", "replayed", "again", "unproven", "replay ms",
          "kept why")


def _table(facts):
    rows = [HEADER, *(_cells(block["name"], block) for block in facts["blocks"]), _cells("total", facts["total"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    lines = ["  ".join(_aligned(i, cell, widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows]
    rule = "-" * max(len(line) for line in lines)
    title = f"tfg: {facts['settings'] or 'checkpoint'}, {len(facts['blocks'])} blocks"
    return "\n".join([title, lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _aligned(column, cell, width):
    return cell.ljust(width) if column in (0, len(HEADER) - 1) else cell.rjust(width)


def _cells(name, row):
    mebibytes = [f"{row[key] / 2**20:.2f}" for key in ("saved_bytes", "kept_bytes", "dropped_bytes", "evicted_bytes")]
    why = ", ".join(f"{reason} {n_bytes / 2**20:.2f}" for reason, n_bytes in sorted(row["kept_why"].items()) if n_bytes)
    return (name, str(row["regions"]), *mebibytes, str(row["ops_taped"]), str(row["ops_replayed"]),
            str(row["replayed_again"]), str(row["unproven"]), f"{row['replay_ns'] / 1e6:.1f}", why)


# -- what a person asks next -------------------------------------------------------------------------------------------------
def _sentences(facts):
    memory, total = facts["memory"], facts["total"]
    if not memory or not memory["peak"]["bytes"]:
        return []
    peak = memory["peak"]
    where = " · ".join(filter(None, (peak["phase"], peak["block"], peak["what"])))
    lines = [f"peak {format_bytes(peak['bytes'])} at: {where}; {format_bytes(peak['activations_kept'])} of it activations that could "
             "leave",
             f"now: parameters {format_bytes(memory['parameters'])}, gradients {format_bytes(memory['gradients'])}, activations "
             f"kept {format_bytes(memory['activations_kept'])}, other {format_bytes(memory['other'])}"]
    if memory["budget"] is not None:
        clamped = f"; the budget clamped {facts['settings']} {total['evictions']} times" if "=" in facts["settings"] else ""
        lines.append(f"{budgets.describe()}: {format_bytes(total['evicted_bytes'])} left in {total['evictions']} evictions, "
                     f"{total['replay_ns'] / 1e6:.1f} ms of replay{clamped}")
    if advice := advise(memory):
        lines.append(f"advice: {advice}")
    return lines


def advise(memory):
    """One line where dropping activations can not lower the peak any further, with the numbers; "" where it can."""
    peak = memory["peak"]
    if not peak["bytes"] or peak["activations_kept"] > peak["bytes"] / 10:
        return ""
    share = (f"only {format_bytes(peak['activations_kept'])} of the peak's {format_bytes(peak['bytes'])} are activations that could "
             "leave")
    fixed = memory["parameters"] + memory["gradients"]
    if fixed > peak["bytes"] / 2:
        return (f"{share}; parameters and gradients are {format_bytes(fixed)}: freeze layers (tfg.freeze), train adapters, or "
                "shard them (FSDP, ZeRO)")
    if peak["phase"] == "outside the blocks":
        return (f"{share}, and it is outside the wrapped blocks (logits and loss, or the optimizer's step): a chunked loss, or an "
                "optimizer without large temporaries")
    if peak["phase"] == "backward" and not peak["block"]:
        return f"{share}, and it is in backward before the first block ({peak['what']}: logits and loss): a chunked loss"
    return f"{share}; the rest is one block's working set: smaller batches or shorter sequences"
