# SPDX-License-Identifier: BSD-3-Clause
"""freeze: embeddings and the lowest blocks stop training, and say so."""

import logging

import pytest
import torch
from small_models import Block, Language, Stack
from torch import nn

import tfg

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def trainable(model):
    return {name.split(".")[0] + "." + name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad}


def test_a_fraction_freezes_embeddings_and_the_lowest_blocks():
    model = Language(n=4)
    frozen = tfg.freeze(model, fraction=1 / 2)
    assert trainable(model) == {"blocks.2", "blocks.3", "head.weight"}
    assert frozen.blocks == ("blocks.0", "blocks.1") and frozen.embeddings == ("embed", "position")
    assert set(frozen.names) == {n for n, p in model.named_parameters() if not p.requires_grad}
    gone = [p for p in model.parameters() if not p.requires_grad]
    assert frozen.n_parameters == sum(p.numel() for p in gone) and frozen.n_bytes == 4 * frozen.n_parameters
    assert frozen.tied == () and frozen.before == ()


@pytest.mark.parametrize("fraction, n, wanted", [(1 / 3, 6, 2), (1 / 3, 8, 2), (0.1, 4, 0), (1, 4, 4), (0.7, 10, 7), (1.0, 3, 3)])
def test_fractions_are_rounded_down(fraction, n, wanted):
    assert len(tfg.freeze(Language(n=n), fraction=fraction).blocks) == wanted


def test_a_number_of_layers_freezes_as_many():
    assert tfg.freeze(Language(n=4), n_layers=3).blocks == ("blocks.0", "blocks.1", "blocks.2")


def test_a_frozen_prefix_saves_nothing_and_has_no_backward():
    model = tfg.wrap(Language(n=4), interval=1)
    tfg.freeze(model, n_layers=2)
    seen = []
    model.blocks[1].register_forward_hook(lambda m, a, out: seen.append(out.requires_grad))
    model(IDS).backward()
    assert seen == [False] and all(p.grad is None for b in model.blocks[:2] for p in b.parameters())
    blocks = tfg.report(model).to_dict()["blocks"]
    assert [b["saved_bytes"] > 0 for b in blocks] == [False, False, True, True]


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_training_after_freeze_is_bitwise_plain(interval):
    def run(model):
        torch.manual_seed(0)
        tfg.freeze(model, n_layers=1)
        model(IDS).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    got, wanted = run(tfg.wrap(Language(), interval=interval)), run(Language())
    assert all((got[n] is None) == (wanted[n] is None) and (got[n] is None or torch.equal(got[n], wanted[n])) for n in wanted)


def test_tied_weights_are_named_in_result_and_log(caplog):
    frozen = tfg.freeze(Language(tied=True), n_layers=1)
    assert frozen.tied == (("embed.weight", "head.weight"),)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "head.weight is tied to embed.weight and frozen too" in record.getMessage()


def test_what_still_trains_before_the_frozen_blocks_is_named():
    class Audio(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.scale = nn.Conv1d(2, 2, 1), nn.Parameter(torch.ones(1))
            self.inner = Stack(3)
            self.head = nn.Linear(8, 2)

    frozen = tfg.freeze(Audio(), n_layers=1)
    assert set(frozen.before) == {"conv.weight", "conv.bias", "scale"} and "still training" in str(frozen)


def test_modules_named_like_embeddings_are_frozen_whole():
    class Embeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.norm, self.cls = nn.Embedding(3, 8), nn.LayerNorm(8), nn.Parameter(torch.zeros(8))

    model = Stack(3)
    model.embeddings, model.patch_embed = Embeddings(), nn.Conv2d(3, 8, 2)
    frozen = tfg.freeze(model, n_layers=1)
    assert frozen.embeddings == ("embeddings", "patch_embed")
    assert {"embeddings.cls", "embeddings.norm.weight", "patch_embed.weight"} <= set(frozen.names)


def test_what_was_frozen_already_is_not_counted_again():
    model = Language()
    assert tfg.freeze(model, n_layers=2).names and tfg.freeze(model, n_layers=2).names == ()


@pytest.mark.parametrize("arguments", [
    {}, {"fraction": 0.5, "n_layers": 1}, {"fraction": 0}, {"fraction": 1.5}, {"fraction": -0.1}, {"fraction": True},
    {"fraction": "half"}, {"fraction": float("nan")}, {"n_layers": 0}, {"n_layers": 5}, {"n_layers": True}, {"n_layers": 1.0}], ids=str)
def test_bad_arguments_are_value_errors_and_freeze_nothing(arguments):
    model = Language(n=4)
    with pytest.raises(ValueError, match="freeze") as raised:
        tfg.freeze(model, **arguments)
    assert len(arguments) != 1 or str(*arguments.values()) in str(raised.value)
    assert all(p.requires_grad for p in model.parameters())


def test_blocks_can_be_named_for_freeze():
    model = nn.Module()
    model.a, model.b = Block(), Block()
    assert tfg.freeze(model, n_layers=1, blocks=["a", "b"]).blocks == ("a",)
