# SPDX-License-Identifier: BSD-3-Clause
"""timeline: memory over the last step as a picture. Reads the samples that the binary took; decides nothing."""

from ._engine import C, Error

STEP_BEGINS = "step begins"


def last_step(samples):
    """The samples of the last whole step: from the last but one "step begins" to the last; all since the last where there is one
    only. samples: (ns, live bytes, bytes of activations that may leave, phase), oldest first."""
    begins = [i for i, sample in enumerate(samples) if sample[3] == STEP_BEGINS]
    if len(begins) > 1:
        return samples[begins[-2]:begins[-1]]
    return samples[begins[0]:] if begins else samples


def draw(path, memory):
    """See Report.plot. memory: Report.memory."""
    samples = last_step(C.samples())
    if len(samples) < 2:
        raise Error("plot: no step has been seen yet: run one with tfg.wrap(model, budget=...)")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plot: matplotlib is needed: pip install matplotlib") from None
    mebibyte = 2**20
    times_ms = [(sample[0] - samples[0][0]) / 1e6 for sample in samples]
    kept = [sample[2] / mebibyte for sample in samples]
    fixed = min(memory["parameters"], *(sample[1] for sample in samples)) / mebibyte
    rest = [max(0.0, sample[1] / mebibyte - fixed - k) for sample, k in zip(samples, kept)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(times_ms, [fixed] * len(samples), rest, kept, step="post", colors=["#9aa5b1", "#e3b23c", "#3a7ca5"],
                   labels=["parameters", "gradients, optimizer state, temporaries", "activations that may leave"])
    if memory["budget"] is not None:
        axes.axhline(memory["budget"] / mebibyte, color="#c8553d", linestyle="--", label="budget")
    axes.set(xlabel="ms since the step began", ylabel="MiB", xlim=(0, times_ms[-1]), ylim=(0, None))
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=150)
