# SPDX-License-Identifier: BSD-3-Clause
"""A library that goes (a custom operator defined anew in a notebook) leaves its schema's address to the next one's."""

import torch

import tfg


def test_operators_that_come_and_go_with_other_arguments():
    x = torch.linspace(-1, 1, 64).requires_grad_()
    wanted = torch.autograd.grad(x.sin().sum(), x)[0]
    for i in range(40):
        n_arguments = 3 if i % 2 == 0 else 1
        library = torch.library.Library(f"tfg_comes_and_goes{i}", "FRAGMENT")
        library.define(f"f({', '.join(f'Tensor a{j}' for j in range(n_arguments))}) -> Tensor")
        library.impl("f", lambda *given: given[0] * 0, "CPU")
        operator = getattr(torch.ops, f"tfg_comes_and_goes{i}").f

        def function(x, operator=operator, n_arguments=n_arguments):
            return operator(*[x.detach()] * n_arguments) + x.sin()

        assert torch.equal(torch.autograd.grad(tfg.checkpoint(function, x).sum(), x)[0], wanted)
        library._destroy()
