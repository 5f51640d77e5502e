# SPDX-License-Identifier: BSD-3-Clause
"""patching: scripts that may not be edited. tfg.patch() puts tfg's checkpoint under every name that the stock's has, and back.

    with tfg.patch(): train()             # or: undo = tfg.patch(); ...; undo.undo()
    python -m tfg run train.py --args     # a script under it

A name is found in torch.utils.checkpoint and in every module that is loaded (transformers took it by name). A module that is loaded
later finds tfg's, and keeps it when the patch ends. Left alone: tfg itself and the compiler, which knows the stock function as an
object.
"""

import runpy
import sys
from pathlib import Path

import torch.utils.checkpoint as stock

from . import budget as budgets
from .checkpoint import checkpoint, checkpoint_sequential

REPLACED = {id(stock.checkpoint): checkpoint, id(stock.checkpoint_sequential): checkpoint_sequential}
LEFT_ALONE = ("tfg", "torch._dynamo", "torch._higher_order_ops", "torch._functorch", "torch._inductor")


class Patch:
    """What patch() has put in place; ends with undo(), or with the `with` block. undo() twice is harmless."""

    def __init__(self):
        self._put = []
        for name, module in list(sys.modules.items()):
            if not any(name == apart or name.startswith(apart + ".") for apart in LEFT_ALONE):
                self._replace_in(module)

    def _replace_in(self, module):
        try:
            names = list(vars(module).items())
        except TypeError:  # something that only stands for a module
            return
        for name, value in names:
            ours = REPLACED.get(id(value))
            if ours is not None:
                setattr(module, name, ours)
                self._put.append((module, name, value, ours))

    def undo(self):
        """Put the stock's functions back where they were."""
        while self._put:
            module, name, original, ours = self._put.pop()
            if getattr(module, name, None) is ours:
                setattr(module, name, original)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.undo()
        return False


def patch():
    """Replace torch.utils.checkpoint's checkpoint and checkpoint_sequential by tfg's wherever they are known. Returns a Patch."""
    return Patch()


def run_script(path, arguments, budget=None):
    """Run a Python file as __main__ with sys.argv = [path, *arguments], under patch() and, where given, a budget."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"run: {path!r} is not a file")
    if budget is not None:
        budgets.set_budget(budget)
    sys.argv[:] = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    with patch():
        runpy.run_path(path, run_name="__main__")
