# SPDX-License-Identifier: BSD-3-Clause
"""Several threads on one graph, and forks. Each scenario runs in a process of its own: a deadlock is a timeout there."""

import subprocess
import sys

import pytest

SHARED_GRAPH = """
import threading, torch, tfg
torch.manual_seed(0)
weights = [torch.randn(32, 32, requires_grad=True) for _ in range(8)]
held = []  # the storages of what autograd did not save: Python is their only owner, and to lock them takes the GIL

def block(x):
    for weight in weights:
        y = x @ weight
        held.append(y.untyped_storage())
        x = torch.tanh(y)
    return x

x = torch.randn(32, 32)
plain = torch.autograd.grad(block(x).sum(), weights)
wrong = []
for _ in range(20):
    held.clear()
    loss = tfg.checkpoint(block, x).sum()

    def work():
        for _ in range(10):
            found = torch.autograd.grad(loss, weights, retain_graph=True)
            wrong.extend(i for i, (a, b) in enumerate(zip(found, plain)) if not torch.equal(a, b))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
assert not wrong, wrong
print("done")
"""

FORKS = """
import os, threading, torch, tfg
tfg.set_budget("1GiB")
weight = torch.randn(64, 64, requires_grad=True)

def step():
    tfg.checkpoint(lambda x: torch.tanh(x @ weight).sin(), torch.randn(64, 64)).sum().backward()

stop = False
def work():
    while not stop: step()

threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for _ in range(50):
    child = os.fork()
    if child == 0:
        step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop = True
for thread in threads: thread.join()
print("done")
"""


@pytest.mark.parametrize("program", [SHARED_GRAPH, FORKS], ids=["one_graph_in_four_threads", "forks_while_others_train"])
def test_nobody_waits_for_ever(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "done", done.stderr[-2000:]
