# SPDX-License-Identifier: BSD-3-Clause
"""wrapping: tfg.wrap and tfg.unwrap. Finds a model's blocks and makes each call of one a region.

    interval=k         segments of k blocks: only a segment's inputs are kept. Memory ~ blocks / k inputs + one segment,
                       replay about one forward whatever k is
    every_n_layers=k   one block of every k is a segment of its own, the others keep all, as in Transformers: a larger k is
                       faster and saves less
"""

from ._engine import is_disabled, log
from .blocks import find_stacks, n_blocks
from .interval import check_count
from .segments import BlockState, Stack
from .subclass import put_on, take_off


def wrap(model, *, interval=None, every_n_layers=None, blocks=None, budget=None):
    """Train `model` with its blocks' activations dropped and replayed. In place; returns `model`.

    interval        blocks per segment, an int >= 1; above the longest stack it is clamped, with a log line
    every_n_layers  checkpoint block i, counted over the whole model, where i % every_n_layers == 0; an int >= 1
    blocks          a glob over named_modules() such as "model.layers.*", a module, or a list of both; None: found

    Exactly one of the first two. Called again it reconfigures; a forward whose backward is still to come is not disturbed.
    No parameter name changes, the last block is not exempted, copies of the model are wrapped with a state of their own, and
    torch.compile sees the plain model. Transformers' own gradient checkpointing is off in wrapped blocks. Blocks that FSDP
    manages are segments of their own, whatever the interval.
    ValueError for a bad count, both or neither, a pattern without a match and a model without blocks; TypeError for anything
    that is not a module; NotImplementedError for budget= and "dynamic".
    """
    name, k = _settings(interval, every_n_layers, budget)
    if is_disabled:
        return model
    stacks = find_stacks(model, blocks)
    k = _clamp(name, k, stacks)
    unwrap(model)
    n_wrapped = _wrap_stacks(stacks, name, k)
    log.info("wrap: %s, %s=%d, %d regions", _describe(stacks), name, k, n_wrapped)
    return model


def unwrap(model):
    """Undo wrap: every class and every __dict__ as before. Returns `model`; harmless on a model that is not wrapped.

    A block that FSDP or a parametrization has subclassed since keeps its class, whose forward then passes straight through.
    """
    for module in model.modules():
        take_off(module)
    return model


def _settings(interval, every_n_layers, budget):
    """("interval" or "every_n_layers", k)."""
    if budget is not None:
        raise NotImplementedError("wrap: budget= is not supported yet; part 2 of the work brings it")
    given = {name: k for name, k in (("interval", interval), ("every_n_layers", every_n_layers)) if k is not None}
    if len(given) != 1:
        what = "not both" if given else 'one of them (budget="auto", the default to be, comes with part 2 of the work)'
        raise ValueError(f"wrap: give interval=k (segments of k blocks) or every_n_layers=k (one block in k), {what}")
    (name, k), = given.items()
    if isinstance(k, str) and k == "dynamic":
        raise NotImplementedError(f'wrap: {name}="dynamic" is not supported yet; part 2 of the work brings it')
    return name, check_count(f"wrap: {name}", k)


def _clamp(name, k, stacks):
    """k, or the number of blocks that it can reach at most: a segment ends with its stack."""
    most = max(len(stack.entries) for stack in stacks) if name == "interval" else n_blocks(stacks)
    if k > most:
        where = "the longest stack" if name == "interval" else "the model"
        log.info("wrap: %s=%d is more than the %d blocks of %s, clamped to %d", name, k, most, where, most)
    return min(k, most)


def _wrap_stacks(stacks, name, k):
    """Put a state on every block whose turn it is; how many."""
    step, interval = (1, k) if name == "interval" else (k, 1)
    seen = set()
    n_wrapped = 0
    for found in stacks:
        stack = Stack(found.name, found.entries[-1][0] + 1, interval)
        for position, block_name, block in found.entries:
            if id(block) in seen:
                continue
            if len(seen) % step == 0:
                positions = tuple(p for p, _, other in found.entries if other is block)
                put_on(block, BlockState(stack, positions, block_name, f"{name}={k}"))
                n_wrapped += 1
            seen.add(id(block))
    return n_wrapped


def _describe(stacks):
    """'8 blocks (LlamaDecoderLayer) in 1 stack (model.layers)'."""
    classes = dict.fromkeys(type(block).__name__ for stack in stacks for _, _, block in stack.entries)
    names = ", ".join(stack.name or "the model" for stack in stacks[:4]) + (", ..." if len(stacks) > 4 else "")
    shown = ", ".join(list(classes)[:3]) + (", ..." if len(classes) > 3 else "")
    return f"{n_blocks(stacks)} blocks ({shown}) in {len(stacks)} stack{'s' if len(stacks) > 1 else ''} ({names})"
