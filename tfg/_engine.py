# SPDX-License-Identifier: BSD-3-Clause
"""engine: loads the binary once, as the environment asks, and hands it to the rest of the package as `C`.

`C` is the private module `tfg._C`, or `tfg._disabled` where TFG_DISABLE=1 (the binary is then never loaded).
"""

import logging
import os

import torch

log = logging.getLogger("tfg")
is_disabled = os.environ.get("TFG_DISABLE", "0") not in ("", "0")

if is_disabled:
    from . import _disabled as C
else:
    from ._binary import load

    C = load()

Error = C.Error


def _stress_modes(text):
    """The set of modes named in `text`, a comma list. ValueError for a word that is not one."""
    words = {word.strip() for word in text.split(",")} - {""}
    if unknown := words - {"drop", "verify"}:
        raise ValueError(f"TFG_STRESS: 'drop' or 'verify' or both with a comma, not {sorted(unknown)[0]!r}")
    return words


def _set_up():
    """Obey TFG_STRESS and TFG_CPU_ALLOCATOR; True where tfg's allocator counts CPU memory."""
    modes = _stress_modes(os.environ.get("TFG_STRESS", ""))
    if modes:
        C.set_stress("drop" in modes, "verify" in modes)
    return os.environ.get("TFG_CPU_ALLOCATOR", "1") != "0" and bool(C.install_allocator())


is_counting = _set_up()


def mutated(tensor):
    """Say that `tensor`'s bytes were written in a way that torch cannot see (a raw kernel, ctypes, DLPack).

    What was made from the old bytes is then kept, never replayed. TypeError for anything but a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"mutated: a tensor is needed, not {tensor!r}")
    C.mutated(tensor)
