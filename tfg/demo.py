# SPDX-License-Identifier: BSD-3-Clause
"""The demo: one small decoder, real text, the same steps three times: plain, stock checkpoint, tfg.

Words: a *contender* is one of the three, with its own copy of the weights and its own optimizer. They take turns, step
by step, in one process, so that all meet the same machine. B batch, T tokens, D hidden size, H heads.
Law: losses and final weights of the three are equal to the last bit, else the exit code is 1.
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import logging
import math
import random
import sys
import threading
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import tfg

VOCABULARY = 256  # bytes
MIB = 2.0**20


# ---------------------------------------------------------------------------------------------------- the model
class Attention(nn.Module):
    def __init__(self, hidden, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x):  # [B, T, D]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, D / H]
        cos, sin = rotary(x.shape[1], q.shape[-1], x.device)
        h = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, hidden, n_heads, dropout=0.0):
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(hidden), Attention(hidden, n_heads)
        self.norm_2, self.mlp = nn.RMSNorm(hidden), Mlp(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm_1(x)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


def call(block, x):
    return block(x)


class Decoder(nn.Module):
    """A Llama-like decoder over bytes. `call_block(block, x)` is where the stock checkpoint is put in."""

    def __init__(self, n_blocks=8, hidden=192, n_heads=None, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden, n_heads or max(1, hidden // 64), dropout) for _ in range(n_blocks))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        self.call_block = call

    def forward(self, ids, labels):  # [B, T]
        x = self.embed(ids)
        for block in self.blocks:
            x = self.call_block(block, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


@functools.lru_cache(maxsize=16)
def rotary(length, width, device):
    angles = torch.outer(torch.arange(length, device=device), 1e4 ** -(torch.arange(0, width, 2, device=device) / width))
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


# ---------------------------------------------------------------------------------------------------- the text
def corpus():
    """Text that every Python carries: the language's help topics and some of the library's sources."""
    import inspect
    import typing
    from pydoc_data.topics import topics
    modules = (typing, inspect, logging, random, threading, dataclasses)
    texts = [*topics.values(), *map(inspect.getsource, modules)]
    return torch.frombuffer(bytearray("\n\n".join(texts).encode()), dtype=torch.uint8)


def batches(text, n_steps, n_sequences, max_length, seed):
    """Batches of mixed lengths, each a pair (ids, labels); the first is the longest."""
    rng = random.Random(seed)
    lengths = [max_length] + [rng.randrange(128, max_length + 1, 32) for _ in range(n_steps - 1)]
    for length in lengths:
        starts = [rng.randrange(len(text) - length - 1) for _ in range(n_sequences)]
        rows = torch.stack([text[s:s + length + 1] for s in starts]).long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ---------------------------------------------------------------------------------------------------- the runs
def keep_heap(touch_bytes=0):
    """Keep freed memory in the process, so that no contender pays page faults for another. Linux with glibc only."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
    if touch_bytes:
        torch.ones(touch_bytes, dtype=torch.uint8)


@dataclasses.dataclass
class Contender:
    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list = dataclasses.field(default_factory=list)
    seconds: list = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    kept_bytes: int = 0
    samples: list = dataclasses.field(default_factory=list)  # (seconds, bytes) of the longest batch

    def own_bytes(self):
        state = [t for s in self.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return sum(t.untyped_storage().nbytes() for t in [*self.model.parameters(), *grads, *state])


def contenders(proto):
    """The three, each with the same weights."""
    for name, prepare in (("plain", lambda model: model), ("stock checkpoint", with_stock), ("tfg", with_tfg)):
        model = prepare(copy.deepcopy(proto))
        yield Contender(name, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))


def with_stock(model):
    model.call_block = functools.partial(stock_checkpoint, use_reentrant=False)
    return model


def with_tfg(model):
    return tfg.wrap(model, interval=1)


def step(contender, batch, seed, bf16):
    """One optimizer step. Notes loss, time, exact peak and what the forward left alive, without the others' bytes."""
    base = tfg.cpu.memory_allocated()
    others = base - contender.own_bytes()
    tfg.cpu.reset_peak_memory_stats()
    torch.manual_seed(seed)
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = contender.model(*batch)
    kept = tfg.cpu.memory_allocated() - base
    loss.backward()
    torch.nn.utils.clip_grad_norm_(contender.model.parameters(), 1.0)
    contender.optimizer.step()
    contender.optimizer.zero_grad()
    contender.seconds.append(time.perf_counter() - start)
    contender.losses.append(loss.detach())
    contender.kept_bytes = max(contender.kept_bytes, kept)
    contender.peak_bytes = max(contender.peak_bytes, tfg.cpu.max_memory_allocated() - others)


def sampled_step(contender, batch, seed, bf16, every_s=0.002):
    """A step while a thread looks at the memory. Its time is not kept."""
    others, start, done = tfg.cpu.memory_allocated() - contender.own_bytes(), time.perf_counter(), threading.Event()

    def look():
        while not done.wait(every_s):
            contender.samples.append((time.perf_counter() - start, tfg.cpu.memory_allocated() - others))
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        step(contender, batch, seed, bf16)
    finally:
        done.set()
        thread.join()
    contender.seconds.pop()


def train(runs, plan, options, advance):
    """All steps of all contenders, in turns. The first step, on the longest batch, also warms up and is sampled."""
    for i, batch in enumerate(plan):
        for run in runs:
            (step if i else sampled_step)(run, batch, options.seed + i, options.bf16)
            advance(f"step {i + 1}, {batch[0].shape[1]} tokens, {run.name}, loss {run.losses[-1].item():.3f}")


