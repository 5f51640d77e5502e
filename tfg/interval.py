# SPDX-License-Identifier: BSD-3-Clause
"""interval: the method's formula for the interval, and the check that counts share."""

from ._engine import C


def check_count(who, value):
    """`value` if it is an int of 1 or more that C can hold (bools and floats are not), else ValueError with the value in it."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**63:
        raise ValueError(f"{who} must be an int of 1 or more (and below 2**63), not {value!r}")
    return value


def dynamic_interval(total_layers, seq_len, low=2, high=12):
    """Blocks per segment by sequence length: max(low, min(high, round(total_layers / sqrt(seq_len)))).

    total_layers  number of blocks, an int >= 1
    seq_len       tokens in one sequence, an int >= 1
    low, high     bounds of the answer, ints >= 1, low <= high

    Rounded half away from zero, never above total_layers. For the usual lengths the quotient is far below the low bound
    (32 layers at 4096 tokens: 0.5), so the formula alone nearly always answers 2; a memory budget is what makes use of the
    memory that is there.
    ValueError with the value in it for anything that is not such a count.
    """
    check_count("dynamic_interval: total_layers", total_layers)
    check_count("dynamic_interval: seq_len", seq_len)
    check_count("dynamic_interval: low", low)
    check_count("dynamic_interval: high", high)
    if low > high:
        raise ValueError(f"dynamic_interval: low must not be above high, but {low} > {high}")
    return C.dynamic_interval(total_layers, seq_len, low, high, total_layers)
