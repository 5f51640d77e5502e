# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers on a tiny model: gradient checkpointing, which they have on, goes through tfg; DPO switches it off around its reference
passes and on again."""

import pytest
import torch
from bitwise import differences

import tfg

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread", "no_budget_left")]

TEXTS = ["the tape is an append-only record", "activations are a cache", "replay only what backward needs", "any doubt means keep"] * 4


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                                      attention_dropout=0.1, pad_token_id=0, eos_token_id=1, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def settings(kind, folder, **more):
    return kind(output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[], save_strategy="no",
                disable_tqdm=True, use_cpu=True, bf16=False, learning_rate=1e-3, max_length=64, **more)


def sft(folder, callbacks=(), lora=False, **more):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    return trl.SFTTrainer(model(), settings(trl.SFTConfig, folder, **more), callbacks=list(callbacks), peft_config=config,
                          train_dataset=datasets.Dataset.from_dict({"text": TEXTS}), processing_class=transformers.ByT5Tokenizer())


def dpo(folder, callbacks=(), lora=False, **more):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    pairs = {"prompt": TEXTS, "chosen": [text[:20] for text in TEXTS], "rejected": [text[::-1][:20] for text in TEXTS]}
    return trl.DPOTrainer(model(), args=settings(trl.DPOConfig, folder, **more), callbacks=list(callbacks), peft_config=config,
                          ref_model=None if lora else model(), train_dataset=datasets.Dataset.from_dict(pairs),
                          processing_class=transformers.ByT5Tokenizer())


def left_by(made):
    made.train()
    return [row["loss"] for row in made.state.log_history if "loss" in row], [p.detach().clone() for p in made.model.parameters()]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("build", [sft, dpo], ids=lambda build: build.__name__)
def test_a_run_differs_in_nothing_but_the_callback(tmp_path, build, lora):
    wanted = left_by(build(tmp_path, lora=lora, gradient_checkpointing=False))
    callback = tfg.TrainerCallback(interval=1)
    made = build(tmp_path, [callback], lora=lora)
    assert made.args.gradient_checkpointing
    assert not differences(left_by(made), wanted)
    total = callback.report.to_dict()["total"]
    assert total["regions"] >= 2 * 3 and total["ops_replayed"] > 0


def test_offloading_of_trl_is_refused(tmp_path):
    with pytest.raises(ValueError, match="activation_offloading"):
        sft(tmp_path, [tfg.TrainerCallback(interval=1)], activation_offloading=True)
