# SPDX-License-Identifier: BSD-3-Clause
"""Random programs, plain and in regions, bit for bit. What fails prints its bytes:

    python tests/random_programs.py HEX      shows the program, reduced, and what differs
    TFG_PROGRAMS=20000 pytest tests/test_random_programs.py
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import (
    OPERATORS,
    PLAIN,
    SETTINGS,
    Node,
    compared,
    complaints,
    decode,
    listing,
    outcome,
    unary,
)

N_PROGRAMS = int(os.environ.get("TFG_PROGRAMS", 2500))
PROGRAMS = st.integers(1, 36).flatmap(lambda n: st.binary(min_size=4 * n, max_size=4 * n))
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("one_thread")]


def settings_for(data):
    """Three of the settings, picked by the program's own bytes, so that shrinking keeps or finds one that fails."""
    first = data[-1] % len(SETTINGS)
    return [SETTINGS[(first + 2 * i) % len(SETTINGS)] for i in range(3)]


@settings(max_examples=N_PROGRAMS, deadline=None, database=None, print_blob=True,
          suppress_health_check=list(HealthCheck))
@given(data=PROGRAMS)
def test_random_programs_are_bitwise_in_regions(data):
    found = complaints(data, settings_for(data))
    assert not found, "\n".join([f"bytes {data.hex()}", *listing(decode(data)[0]), str(found)])


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.whole], ids=lambda s: s.name)
@pytest.mark.parametrize("kind", OPERATORS, ids=lambda f: f.__name__)
def test_each_operator_alone_is_bitwise(kind, setting):
    for n in range(24):
        program = (Node(kind, n % 4, n % 3, n), Node(unary, 0, 1, 0))
        assert not (found := compared(program, n, [setting])), "\n".join([*listing(program), str(found)])


def test_most_programs_run_to_the_end_and_reach_every_operator():
    draw = torch.Generator().manual_seed(1)
    n_ran, kinds = 0, set()
    for _ in range(150):
        n_bytes = 4 * int(torch.randint(1, 36, (), generator=draw))
        data = bytes(torch.randint(0, 256, (n_bytes,), generator=draw).tolist())
        program, choice = decode(data)
        n_ran += outcome(program, choice, PLAIN)[1] is None
        kinds |= {line.split()[0] for line in listing(program)}
    assert n_ran > 100
    assert kinds >= {f.__name__ for f in OPERATORS}
