# SPDX-License-Identifier: BSD-3-Clause
"""The door to the compiled half: refuses, in one line, a binary that cannot work with the torch that is here.

Between torch minors there is no common binary interface: loading the wrong one ends in a linker dump or worse. So
versions are compared before the binary is touched. Imports nothing at the top but the standard library: the build
reads the supported range from here.
"""

import importlib
import importlib.util
import re
from pathlib import Path

TORCH_MIN = (2, 13)
TORCH_BELOW = (2, 16)
TORCH_WANTED = ">={}.{},<{}.{}".format(*TORCH_MIN, *TORCH_BELOW)
REINSTALL = "pip install --force-reinstall --no-deps ."


def minor(version):
    """(2, 13) of "2.13.0+cpu"."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise ValueError(f"not a torch version: {version!r}")
    return int(numbers[1]), int(numbers[2])


def unsupported(found):
    """The line to say when tfg does not work with torch `found`, or None."""
    if minor(found) < TORCH_MIN:
        return f"tfg: found torch {found}, which is too old: torch{TORCH_WANTED} is needed"
    if minor(found) >= TORCH_BELOW:
        return f"tfg: found torch {found}, which is too new: torch{TORCH_WANTED} is needed"
    return None


def mismatch(found, built):
    """The line to say when a binary built for torch `built` must not be loaded under torch `found`, or None."""
    if built is None:
        return (
            f"tfg: no binary in {Path(__file__).parent}: in a checkout, build it in place with `pip install -e .`, "
            "or `pip install .` and start Python elsewhere"
        )
    if minor(found) != minor(built):
        return f"tfg: its binary was built for torch {built}, found torch {found}: reinstall with `{REINSTALL}`"
    return None


def built_torch():
    """Version of the torch that the binary beside this file was built against; None when there is no binary."""
    if importlib.util.find_spec("tfg._C") is None:
        return None
    try:
        return importlib.import_module("tfg._built").TORCH
    except ModuleNotFoundError:
        return None


def load():
    """Imports tfg._C and returns it. ImportError with one clear line when that cannot work."""
    try:
        import torch
    except ModuleNotFoundError as absent:
        if absent.name != "torch":
            raise
        raise ImportError(f"tfg: no torch is installed: pip install 'torch{TORCH_WANTED}'") from None
    found, built = str(torch.__version__), built_torch()
    complaint = unsupported(found) or mismatch(found, built)
    if complaint:
        raise ImportError(complaint)
    try:
        return importlib.import_module("tfg._C")
    except ImportError as broken:
        if str(broken).startswith("tfg"):  # the binary's own words, not the linker's
            raise
        line = f"tfg: its binary, built for torch {built}, does not load under torch {found}"
        raise ImportError(f"{line}: reinstall with `{REINSTALL}`") from broken
