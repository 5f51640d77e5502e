# SPDX-License-Identifier: BSD-3-Clause
"""rerun log: debug=True. The operators of both runs of a function, with the Python that called them, told when the runs differ."""

import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointError

_MAX_FRAMES = 24


class _Listening(TorchDispatchMode):
    """Notes each operator: its line, and the stack that led to it."""

    def __init__(self):
        super().__init__()
        self.lines, self.stacks = [], []

    def __enter__(self):
        self.lines, self.stacks = [], []  # of the latest run only
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = op(*args, **(kwargs or {}))
        self.lines.append(f"{_shown(results)} = {op}({', '.join(_arguments(args, kwargs or {}))})")
        self.stacks.append(traceback.extract_stack(limit=_MAX_FRAMES)[:-1])
        return results


def _arguments(args, kwargs):
    return [_shown(value) for value in args] + [f"{name}={_shown(value)}" for name, value in kwargs.items()]


def _shown(value):
    """Tensors as dtype[sizes]."""
    return str(tree_map_only(torch.Tensor, _Tensor, value))


class _Tensor:
    def __init__(self, tensor):
        self.text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    def __repr__(self):
        return self.text


class OperatorLogs:
    """Of one call: what the forward ran, and the latest second run."""

    def __init__(self):
        self.forward, self.recompute = _Listening(), _Listening()

    def contexts(self):
        return self.forward, self.recompute

    def explain(self, error):
        """Raise a CheckpointError with both logs, from `error`."""
        raise CheckpointError(
            "An error happened while unpacking tensors; dumping logs of latest computation. You are seeing this error because you passed "
            "`debug=True` to checkpoint, and what it ran again saved other tensors than what it ran first. Compare the two lists at the "
            "end, then look up the first operator that differs in the stacks above them.\n\n"
            f"{_with_stacks('the original forward', self.forward)}\n{_with_stacks('recomputation', self.recompute)}\n"
            f"{_list('the original forward', self.forward)}\n{_list('recomputation', self.recompute)}\n{error}"
        ) from error


def _with_stacks(name, log):
    parts = [f"== Stacks of the {len(log.lines)} operators of {name}"]
    for i, (line, stack) in enumerate(zip(log.lines, log.stacks), 1):
        parts += [f"{line}   ({i} of {len(log.lines)} in {name})", *(f"    {f.filename}:{f.lineno}:{f.name}" for f in reversed(stack)), ""]
    return "\n".join(parts)


def _list(name, log):
    return "\n".join([f"== Operators executed during {name}:", *log.lines, ""])
