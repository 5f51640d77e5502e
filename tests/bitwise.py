# SPDX-License-Identifier: BSD-3-Clause
"""bitwise: where two nested results differ, bit for bit, and the random state that has to agree as well."""

import contextlib
import os

import torch


def same_bits(a, b):
    """Whether two tensors agree in dtype, shape, layout and every bit. NaNs of the same bits are equal."""
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(*(bits(t) for t in (a, b)))


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def differences(a, b, where=""):
    """Places where two nested results differ, as strings."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if same_bits(a, b) else [f"{where}: {describe(a, b)}"]
    if isinstance(a, dict) and isinstance(b, dict):
        odd = [f"{where}[{key}]: on one side only" for key in a.keys() ^ b.keys()]
        return odd + [d for key in a if key in b for d in differences(a[key], b[key], f"{where}[{key}]")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} items and {len(b)}"]
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{where}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{where}: {str(a)[:120]} and {str(b)[:120]}"]


def describe(a, b):
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.layout != torch.strided or not a.numel():
        return f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
    gap = (a.detach().to(torch.complex128) - b.detach().to(torch.complex128)).abs().max().item()
    return f"{tuple(a.shape)} {a.dtype}, largest gap {gap:.3g}"


def copied(tensors):
    """Detached copies; None stays None."""
    return [None if t is None else t.detach().clone() for t in tensors]


@contextlib.contextmanager
def stress(drop=False, verify=False, room_bytes=None):
    """The engine's stress mode for a while, and a budget of so many bytes above what is alive; afterwards what TFG_STRESS says, as
    at import, and no budget."""
    from tfg import _C
    asked = os.environ.get("TFG_STRESS", "")
    _C.set_stress("drop" in asked or drop, "verify" in asked or verify)
    if room_bytes is not None:
        _C.set_budget(_C.live_bytes() + room_bytes, False)
    try:
        yield
    finally:
        _C.set_stress("drop" in asked, "verify" in asked)
        if room_bytes is not None:
            _C.set_budget(-1, False)
