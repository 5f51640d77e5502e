# SPDX-License-Identifier: BSD-3-Clause
"""Prints the races' figures after pytest-benchmark's own table, with what they were measured on."""

import harness
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    with harness.threads(1):
        yield


def pytest_terminal_summary(terminalreporter):
    if harness.LINES:
        terminalreporter.section("ratios and added costs")
        terminalreporter.write_line(f"torch {torch.__version__}, {cpu_name()}, one thread, process CPU time")
        for line in harness.LINES:
            terminalreporter.write_line(line)


def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown CPU"
