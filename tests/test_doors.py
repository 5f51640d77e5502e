# SPDX-License-Identifier: BSD-3-Clause
"""The law of doors: which room may include what, where files live and what they are called. Reads text; needs no torch.

    core   core and a few plain C headers        cpu   core's public types, itself, the same C headers
    torch  everything, but nobody's sources      cuda  as cpu, and the CUDA runtime
    tfg/   Python
"""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".c", ".h", ".cpp", ".cu"})

PLAIN_C = {"stdint.h", "stddef.h", "stdbool.h", "string.h", "math.h"}
# vsnprintf into the error's buffer; nothing is read or printed.
FORMATTING = {"core/status.c": {"stdarg.h", "stdio.h"}}
# What the loops and the kernels may know of the core: values and small functions, none of its structures.
PUBLIC_TYPES = {"core/status.h", "core/floats.h", "core/clip.h", "core/digest.h", "core/staging.h"}
# Inside core includes point one way, from a higher floor to a lower one.
FLOORS = {"status": 0, "interval": 1, "tape": 1, "ledger": 1, "putback": 1, "cut": 1, "chain": 1,
          "floats": 1, "digest": 1, "staging": 1, "closure": 2, "keep": 2, "plan": 2, "clip": 2}


def includes(text):
    """[(is_system, name)] of every #include in `text`."""
    found = re.findall(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', text, re.MULTILINE)
    return [(bracket == "<", name) for bracket, name in found]


def inside(place, name):
    """Where a quoted include of the file `place` ("core/tape.c") leads, as a path inside csrc; None: nowhere."""
    beside, absolute = CSRC / Path(place).parent / name, CSRC / name
    target = beside if beside.exists() else absolute
    return target.resolve().relative_to(CSRC).as_posix() if target.exists() else None


def complaint(place, is_system, name):
    """What is wrong with this include, or None."""
    room = place.split("/")[0]
    if is_system:
        allowed = room == "torch" or name in PLAIN_C | FORMATTING.get(place, set())
        allowed |= room == "cuda" and name.startswith(("cuda", "cub/"))
        return None if allowed else f"{place} may not include <{name}>"
    target = inside(place, name)
    if target is None:
        return f'{place}: "{name}" is not a file of csrc'
    if not target.endswith(".h"):
        return f'{place} includes a source: "{name}"'
    if room == "core":
        if not target.startswith("core/"):
            return f"{place}: core knows nobody, not {target}"
        here, there = Path(place).stem, Path(target).stem
        if here != there and FLOORS[here] <= FLOORS[there]:
            return f"{place}: {there} is not below {here}"
    if room in {"cpu", "cuda"} and not target.startswith(f"{room}/") and target not in PUBLIC_TYPES:
        return f"{place}: of other rooms {room} may include core's public types only, not {target}"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CSRC).as_posix())
def test_includes_keep_the_law_of_doors(path):
    place = path.relative_to(CSRC).as_posix()
    found = includes(path.read_text(encoding="utf-8"))
    assert [words for include in found if (words := complaint(place, *include))] == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("core/tape.c", "#include <torch/torch.h>"),
        ("core/tape.c", "#include <stdlib.h>"),
        ("core/tape.c", "# include <stdio.h>"),
        ("core/tape.h", '#include "closure.h"'),
        ("core/tape.c", '#include "cpu/fingerprint.h"'),
        ("cpu/fingerprint.c", '#include "core/tape.h"'),
        ("cpu/fingerprint.c", "#include <ATen/ATen.h>"),
        ("torch/module.cpp", '#include "core/status.c"'),
        ("torch/module.cpp", '#include "core/nowhere.h"'),
    ],
)
def test_a_forbidden_include_is_found(place, line):
    [include] = includes(f"/* */\n  {line}\n")
    assert complaint(place, *include)


def test_sources_are_found():
    assert {path.parent.name for path in FILES} >= {"core", "cpu", "torch"}


def test_file_names_are_unique():
    names = Counter(path.name for path in FILES)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_is_called_after_nothing():
    everything = [*FILES, *(ROOT / "tfg").rglob("*.py"), *(ROOT / "tests").rglob("*.*")]
    assert [str(path) for path in everything if path.stem in {"utils", "common", "misc", "helpers"}] == []


def test_setup_lists_every_source():
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    listed = set(re.findall(r'"(\w+)"|csrc/cpu/(\w+)\.c', text))
    words = {word for pair in listed for word in pair if word}
    sources = [path for path in FILES if path.suffix != ".h"]
    assert [path.name for path in sources if path.stem not in words] == []
