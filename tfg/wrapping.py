# SPDX-License-Identifier: BSD-3-Clause
"""wrapping: tfg.wrap and tfg.unwrap. Finds a model's blocks and makes each call of one a region.

    budget="40GiB"     everything is kept until the device is full; then what is cheapest to make again is dropped first
    interval=k         segments of k blocks: only a segment's inputs are kept. Memory ~ blocks / k inputs + one segment,
                       replay about one forward whatever k is
    every_n_layers=k   one block of every k is a segment of its own, the others keep all, as in Transformers: a larger k is
                       faster and saves less
"""

from . import budget as budgets
from . import neighbours, takeover
from ._engine import is_disabled, log
from .blocks import find_stacks, n_blocks
from .interval import check_count
from .segments import DYNAMIC, BlockState, Stack
from .subclass import put_on, take_off


def wrap(model, *, budget=None, interval=None, every_n_layers=None, blocks=None, strict=False):
    """Train `model` inside the memory there is. In place; returns `model`.

    budget          a ceiling for all live tensor bytes of the device: bytes (an int, 1 MiB or more), "40GiB", "40GB" (10**9
                    bytes), "80%" or 0.8 of the device, "auto". Activations are kept until it is reached
    interval        blocks per segment, an int >= 1; above the longest stack it is clamped, with a log line
    every_n_layers  checkpoint block i, counted over the whole model, where i % every_n_layers == 0; an int >= 1
    blocks          a glob over named_modules() such as "model.layers.*", a module, or a list of both; None: found
    strict          when nothing is left to drop: True raises torch.OutOfMemoryError, False goes over and says so once

    Nothing given is budget="auto". One of interval and every_n_layers may be given, alone or with a budget, which then clamps
    it: what its segments bring back, and what other blocks keep, leaves when the device is full. "dynamic" for either
    answers it for each batch with dynamic_interval() of that batch's length, and implies budget="auto" as its clamp.
    A budget belongs to the device: see tfg.set_budget.

    Called again it reconfigures; a forward whose backward is still to come is not disturbed.
    No parameter name changes, the last block is not exempted, copies of the model are wrapped with a state of their own, and
    torch.compile sees the plain model. Blocks that FSDP manages are segments of their own, whatever the interval.
    Transformers' own switch (gradient_checkpointing_enable, Trainer, PEFT, TRL) leads here: on changes nothing but what it
    says of caches, every_n_layers leaves layers out, off means plain until it is on again.
    ValueError for a bad count, both dials, a pattern without a match, a model without blocks, a budget that is not one, is
    below the model's own parameters and buffers, or differs from what another wrapped model asked for, and where another
    library already checkpoints or offloads the blocks; TypeError for anything that is not a module.
    """
    policy, dial = _settings(interval, every_n_layers)
    if is_disabled:
        return model
    stacks = find_stacks(model, blocks)
    neighbours.check(model)
    if isinstance(dial, int):
        dial = _clamp(policy, dial, stacks)
    is_implied = budget is None and (policy == "budget" or dial == DYNAMIC)
    if budget is not None or is_implied:
        budgets.ask(model, "auto" if is_implied else budget, strict=strict, is_default=is_implied)
    else:
        budgets.release(model)
    _take_off_all(model)
    n_wrapped = _wrap_stacks(stacks, policy, dial, keeps_others=budget is not None or dial == DYNAMIC)
    takeover.take_over(model, stacks)
    log.info("wrap: %s, %s, %d regions", _describe(stacks), policy if dial is None else f"{policy}={dial}", n_wrapped)
    return model


def unwrap(model):
    """Undo wrap: every class and every __dict__ as before, and no budget that this model alone asked for. Returns `model`;
    harmless on a model that is not wrapped.

    A block that FSDP or a parametrization has subclassed since keeps its class, whose forward then passes straight through.
    """
    _take_off_all(model)
    takeover.give_back(model)
    budgets.release(model)
    return model


def _take_off_all(model):
    for module in model.modules():
        take_off(module)


def _settings(interval, every_n_layers):
    """(policy, dial): ("interval", k), ("every_n_layers", k) or ("budget", None)."""
    given = {name: k for name, k in (("interval", interval), ("every_n_layers", every_n_layers)) if k is not None}
    if not given:
        return "budget", None
    if len(given) > 1:
        raise ValueError("wrap: give interval=k (segments of k blocks) or every_n_layers=k (one block in k), not both")
    (policy, dial), = given.items()
    if isinstance(dial, str) and dial == DYNAMIC:
        return policy, dial
    return policy, check_count(f'wrap: {policy} ("{DYNAMIC}", or a count)', dial)


def _clamp(name, k, stacks):
    """k, or the number of blocks that it can reach at most: a segment ends with its stack."""
    most = max(len(stack.entries) for stack in stacks) if name == "interval" else n_blocks(stacks)
    if k > most:
        where = "the longest stack" if name == "interval" else "the model"
        log.info("wrap: %s=%d is more than the %d blocks of %s, clamped to %d", name, k, most, where, most)
    return min(k, most)


def _wrap_stacks(stacks, policy, dial, keeps_others):
    """Put a state on every block whose turn it is, or, with keeps_others, on every block; how many."""
    step = dial if policy == "every_n_layers" and not keeps_others else 1
    seen = set()
    n_wrapped, n_layers = 0, n_blocks(stacks)
    for found in stacks:
        stack = Stack(found.name, found.entries[0][0], found.entries[-1][0] + 1, n_layers)
        for _, block_name, block in found.entries:
            if id(block) in seen:
                continue
            order = len(seen)
            if order % step == 0:
                positions = tuple(p for p, _, other in found.entries if other is block)
                put_on(block, BlockState(stack, positions, order, block_name, policy, dial))
                n_wrapped += 1
            seen.add(id(block))
    return n_wrapped


def _describe(stacks):
    """'8 blocks (LlamaDecoderLayer) in 1 stack (model.layers)'."""
    classes = dict.fromkeys(type(block).__name__ for stack in stacks for _, _, block in stack.entries)
    names = ", ".join(stack.name or "the model" for stack in stacks[:4]) + (", ..." if len(stacks) > 4 else "")
    shown = ", ".join(list(classes)[:3]) + (", ..." if len(classes) > 3 else "")
    return f"{n_blocks(stacks)} blocks ({shown}) in {len(stacks)} stack{'s' if len(stacks) > 1 else ''} ({names})"
