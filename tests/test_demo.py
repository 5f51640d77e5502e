# SPDX-License-Identifier: BSD-3-Clause
"""The demo: runs to the end, tells the truth about bits in its exit code, refuses bad numbers."""

import pytest
import torch

from tfg import __main__, demo

SMALL = ["demo", "--steps", "2", "--max-length", "160", "--blocks", "3", "--hidden", "64", "--batch", "2"]


def run(tmp_path, *more):
    return __main__.main([*SMALL, "--png", str(tmp_path / "demo.png"), *more])


@pytest.mark.parametrize("more", [(), ("--freeze",), ("--bf16", "--dropout", "0")], ids=" ".join)
def test_demo_ends_with_equal_bits(tmp_path, capsys, more):
    assert run(tmp_path, *more) == 0
    assert "equal to the last bit" in capsys.readouterr().out


def test_demo_draws_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    run(tmp_path)
    assert (tmp_path / "demo.png").stat().st_size > 1000


def test_demo_exits_1_where_one_bit_differs(tmp_path, capsys, monkeypatch):
    honest = demo.with_tfg

    def crooked(model):
        with torch.no_grad():
            model.norm.weight[0] = 1 + 2**-23
        return honest(model)
    monkeypatch.setattr(demo, "with_tfg", crooked)
    assert run(tmp_path) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("more", [("--max-length", "64"), ("--hidden", "100"), ("--steps", "0")], ids=" ".join)
def test_demo_refuses_numbers_it_cannot_use(tmp_path, more):
    with pytest.raises(SystemExit, match="must be"):
        run(tmp_path, *more)


def test_stock_contender_does_checkpoint():
    model = demo.with_stock(demo.Decoder(n_blocks=2, hidden=64))
    n_calls = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: n_calls.append(1))
    ids = torch.zeros(1, 8, dtype=torch.long)
    model(ids, ids).backward()
    assert len(n_calls) == 2
