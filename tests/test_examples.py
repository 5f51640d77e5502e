# SPDX-License-Identifier: BSD-3-Clause
"""Every file in examples/ runs to its end: each compares a run with tfg to the same run without, and fails where one bit differs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {"trainer_lora": ("transformers", "accelerate", "peft"), "accelerate_loop": ("accelerate",)}
ON_TWO_RANKS = ("ddp", "fsdp2", "tensor_parallel")


def run(*command):
    done = subprocess.run([sys.executable, "-W", "ignore", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_example_is_equal_to_the_last_bit(name):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"this example needs {package}")
    if name in ON_TWO_RANKS and not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    two_ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if name in ON_TWO_RANKS else ()
    told = run(*two_ranks, str(EXAMPLES / f"{name}.py"))
    assert told.count("equal to the last bit") == (2 if two_ranks else 1)


def test_every_example_is_under_40_lines():
    """Of code: without the header and blank lines."""
    code = {path.name: path.read_text(encoding="utf-8").split('"""')[2].split("\n") for path in EXAMPLES.glob("*.py")}
    assert [name for name, lines in code.items() if sum(map(bool, lines)) >= 40] == []
