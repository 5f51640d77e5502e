# SPDX-License-Identifier: BSD-3-Clause
"""Two real processes over gloo: what each rank found, one test per case of each program. The programs share one pair of processes."""

import functools
import importlib.util

import pytest
import torch.distributed as dist
from ranks import cases_of, launch

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")
PROGRAMS = ("ddp_cases", "sharded_cases")
EVERY_CASE = [(program, case) for program in PROGRAMS for case in cases_of(program)]

launched = functools.cache(launch)


@pytest.mark.parametrize(("program", "case"), EVERY_CASE)
def test_two_ranks(program, case):
    assert launched(*PROGRAMS)[program, case] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "case"), EVERY_CASE)
def test_two_ranks_with_every_dial_and_order(program, case):
    assert launched(*PROGRAMS, is_thorough=True)[program, case] == ["", ""]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("case", cases_of("zero_cases"))
def test_deepspeed_on_two_ranks(case):
    assert launched("zero_cases", timeout_s=400)["zero_cases", case] == ["", ""]


@pytest.mark.slow
def test_a_rank_without_memory_hangs_nobody():
    (said,) = launch("memory_cases", timeout_s=60, group_timeout_s=8).values()
    assert "tfg: CPU out of memory" in said[1]
    assert "Error" in said[0] and "no answer within" not in said[0], said[0]
