# SPDX-License-Identifier: BSD-3-Clause
"""reporting: tfg.report. What was saved, kept, dropped and replayed, per block, since the model was wrapped.

    saved     bytes that autograd asked to save       kept     of these, still held when the region ended
    dropped   bytes let go                            why      reason -> bytes of what could not be dropped
"""

import dataclasses

from ._engine import C, Error, is_disabled
from .checkpoint import known_key
from .subclass import state_of

COUNTS = ("regions", "ops_taped", "ops_replayed", "saved_bytes", "kept_bytes", "dropped_bytes", "replay_ns")


@dataclasses.dataclass(frozen=True)
class Report:
    """settings: as given to wrap, "interval=2"; "" where only tfg.checkpoint was used · blocks: a dict per block, in order."""

    settings: str
    blocks: tuple

    def to_dict(self):
        """{"settings", "blocks": [{"name", the COUNTS, "unproven", "kept_why"}], "total": the same, summed}."""
        blocks = [dict(block, kept_why=dict(block["kept_why"])) for block in self.blocks]
        return {"settings": self.settings, "blocks": blocks, "total": _total(blocks)}

    def keys(self):
        return self.to_dict().keys()

    def __getitem__(self, key):
        return self.to_dict()[key]

    def __str__(self):
        return _table(self.to_dict())


def report(model):
    """A Report: prints itself as a table; to_dict() (or dict()) for programs. tfg.Error where `model` is not wrapped.

    Modules of `model` that were given to tfg.checkpoint directly have rows too.
    """
    if is_disabled:
        return Report("disabled", ())
    found = [(name, module, state_of(module)) for name, module in model.named_modules()]
    rows = [_row(state.name if state else name, state.key if state else known_key(module)) for name, module, state in found
            if state or known_key(module) is not None]
    if not rows:
        raise Error(f"report: this {type(model).__name__} is not wrapped and none of its modules ran in tfg.checkpoint; "
                    "call tfg.wrap(model, interval=1) first")
    return Report(next((state.label for _, _, state in found if state), ""), tuple(rows))


def _row(name, key):
    stats = C.stats(key)
    counts = {count: stats[count] for count in COUNTS}
    return {"name": name or "(model)", **counts, "unproven": stats.get("unproven", 0), "kept_why": dict(stats["kept_why"])}


def _total(blocks):
    total = {count: sum(block[count] for block in blocks) for count in (*COUNTS, "unproven")}
    why = {}
    for block in blocks:
        for reason, n_bytes in block["kept_why"].items():
            why[reason] = why.get(reason, 0) + n_bytes
    return {**total, "kept_why": why}


# -- the table ------------------------------------------------------------------------------------------------------------
HEADER = ("block", "regions", "saved MiB", "kept MiB", "dropped MiB", "taped", "replayed", "replay ms", "kept why")


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
    mebibytes = [f"{row[key] / 2**20:.2f}" for key in ("saved_bytes", "kept_bytes", "dropped_bytes")]
    why = ", ".join(f"{reason} {n_bytes / 2**20:.2f}" for reason, n_bytes in sorted(row["kept_why"].items()) if n_bytes)
    unproven = f"{row['unproven']} unproven" if row["unproven"] else ""
    return (name, str(row["regions"]), *mebibytes, str(row["ops_taped"]), str(row["ops_replayed"]),
            f"{row['replay_ns'] / 1e6:.1f}", "; ".join(filter(None, (why, unproven))))
