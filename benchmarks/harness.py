# SPDX-License-Identifier: BSD-3-Clause
"""harness: contenders race in one process, turn by turn, so that the machine's moods hit all alike.

Words: a *round* runs every contender once, in an order that rotates. A *sample* is process CPU time of one contender in
one round, one thread. Ratios are medians of the rounds' own ratios, not ratios of medians.
The heap is kept (tfg.demo.keep_heap) and touched first: else page faults, paid by whoever runs first, decide the race.
"""

import contextlib
import copy
import functools
import statistics
import time

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tfg
from tfg.demo import keep_heap

LINES = []  # what the terminal summary prints
HEAP_BYTES = 1 << 29


class Race:
    """Race(plain=f, tfg=g): calling it runs one round."""

    def __init__(self, **contenders):
        self.contenders = contenders
        self.samples_ns = {name: [] for name in contenders}
        self.n_rounds = 0

    def __call__(self):
        names = list(self.contenders)
        first = self.n_rounds % len(names)
        for name in names[first:] + names[:first]:
            self.samples_ns[name].append(cpu_ns(self.contenders[name]))
        self.n_rounds += 1

    def median_ns(self, name):
        return statistics.median(self.samples_ns[name])

    def ratio(self, name, against):
        return statistics.median(a / b for a, b in zip(self.samples_ns[name], self.samples_ns[against]))

    def spread(self, name, against):
        """The middle half of the rounds' ratios, as (low, high)."""
        quarters = statistics.quantiles((a / b for a, b in zip(self.samples_ns[name], self.samples_ns[against])), n=4)
        return quarters[0], quarters[2]

    def fastest(self, name, against):
        """The ratio of the fastest rounds: for differences that are smaller than what the machine adds."""
        return min(self.samples_ns[name]) / min(self.samples_ns[against])

    def added_ns(self, name, against):
        return statistics.median(a - b for a, b in zip(self.samples_ns[name], self.samples_ns[against]))


def cpu_ns(function):
    start = time.process_time_ns()
    function()
    return time.process_time_ns() - start


def run(benchmark, race, rounds, warm_up=2):
    """Run a race under pytest-benchmark; its own table then shows the rounds, the summary shows the ratios."""
    keep_heap(HEAP_BYTES)
    for _ in range(warm_up):
        race()
    for samples in race.samples_ns.values():
        samples.clear()
    benchmark.pedantic(race, rounds=rounds, iterations=1)
    benchmark.extra_info.update({f"{name}_median_ns": race.median_ns(name) for name in race.contenders})


def tell(benchmark, title, **figures):
    """Note a line of figures: in the terminal summary and in the benchmark's extra_info."""
    benchmark.extra_info.update(figures)
    LINES.append(f"{title:44s} " + "  ".join(f"{name} {figure:.3g}" for name, figure in figures.items()))


@contextlib.contextmanager
def threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------- the stock's three forms
def stock(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def reentrant(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


SAVED = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def save_matrix_products(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def selective(function, *args):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_matrix_products)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


def tfg_selective(function, *args):
    return tfg.checkpoint(function, *args, context_fn=functools.partial(create_selective_checkpoint_contexts, save_matrix_products))


def plain(function, *args):
    return function(*args)


CALLS = {"plain": plain, "tfg": tfg.checkpoint, "stock": stock, "reentrant": reentrant, "selective": selective,
         "tfg selective": tfg_selective}


def with_call(proto, call):
    """A copy of a tfg.demo.Decoder whose blocks are called through `call`."""
    model = copy.deepcopy(proto)
    model.call_block = call
    return model


def exact_peak_bytes(function):
    """The most that one call of `function` had alive above what was alive before, exact."""
    base = tfg.cpu.memory_allocated()
    tfg.cpu.reset_peak_memory_stats()
    function()
    return tfg.cpu.max_memory_allocated() - base
