# SPDX-License-Identifier: BSD-3-Clause
"""(h) Transformers' Trainer with LoRA on a small byte-level decoder over real text: plain, its own gradient checkpointing, and tfg's
callback under a budget of the peak that the former has, and of half of plain's. One optimizer step; the same script but for the
callback.

Aim: at the stock's peak no slower than the stock.
"""

import harness
import pytest
import torch

import tfg
from tfg.demo import corpus

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

SHAPE = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 4}
BATCH, LENGTH, N_STEPS = 4, 512, 2


def trainer(folder, callbacks=(), **more):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, use_cache=False))
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    rows = [{"input_ids": row, "labels": row} for row in corpus()[: BATCH * LENGTH].long().view(BATCH, LENGTH)]
    arguments = transformers.TrainingArguments(str(folder), max_steps=N_STEPS, per_device_train_batch_size=BATCH, logging_steps=1,
                                               report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, **more)
    made = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses(made):
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def peak_bytes(folder, *args, **more):
    """Of a whole run, above nothing: parameters and all. And its losses."""
    made = trainer(folder, *args, **more)
    tfg.cpu.reset_peak_memory_stats()
    made.train()
    return tfg.cpu.max_memory_allocated(), losses(made)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_s_run(benchmark, tmp_path):
    with harness.threads(1):
        plain_peak, wanted = peak_bytes(tmp_path)
        stock_peak, stock_losses = peak_bytes(tmp_path, gradient_checkpointing=True)
        budgets = {"half": plain_peak // 2, "stock's peak": stock_peak}
        peaks = {}
        for name, budget in budgets.items():
            peaks[name], got = peak_bytes(tmp_path, [tfg.TrainerCallback(budget=budget)])
            assert got == wanted and peaks[name] <= budget
        assert stock_losses == wanted
        race = harness.Race(**{
            "plain": lambda: trainer(tmp_path).train(),
            "HF gradient checkpointing": lambda: trainer(tmp_path, gradient_checkpointing=True).train(),
            **{f"tfg, {name}": lambda budget=budget: trainer(tmp_path, [tfg.TrainerCallback(budget=budget)]).train()
               for name, budget in budgets.items()}})
        harness.run(benchmark, race, rounds=5)
    harness.tell(benchmark, "(h) Trainer with LoRA: peak over plain", stock=stock_peak / plain_peak,
                 **{f"tfg, {name}": peak / plain_peak for name, peak in peaks.items()})
    harness.tell(benchmark, "(h) Trainer with LoRA: time over plain",
                 **{name: race.ratio(name, "plain") for name in race.contenders if name != "plain"})
