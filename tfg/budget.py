# SPDX-License-Identifier: BSD-3-Clause
"""budget: how a budget is said, what it means in bytes, and who asked for it.

    budget   a ceiling for all live tensor bytes of one device in this process: parameters, gradients, optimizer state,
             activations. It belongs to the device, not to a model
    said     the budget in the user's words: "40GiB"; n_bytes: what that means, None for no budget
    source   who said it: "tfg.set_budget", "tfg.wrap(Language)"
    claim    what a wrapped model asked for. Claims of living models on one device agree; tfg.set_budget overrules them
    base     bytes of parameters and buffers that the counting allocator did not hand out (mmapped weights), each storage once

    "40GiB" ── parse ──> bytes ── do the claims agree? do the parameters fit? ── tell ──> the allocator

Safe to call from several threads. A forked child has no budget and no claims.
"""

import dataclasses
import itertools
import math
import numbers
import os
import re
import threading
import weakref
from fractions import Fraction
from pathlib import Path

import torch
from torch import is_grad_enabled
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._engine import C, Error, is_counting, is_disabled, log

LEAST_BYTES = 2**20
LEAST_PLAUSIBLE = 10_000  # an int below it is a number of larger units, forgotten
MOST_BYTES = 2**63 - 1
AUTO_PERCENT = 90
BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
FORMS = "forms that work: an int of bytes (1 MiB or more), '40GiB', '40GB' (10**9 bytes), '80%', 0.8 (of the device), 'auto', None"

_SIZE = re.compile(r"([+-]?)([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([kmgt]i?b|%|)", re.IGNORECASE)


