# SPDX-License-Identifier: BSD-3-Clause
"""cpu: torch.cuda's memory counters for CPU tensors. Bytes of tensor storages allocated since tfg was imported, exact.

All zero where TFG_CPU_ALLOCATOR=0 or TFG_DISABLE=1: then nobody counts.
"""

from ._engine import C, Error, is_counting, is_disabled


def memory_allocated():
    """Bytes of CPU tensor storages alive now."""
    return C.live_bytes()


def max_memory_allocated():
    """The most bytes that were alive at once since the last reset_peak_memory_stats() (or import)."""
    return C.peak_bytes()


def reset_peak_memory_stats():
    """Let the peak start again from what is alive now."""
    C.reset_peak()


def set_memory_limit(n_bytes):
    """Refuse allocations that would bring the live bytes above `n_bytes`; None lifts the limit.

    Above it torch.OutOfMemoryError is raised with the bytes wanted, live and allowed. Forked children have no limit.
    TypeError for anything but an int or None, ValueError below 0, tfg.Error where nobody counts.
    """
    if n_bytes is not None and (not isinstance(n_bytes, int) or isinstance(n_bytes, bool)):
        raise TypeError(f"set_memory_limit: a number of bytes (int) or None is needed, not {n_bytes!r}")
    if n_bytes is not None and n_bytes < 0:
        raise ValueError(f"set_memory_limit: bytes must be 0 or more, not {n_bytes}")
    if not is_counting and not is_disabled and n_bytes is not None:
        raise Error("set_memory_limit: tfg's CPU allocator is not in place (TFG_CPU_ALLOCATOR=0?), so no limit can be kept")
    C.set_limit(-1 if n_bytes is None else min(n_bytes, 2**63 - 1))
