# SPDX-License-Identifier: BSD-3-Clause
"""blocks: which modules of a model are its blocks, and how they stand in stacks.

    block   a module whose call is one region
    stack   the blocks under one parent (a ModuleList, mostly); position counts the parent's children

Found in this order: what `blocks=` names; the classes that Transformers calls `_no_split_modules`, where they stand in a
container; every outermost container (ModuleList, Sequential, ModuleDict) of two or more entries, mixed classes allowed;
a ModuleList of one (ALBERT calls the same layer again and again). Never below a match.
"""

import dataclasses
import fnmatch

import torch
from torch import nn

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclasses.dataclass
class FoundStack:
    """name: the parent's; entries: (position under the parent, full name, module), a shared module once per position."""

    name: str
    entries: list


def find_stacks(model, blocks=None):
    """The stacks of `model` in module order, each with at least one block.

    blocks: None, a glob over named_modules() such as "model.layers.*" ('*' stays within one dot), a module, or a list of
    both. TypeError for anything else; ValueError for a pattern or module that is not in the model, for a module that cannot
    be a block, and for a model without blocks.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a torch.nn.Module is needed, not {model!r}")
    if blocks is not None:
        found = _named(model, blocks)
    else:
        found = _by_class(model) or _by_container(model, 2) or _by_container(model, 1)
    if not found:
        raise ValueError(f"{type(model).__name__} has no repeated blocks that tfg can find (no ModuleList, Sequential or "
                         'ModuleDict of two or more modules). Name them: blocks="path.to.layers.*", or a list of such '
                         "patterns or of modules")
    for name, module in found:
        _check_block(name, module)
    return _group(model, found)


def n_blocks(stacks):
    """Different blocks in `stacks`; a shared one counts once."""
    return len({id(module) for stack in stacks for _, _, module in stack.entries})


def _is_callable(module):
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _check_block(name, module):
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"blocks: {name!r} is a torch.jit.ScriptModule, which tfg cannot wrap")
    if not _is_callable(module):
        hint = f"; did you mean {name + '.*'!r}?" if isinstance(module, CONTAINERS) else ""
        raise ValueError(f"blocks: {name!r} is a {type(module).__name__}, which has no forward{hint}")


def _children(module, name):
    for child_name, child in module._modules.items():
        if child is not None:
            yield (f"{name}.{child_name}" if name else child_name), child


# -- by class -------------------------------------------------------------------------------------------------------------
def _by_class(model):
    """Transformers' own blocks: classes named in `_no_split_modules`, as entries of a container."""
    names = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    found = []
    if names:
        _collect_class(model, "", names, found)
    return _lifted(model, found)


def _lifted(model, found):
    """Layers in stages are two containers deep. What stands deeper is a piece of a layer (ResNet names its convolutions) and
    gives way to the layer: the second container's entry."""
    modules = dict(model.named_modules(remove_duplicate=False))
    lifted = {}
    for name, _ in found:
        parts = name.split(".")
        prefixes = [".".join(parts[:depth]) for depth in range(len(parts))]
        depths = [depth for depth, prefix in enumerate(prefixes) if isinstance(modules[prefix], CONTAINERS)]
        if len(depths) > 2:
            name = ".".join(parts[: depths[1] + 1])
        lifted[name] = modules[name]
    return list(lifted.items())


def _collect_class(module, name, names, found):
    for child_name, child in _children(module, name):
        is_match = any(cls.__name__ in names for cls in type(child).__mro__)
        if is_match and isinstance(module, CONTAINERS):
            found.append((child_name, child))
        elif not is_match:
            _collect_class(child, child_name, names, found)


# -- by container ---------------------------------------------------------------------------------------------------------
def _by_container(model, least):
    found = []
    _collect_container(model, "", least, found)
    return found


def _collect_container(module, name, least, found):
    """Entries of the outermost containers with `least` entries; with 1, of a ModuleList only."""
    kinds = CONTAINERS if least > 1 else nn.ModuleList
    children = list(_children(module, name))
    is_stack = isinstance(module, kinds) and len(children) >= least
    for child_name, child in children:
        if is_stack and _is_callable(child):
            found.append((child_name, child))
        else:
            _collect_container(child, child_name, least, found)


# -- by name --------------------------------------------------------------------------------------------------------------
def _named(model, blocks):
    wanted = list(blocks) if isinstance(blocks, (list, tuple)) else [blocks]
    everything = list(model.named_modules(remove_duplicate=False))
    chosen = set()
    for want in wanted:
        chosen.update(_matches(want, everything))
    names = [name for name, _ in everything if name in chosen]
    by_name = dict(everything)
    return [(name, by_name[name]) for name in names if not _is_below(name, chosen)]


def _matches(want, everything):
    if isinstance(want, nn.Module):
        names = [name for name, module in everything if module is want]
        what = f"the given {type(want).__name__}"
    elif isinstance(want, str):
        names = [name for name, _ in everything if _matches_glob(name, want)]
        what = f"{want!r}"
    else:
        raise TypeError(f"blocks: patterns (str) and modules are understood, not {want!r}")
    if not names:
        raise ValueError(f"blocks: {what} matches no module of this model")
    return names


def _matches_glob(name, pattern):
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _is_below(name, chosen):
    parts = name.split(".")
    return name != "" and ("" in chosen or any(".".join(parts[:n]) in chosen for n in range(1, len(parts))))


# -- stacks ---------------------------------------------------------------------------------------------------------------
def _group(model, found):
    stacks = {}
    for name, module in found:
        parent_name, _, child_name = name.rpartition(".")
        siblings = list(model.get_submodule(parent_name)._modules)
        position = siblings.index(child_name) if child_name in siblings else 0  # the model itself has no parent
        stacks.setdefault(parent_name, FoundStack(parent_name, [])).entries.append((position, name, module))
    return list(stacks.values())