# -- words to bytes -------------------------------------------------------------------------------------------------------
def parse(budget, total_bytes, auto_bytes, least_bytes=LEAST_BYTES):
    """Bytes (int, 1 MiB to 2**63 - 1) that `budget` means, rounded down; None for None.

    budget       an int of bytes; "40GiB" (2**30; KiB MiB GiB TiB), "40GB" (10**9; kB MB GB TB), a space and any case allowed;
                 "80%" in (0, 100] or a float in (0, 1), of the device; "auto"; None
    total_bytes  what "80%" and 0.8 are shares of
    auto_bytes   what "auto" is
    least_bytes  what an int may be at least

    ValueError for anything below 1 MiB (40 is 40 bytes; least_bytes for an int), for 1, 1.0 and larger floats, for negative
    numbers, nan, inf, and other words; TypeError for other types, bool too. Both name the value and what would work.
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        n_bytes = _bytes_of_text(budget, total_bytes, auto_bytes)
    elif isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise TypeError(f"budget={budget!r} is a {type(budget).__name__}; {FORMS}")
    elif isinstance(budget, numbers.Integral):
        n_bytes = int(budget)
    else:
        n_bytes = _bytes_of_share(float(budget), total_bytes)
    return _check_range(budget, n_bytes, least_bytes if _is_bare(budget) else LEAST_BYTES)


def _is_bare(budget):
    return isinstance(budget, numbers.Integral) and not isinstance(budget, bool)


def _bytes_of_text(text, total_bytes, auto_bytes):
    said = text.strip()
    if said.lower() == "auto":
        return auto_bytes
    match = _SIZE.fullmatch(said)
    if match is None:
        raise ValueError(f"budget={text!r} is not understood; {FORMS}")
    sign, number, unit = match[1], Fraction(match[2]), match[3].lower()
    if sign == "-":
        raise ValueError(f"budget={text!r} is negative; {FORMS}")
    if not unit:
        share = f"{float(100 * number):g}%" if number < 1 else said + "%"
        raise ValueError(f"budget={text!r} has no unit: {said + 'GiB'!r} or {share!r}? {FORMS}")
    if unit != "%":
        return int(number * (BINARY.get(unit) or DECIMAL[unit]))
    if not 0 < number <= 100:
        raise ValueError(f"budget={text!r} is not a share of the device: above 0% and up to 100% is; {FORMS}")
    return int(number * total_bytes / 100)


def _bytes_of_share(share, total_bytes):
    if not math.isfinite(share):
        raise ValueError(f"budget={share!r} is not a number of bytes; {FORMS}")
    if share < 0:
        raise ValueError(f"budget={share!r} is negative; {FORMS}")
    if share == 1:
        raise ValueError(f"budget=1.0 may mean all of the device or one byte: say '100%' for all of it; {FORMS}")
    if not 0 < share < 1:
        what = f"bytes are an int, {int(share)}" if share >= LEAST_BYTES else f"did you mean '{share:g}GiB' or '{share:g}%'?"
        raise ValueError(f"budget={share!r} is a float, which is a share of the device in (0, 1); {what}; {FORMS}")
    return int(Fraction(repr(share)) * total_bytes)  # as it is written: 0.8 is 80 %


def _check_range(budget, n_bytes, least_bytes):
    """n_bytes, or a ValueError that says what `budget` came to."""
    if n_bytes > MOST_BYTES:
        raise ValueError(f"budget={budget!r} is more bytes than can be counted; {FORMS}")
    if n_bytes >= least_bytes:
        return n_bytes
    is_bare = _is_bare(budget)
    if n_bytes < 0:
        hint = "is negative"
    elif is_bare and n_bytes == 0:
        hint = "is no bytes at all; None lifts the budget"
    elif is_bare and n_bytes == 1:
        hint = "is one byte; '100%' is all of the device"
    elif is_bare and n_bytes < LEAST_PLAUSIBLE:
        hint = f"is {n_bytes} bytes; '{n_bytes}GiB' is {n_bytes} GiB"
    else:
        hint = f"is {n_bytes} bytes, and the least is {least_bytes} bytes" if least_bytes < LEAST_BYTES else (
            f"is {n_bytes} bytes, and the least is 1 MiB (1048576 bytes)")
    raise ValueError(f"budget={budget!r} {hint}; {FORMS}")


def format_bytes(n_bytes):
    """'37.25 GiB', '512 bytes': two decimals of the largest binary unit that leaves 1 or more."""
    size, unit = n_bytes, "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if round(abs(size), 2) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size} bytes" if unit == "bytes" else f"{size:.2f} {unit}"


def explain(budget, n_bytes, total_bytes, where):
    """What `budget` stands for where its words alone do not say: '40 GB is 37.25 GiB', '80% of 23.54 GiB, the machine's
    memory'; '' where they do. where: what total_bytes is of."""
    if budget is None or isinstance(budget, numbers.Integral):
        return ""
    total = f"of {format_bytes(total_bytes)}, {where}"
    if not isinstance(budget, str):
        return f"{float(budget):g} {total}"
    if budget.strip().lower() == "auto":
        return f"{AUTO_PERCENT}% {total}"
    _, number, unit = _SIZE.fullmatch(budget.strip()).groups()
    if unit == "%":
        return f"{number}% {total}"
    unit = unit.lower()
    return f"{number} {'k' if unit == 'kb' else unit[0].upper()}B is {format_bytes(n_bytes)}" if unit in DECIMAL else ""


# -- what there is --------------------------------------------------------------------------------------------------------
def machine_memory(root="/", physical_bytes=None):
    """(bytes of memory that this process may have, where that comes from): the lowest limit of its cgroup and those above it,
    or the machine's memory where that is lower.

    root: the directory that proc and sys/fs/cgroup are in; physical_bytes: of the machine, None asks the system.
    """
    if physical_bytes is None:
        physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [(limit, f"the cgroup's {file.name}") for file in _limit_files(Path(root)) if (limit := _limit_in(file)) is not None]
    return min([(physical_bytes, "the machine's memory"), *limits], key=lambda limit: limit[0])


def _limit_files(root):
    """The files that may hold a memory limit of this process, v2 and v1, from its own cgroup up to the top."""
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, entry = line.partition(":")
        controllers, _, path = entry.partition(":")
        if not controllers:
            tops, name = (mounts, mounts / "unified"), "memory.max"
        elif "memory" in controllers.split(","):
            tops, name = (mounts / "memory", mounts / controllers), "memory.limit_in_bytes"
        else:
            continue
        parts = [] if ".." in path.split("/") else [part for part in path.split("/") if part]  # above a namespace: its top
        for top in dict.fromkeys(tops):
            for depth in range(len(parts), -1, -1):
                yield top.joinpath(*parts[:depth], name)


