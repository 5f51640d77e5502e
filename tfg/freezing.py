# SPDX-License-Identifier: BSD-3-Clause
"""freezing: tfg.freeze. Embeddings and the lowest blocks stop training.

A frozen prefix saves nothing and its backward never runs.
"""

import dataclasses

from torch import nn

from ._engine import is_disabled, log
from .blocks import find_stacks
from .interval import check_count


@dataclasses.dataclass(frozen=True)
class Frozen:
    """What freeze did.

    names         parameters that trained before and no longer do
    n_parameters  their elements · n_bytes their bytes
    embeddings    names of the embedding modules · blocks: names of the blocks, lowest first
    tied          (frozen name, other name) of weights shared with a module that was not meant: it is frozen too
    before        parameters that still train though they lie before the frozen blocks: backward runs down to them
    """

    names: tuple = ()
    n_parameters: int = 0
    n_bytes: int = 0
    embeddings: tuple = ()
    blocks: tuple = ()
    tied: tuple = ()
    before: tuple = ()

    def __str__(self):
        lines = [f"froze {self.n_parameters} parameters ({self.n_bytes / 2**20:.1f} MiB): "
                 f"{len(self.embeddings)} embeddings, {len(self.blocks)} blocks"]
        lines += [f"{other} is tied to {name} and frozen too" for name, other in self.tied]
        if self.before:
            lines.append(f"still training before the frozen blocks, so backward runs through them: {', '.join(self.before)}")
        return "; ".join(lines)


def freeze(model, fraction=None, n_layers=None, *, blocks=None):
    """Stop the training (requires_grad_(False)) of the embeddings and of the lowest blocks. Returns a Frozen.

    fraction  of the blocks, 0 < fraction <= 1, rounded down: 1/3 of 32 blocks are 10
    n_layers  number of blocks, an int from 1 to as many as there are
    blocks    how to find them, as in tfg.wrap

    Blocks are counted in module order, over all stacks (an encoder's come before its decoder's). Embeddings are the
    nn.Embedding modules outside the blocks and whatever there has "embed" in its name or class. Says, in the log too, when
    tied weights freeze the head. ValueError for a bad value, for both or neither, and as tfg.wrap where no blocks are found.
    """
    _check(fraction, n_layers)
    if is_disabled:
        log.warning("freeze: TFG_DISABLE is set, nothing was frozen")
        return Frozen()
    stacks = find_stacks(model, blocks)
    ordered = {id(block): (name, block) for stack in stacks for _, name, block in stack.entries}
    lowest = list(ordered.values())[:_how_many(fraction, n_layers, len(ordered))]
    embeddings = _embeddings(model, set(ordered))
    result = _freeze(model, lowest, embeddings)
    say = log.warning if result.tied else log.info
    say("freeze: %s", result)
    return result


def _check(fraction, n_layers):
    if (fraction is None) == (n_layers is None):
        raise ValueError(f"freeze: give fraction= or n_layers=, {'one of them' if fraction is None else 'not both'}")
    if n_layers is not None:
        check_count("freeze: n_layers", n_layers)
    elif not isinstance(fraction, (int, float)) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise ValueError(f"freeze: fraction must be a number above 0 and up to 1, not {fraction!r}")


def _how_many(fraction, n_layers, n_blocks):
    if n_layers is None:
        return int(fraction * n_blocks + 1e-9)
    if n_layers > n_blocks:
        raise ValueError(f"freeze: n_layers={n_layers}, but the model has {n_blocks} blocks")
    return n_layers


def _embeddings(model, block_ids):
    """(name, module) of the outermost embeddings outside the blocks."""
    found = []

    def walk(module, name):
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if id(child) in block_ids:
                continue
            if _is_embedding(child_name, child):
                found.append((full, child))
            else:
                walk(child, full)

    walk(model, "")
    return found


def _is_embedding(name, module):
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    is_named = "embed" in name.lower() or "embed" in type(module).__name__.lower()
    return is_named and not isinstance(module, nn.Linear) and not _has_blocks(module)


def _has_blocks(module):
    return any(isinstance(inner, nn.ModuleList) and len(inner) > 1 for inner in module.modules())


def _freeze(model, lowest, embeddings):
    modules = [module for _, module in embeddings + lowest]
    meant = {f"{name}.{inner}" if name else inner
             for name, module in embeddings + lowest for inner, _ in module.named_parameters(remove_duplicate=False)}
    every_name = _names_of(model)
    parameters = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    names = {number: next(name for name in every_name[number] if name in meant) for number in parameters}
    return Frozen(
        names=tuple(names.values()), n_parameters=sum(p.numel() for p in parameters.values()),
        n_bytes=sum(p.numel() * p.element_size() for p in parameters.values()),
        embeddings=tuple(name for name, _ in embeddings), blocks=tuple(name for name, _ in lowest),
        tied=tuple((names[number], other) for number in parameters for other in every_name[number] if other not in meant),
        before=_still_training_before(model, lowest))


def _names_of(model):
    """id(parameter) -> all its names."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _still_training_before(model, lowest):
    """Names of parameters that are registered before the first block, on the way to it, and train."""
    if not lowest:
        return ()
    before = []
    module, prefix = model, ""
    for part in lowest[0][0].split("."):
        before += [prefix + name for name, p in module._parameters.items() if p is not None and p.requires_grad]
        for name, child in module._modules.items():
            if name == part or child is None:
                break
            before += [f"{prefix}{name}.{inner}" for inner, p in child.named_parameters() if p.requires_grad]
        module, prefix = module._modules[part], f"{prefix}{part}."
    return tuple(before)
