# SPDX-License-Identifier: BSD-3-Clause
"""Small models and a bitwise judge that several tests share. B batch, D width."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Residual MLP with dropout; counts its forwards in Python."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.n_forwards = 0

    def forward(self, x, scale: float = 1.0):
        self.n_forwards += 1
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training) * scale


class Stack(nn.Module):
    """n blocks in a ModuleList, called in order."""

    def __init__(self, n=4, block=Block, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([block() for _ in range(n)])
        self.order = list(range(n))

    def forward(self, x):
        for i in self.order:
            x = self.blocks[i](x, scale=2.0)
        return x


class Language(nn.Module):
    """Tokens in, loss out; the head is tied to the embedding where asked."""

    def __init__(self, n=4, tied=False, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(11, width), nn.Embedding(6, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(n)])
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def batch(seed=0, width=8):
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(seed))


def one_step(model, x):
    """Everything a step leaves: output, gradients (None too), input's gradient, buffers, RNG state."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [y.detach().clone(), x.grad, *grads, *[b.clone() for b in model.buffers()], torch.get_rng_state()]


def train(model, n_steps=2, seed=0):
    """All that n_steps of SGD leave, parameters included."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    left = []
    for i in range(n_steps):
        torch.manual_seed(seed + i)
        left += one_step(model, batch(seed + i))
        optimizer.step()
    return left + [p.detach().clone() for p in model.parameters()]


def plain(model, **how):
    """train() of a plain deep copy, which is made before anything is wrapped."""
    return train(copy.deepcopy(model), **how)


def assert_same_bits(got, wanted):
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted)):
        assert (a is None) == (b is None), f"item {i}: {a} against {b}"
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), f"item {i} differs: {a} against {b}"
