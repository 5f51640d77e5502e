# SPDX-License-Identifier: BSD-3-Clause
"""What several test files ask for by name."""

import pytest
import torch

import tfg


@pytest.fixture
def one_thread():
    """torch on one thread for the test; afterwards as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_budget_left():
    """No budget stays in force after the test."""
    yield
    tfg.set_budget(None)