def _lines(file):
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _limit_in(file):
    """The number in `file`; None where there is none ("max", no such file)."""
    words = "".join(_lines(file)).strip()
    return int(words) if re.fullmatch("[0-9]{1,20}", words) else None


# -- what the models need -------------------------------------------------------------------------------------------------
def own_bytes(*models):
    """Bytes of the CPU storages of the models' parameters and buffers, each storage once (tied weights, shared models).

    Sharded and quantised wrappers count what is inside them. Nothing is counted for meta, uninitialised and sparse tensors.
    """
    return sum(tensor.untyped_storage().nbytes() for tensor in _storages(models).values())


def fixed_base_bytes(*models, is_counted=None):
    """As own_bytes, but only of the storages that the counting allocator did not hand out: mmapped weights, NumPy's.

    is_counted: tensor -> bool, whether it did; None asks the allocator.
    """
    is_counted = is_counted or _is_counted
    return sum(tensor.untyped_storage().nbytes() for tensor in _storages(models).values() if not is_counted(tensor))


def _storages(models):
    """{address of a CPU storage: a plain tensor on it}."""
    found = {}
    for tensor in itertools.chain.from_iterable(map(_plain_tensors, models)):
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse, opaque
            continue
        if storage.device.type == "cpu":
            found.setdefault(storage._cdata, tensor)
    return found


def _plain_tensors(model):
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if not is_lazy(tensor):
            yield from _unwrapped(tensor)


def _unwrapped(tensor):
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor names its mesh too
            yield from _unwrapped(inner)


def _is_counted(tensor):
    return C.is_counted(tensor)


# -- the budget in force, and who asked for it ----------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Budget:
    """A budget as it was asked for. n_bytes: None for none, or, of a model, for no claim · said: the user's words · source:
    who said it · why: explain()'s words · is_strict · model: weak reference to the model it was asked for, None: direct."""

    n_bytes: int | None = None
    said: object = None
    source: str = ""
    why: str = ""
    is_strict: bool = False
    model: object = None


_lock = threading.RLock()
_in_force = Budget()
_begun = _said = None  # the Budget whose first step has begun; whose first step has been spoken of
_asked = []  # a Budget per wrapped model; dead ones are passed over


def set_budget(budget, device=None, strict=False):
    """Keep all live tensor bytes of a device at or below `budget`, dropping kept activations, cheapest first, as it fills.

    budget  bytes (int, 1 MiB or more), "40GiB", "40GB" (10**9 bytes), "80%" or 0.8 of the device, "auto" (0.9 of the memory
            that the cgroup or the machine has), None: no budget
    device  "cpu" or a torch.device; None: the CPU, where CUDA is not in use
    strict  when nothing is left to drop: True raises torch.OutOfMemoryError, False goes over and says so once

    Overrules what wrapped models asked for. Changes nothing where it raises: ValueError and TypeError for a budget that is not
    one, or that is below the wrapped models' own parameters and buffers; NotImplementedError for another device than the
    CPU; tfg.Error where nobody counts (TFG_CPU_ALLOCATOR=0). Does nothing under TFG_DISABLE=1.
    """
    with _lock:
        wanted = _wanted("tfg.set_budget", None, budget, device, strict)
        if is_disabled:
            return
        _check_counting(wanted)
        models = _models()
        _check_fits(wanted, models)
        _put_in_force(wanted, models)
        _asked[:] = [dataclasses.replace(asked, n_bytes=None) for asked in _asked]


