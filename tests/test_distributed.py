# SPDX-License-Identifier: BSD-3-Clause
"""Two real processes over gloo: what each rank found, one test per case of each program. A program is launched once."""

import functools

import pytest
import torch.distributed as dist
from ranks import cases_of, launch

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")
PROGRAMS = ("ddp_cases.py", "sharded_cases.py")

launched = functools.cache(launch)


@pytest.mark.parametrize(("program", "case"), [(program, case) for program in PROGRAMS for case in cases_of(program)])
def test_two_ranks(program, case):
    assert launched(program)[case] == ["", ""]