# ---------------------------------------------------------------------------------------------------- what is shown
def replayed_operators(model):
    return sum(block["ops_replayed"] for block in tfg.report(model).to_dict()["blocks"])


def same_bits(a, b):
    """Whether losses and weights of two contenders are equal to the last bit."""
    pairs = zip([*a.losses, *a.model.parameters()], [*b.losses, *b.model.parameters()], strict=True)
    return all(torch.equal(x.detach().view(torch.uint8), y.detach().view(torch.uint8)) if x.dim() else
               x.item().hex() == y.item().hex() for x, y in pairs)


def rows(runs):
    plain = runs[0]
    yield "", "final loss", "peak MiB", "kept MiB", "step time", "replayed"
    for run in runs:
        ratio = sum(run.seconds) / sum(plain.seconds) if plain.seconds else math.nan
        replayed = f"{replayed_operators(run.model):,} ops" if run.name == "tfg" else "–"
        yield (run.name, f"{run.losses[-1].item():.9f}", f"{run.peak_bytes / MIB:.1f}", f"{run.kept_bytes / MIB:.1f}",
               f"{ratio:.2f} ×", replayed)


class PlainScreen:
    """What is shown where rich is missing or nobody looks: lines."""

    def __init__(self, total):
        self.is_tty, self.total, self.done = sys.stderr.isatty(), total, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.is_tty:
            sys.stderr.write("\r\033[K")

    def advance(self, text):
        self.done += 1
        if self.is_tty:
            sys.stderr.write(f"\r\033[K{self.done}/{self.total}  {text}")

    def say(self, text, good=True):
        sys.stdout.write(text + "\n")

    def table(self, lines):
        lines = list(lines)
        widths = [max(map(len, column)) for column in zip(*lines)]
        for name, *cells in lines:
            self.say("  ".join([name.ljust(widths[0])] + [c.rjust(w) for c, w in zip(cells, widths[1:])]))


class RichScreen:
    def __init__(self, total):
        from rich import console, progress
        self.console = console.Console()
        columns = (progress.SpinnerColumn(), progress.BarColumn(), progress.MofNCompleteColumn(),
                   progress.TimeRemainingColumn(), progress.TextColumn("[dim]{task.description}"))
        self.progress = progress.Progress(*columns, console=self.console, transient=True,
                                          refresh_per_second=4)
        self.task = self.progress.add_task("", total=total)

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def advance(self, text):
        self.progress.update(self.task, advance=1, description=text)

    def say(self, text, good=True):
        self.console.print(text, style=None if good else "bold red", highlight=False)

    def table(self, lines):
        from rich import box, table
        (first, *head), *body = lines
        grid = table.Table(box=box.SIMPLE_HEAD, header_style="bold")
        grid.add_column(first)
        for title in head:
            grid.add_column(title, justify="right")
        for line in body:
            grid.add_row(*line, style="bold green" if line[0] == "tfg" else None)
        self.console.print(grid)


def screen(total):
    try:
        return RichScreen(total) if sys.stdout.isatty() else PlainScreen(total)
    except ImportError:
        return PlainScreen(total)


def draw(runs, path):
    """Memory over time of the longest batch, one line each. False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = (figure := Figure(figsize=(8, 4), layout="constrained")).subplots()
    for run, color in zip(runs, ("#8c8c8c", "#d98c3f", "#2f7d4f")):
        seconds, live = zip(*run.samples)
        axes.plot(seconds, [b / MIB for b in live], color=color, label=f"{run.name}: peak {run.peak_bytes / MIB:.0f} MiB")
        axes.fill_between(seconds, [b / MIB for b in live], color=color, alpha=0.12, linewidth=0)
    axes.set(xlabel="seconds into the first step (the longest batch)", ylabel="MiB alive", xlim=(0, None), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return True


def check(options):
    if not 128 <= options.max_length <= 4096:
        raise SystemExit(f"--max-length must be between 128 and 4096, got {options.max_length}")
    if options.steps < 1 or options.batch < 1 or options.blocks < 1:
        raise SystemExit("--steps, --batch and --blocks must be at least 1")
    if options.hidden < 64 or options.hidden % 64:
        raise SystemExit(f"--hidden must be a multiple of 64, got {options.hidden}")


def main(options):
    """Run the demo; the exit code is 1 where the three differ in a bit."""
    check(options)
    keep_heap()
    torch.manual_seed(options.seed)
    proto = Decoder(options.blocks, options.hidden, dropout=options.dropout)
    if options.freeze:
        tfg.freeze(proto, fraction=1 / 3)
    plan = list(batches(corpus(), options.steps, options.batch, options.max_length, options.seed))
    runs = list(contenders(proto))
    with screen(total=len(plan) * len(runs)) as shown:
        n_params = sum(p.numel() for p in proto.parameters())
        shown.say(f"{options.blocks} blocks, {n_params / 1e6:.1f} M parameters, {len(plan)} steps of {options.batch} × "
                  f"128…{options.max_length} bytes, {torch.get_num_threads()} threads, torch {torch.__version__}")
        train(runs, plan, options, shown.advance)
    return conclude(runs, shown, options)


def conclude(runs, shown, options):
    shown.table(rows(runs))
    different = [run.name for run in runs[1:] if not same_bits(runs[0], run)]
    if different:
        shown.say(f"DIFFERENT from plain in losses or weights: {', '.join(different)}", good=False)
    else:
        shown.say("Every loss and every weight of the three runs is equal to the last bit.")
    if draw(runs, options.png):
        shown.say(f"Memory over time: {options.png}")
    return 1 if different else 0