def ask(model, budget, device=None, strict=False, is_default=False):
    """set_budget on behalf of `model` (tfg.wrap's part), which is held weakly. Returns the bytes in force, None for none.

    device      None: where the model's parameters are
    is_default  the user did not say it: a budget that is in force stays, and where nobody counts, or on another device than the
                CPU, there is none, with a warning

    A model may change what it asked for; None takes it back. Raises as set_budget, and ValueError where another living model
    asked for a different number of bytes on the same device: one device has one budget. The claim ends with the model or with
    release(); the budget itself stays when the model dies, until someone asks for another.
    """
    with _lock:
        if is_default and device is None and (kind := _device_of(model)) != "cpu":
            log.warning("budget: none: the model is on '%s', and only the CPU has budgets so far", kind)
            return None
        wanted = _wanted(f"tfg.wrap({type(model).__name__})", model, budget, device, strict)
        if is_disabled:
            return None
        if is_default and not is_counting:
            log.warning("budget: none: tfg's CPU allocator is not in place (TFG_CPU_ALLOCATOR=0?), so no budget can be kept")
            return None
        _check_counting(wanted)
        models = [*_models(but=model), model]
        is_joining = is_default and _is_wished_for(model)
        if budget is None:
            acting = _left_without(model, wanted.source)
        elif is_joining:
            acting = _in_force
        else:
            acting = wanted
            _check_claims(wanted, model)
        if budget is not None:
            _check_fits(acting, models)
        _put_in_force(acting, models)
        C.count_parameters_of(list(_plain_tensors(model)))
        _enter(model, dataclasses.replace(wanted, n_bytes=None) if is_joining else wanted)
        return _in_force.n_bytes


def release(model):
    """Forget what `model` asked for (tfg.unwrap's part); lift the budget where a model set it and no other wants one.

    Harmless for a model that asked for nothing.
    """
    with _lock:
        if not any(asked.model() is model for asked in _asked):
            return
        _put_in_force(_left_without(model, f"tfg.unwrap({type(model).__name__})"), _models(but=model))
        _enter(model, None)


def in_force():
    """The Budget in force: n_bytes (None: none), said, source, is_strict."""
    return _in_force


def describe():
    """The line that says what the budget is and where it comes from:
    "budget: 37.25 GiB on cpu ('40GB' by tfg.set_budget; 40 GB is 37.25 GiB)"."""
    now = _in_force
    if now.n_bytes is None:
        return f"budget: none on cpu (lifted by {now.source})" if now.source else "budget: none on cpu"
    why = f"; {now.why}" if now.why else ""
    strict = ", strict" if now.is_strict else ""
    return f"budget: {format_bytes(now.n_bytes)} on cpu ({now.said!r} by {now.source}{why}){strict}"


def notice():
    """Called as each pass of a wrapped model begins. Says once, after the first step under a budget, whether all fitted; and
    once, when the device has gone over it, what its memory was made of."""
    global _said
    now = _in_force
    if now.n_bytes is None:
        return
    C.step_begins()
    if _said is now:
        return
    n_over, needed_bytes, words = C.over_budget()
    if n_over:
        _said = now
        log.warning("budget: gone over %s, with nothing left to drop: %s An estimate of the smallest budget that would have "
                    "done until here: %s", format_bytes(now.n_bytes), words, format_bytes(needed_bytes))
    elif _begun is now:
        _said = now
        log.info("budget: the first step fitted into %s, peak %s", format_bytes(now.n_bytes), format_bytes(C.peak_bytes()))
    else:
        _first_pass(now)


def _first_pass(now):
    global _begun
    if is_grad_enabled():
        _begun = now


def _wanted(source, model, budget, device, strict):
    """The Budget that the arguments mean; raises where they mean none."""
    _check_device(device, model)
    if not isinstance(strict, bool):
        raise TypeError(f"budget: strict must be True or False, not {strict!r}")
    total_bytes, where = machine_memory()
    n_bytes = parse(budget, total_bytes, total_bytes * AUTO_PERCENT // 100, LEAST_BYTES if model is None else _least_bytes())
    why = explain(budget, n_bytes, total_bytes, where)
    return Budget(n_bytes, budget, source, why, strict, None if model is None else weakref.ref(model))


def _least_bytes():
    """A model of a few kB may have a budget of its size: any int that is not below what is alive already."""
    return min(LEAST_BYTES, max(LEAST_PLAUSIBLE, C.live_bytes()))


def _check_device(device, model):
    """Raises unless `device`, or where None the device in use, is the CPU."""
    if device is None and model is not None:
        device = _device_of(model)
    elif device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"budget: device must be a torch.device or a str such as 'cpu', not {device!r}")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"budget: {device!r} is not a device; 'cpu' is") from None
    if kind != "cpu":
        raise NotImplementedError(f"budget: device '{device}' has no budgets yet: only 'cpu' has")


