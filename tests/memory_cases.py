# SPDX-License-Identifier: BSD-3-Clause
"""One rank of two runs out of memory. Run by test_distributed.py."""

import torch.distributed as dist
from ranks import case
from sharded_cases import fsdp2, rows
from small_models import Stack

import tfg


@case
def a_rank_that_runs_out_of_memory_leaves_the_others_with_an_error():
    """It raises; the other waits for it no longer than the group's timeout."""
    model = fsdp2(tfg.wrap(Stack(), interval=1))
    loss = model(rows(0)).square().sum()
    if dist.get_rank() == 1:
        tfg.cpu.set_memory_limit(tfg.cpu.memory_allocated())
    loss.backward()