def _device_of(model):
    """The kind of device that the model's tensors are on: "cpu" where all are there, or on meta."""
    return min({tensor.device.type for tensor in _plain_tensors(model)} - {"cpu", "meta"}, default="cpu")


def _check_counting(wanted):
    if wanted.n_bytes is not None and not is_counting:
        raise Error("budget: tfg's CPU allocator is not in place (TFG_CPU_ALLOCATOR=0?), so no budget can be kept")


def _check_claims(wanted, model):
    for other in _alive():
        if other.model() is not model and other.n_bytes not in (None, wanted.n_bytes):
            raise ValueError(
                f"two models ask for different budgets on one device, cpu: {other.source} for {format_bytes(other.n_bytes)} "
                f"({other.said!r}), {wanted.source} for {format_bytes(wanted.n_bytes)} ({wanted.said!r}). One device has one "
                f"budget: give both the same (budget={other.n_bytes}), or lift the first with tfg.set_budget(None)")


def _check_fits(wanted, models):
    needed = own_bytes(*models) if wanted.n_bytes is not None else 0
    if needed and wanted.n_bytes < needed:
        names = " and ".join(dict.fromkeys(type(model).__name__ for model in models))
        raise ValueError(
            f"budget={wanted.said!r} is {format_bytes(wanted.n_bytes)}, below the parameters and buffers of {names}, "
            f"{format_bytes(needed)}: the smallest that could work is budget={max(needed, LEAST_BYTES)}, and gradients, "
            "optimizer state and activations come on top")


def _is_wished_for(model):
    """Is a budget in force that was set directly, or that a living model other than `model` wants?"""
    return _in_force.n_bytes is not None and (_in_force.model is None or _is_wanted_by_others(model))


def _left_without(model, source):
    """The Budget in force once `model` wants none: none where a model set it and no other wants one."""
    is_over = _in_force.model is not None and not _is_wanted_by_others(model)
    return Budget(source=source) if is_over else _in_force


def _is_wanted_by_others(model):
    return any(asked.said is not None for asked in _alive() if asked.model() is not model)


def _alive():
    return [asked for asked in _asked if asked.model() is not None]


def _models(but=None):
    """The living wrapped models, without `but`."""
    found = [asked.model() for asked in _asked]
    return [model for model in found if model is not None and model is not but]


def _enter(model, asked):
    """Note what `model` asked for; None: nothing any more."""
    kept = [other for other in _alive() if other.model() is not model]
    _asked[:] = kept if asked is None else [*kept, asked]


def _put_in_force(wanted, models):
    """Tell the allocator, then remember, then say so where it is news."""
    global _in_force
    base_bytes = fixed_base_bytes(*models) if wanted.n_bytes is not None else 0
    _tell(wanted.n_bytes, wanted.is_strict, base_bytes)
    before, _in_force = describe(), wanted
    if describe() != before:
        log.info("%s%s", describe(), f", {format_bytes(base_bytes)} of it weights that tfg did not allocate" if base_bytes else "")


def _tell(n_bytes, is_strict, base_bytes):
    """The one call into the binary. n_bytes: None for no budget."""
    C.set_budget(-1 if n_bytes is None else n_bytes, is_strict, base_bytes)


def _forget():
    """As after import. The allocator is not told: a forked child's has no budget either."""
    global _in_force, _begun, _said, _lock
    _lock, _in_force, _begun, _said = threading.RLock(), Budget(), None, None
    _asked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
