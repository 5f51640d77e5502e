# SPDX-License-Identifier: BSD-3-Clause
"""Transformers' Trainer with LoRA on a small byte-level decoder over real text: plain, with its own gradient checkpointing, and with
tfg's callback. The script is the same but for the callback; the losses are the same to the last bit.

    python examples/trainer_lora.py
"""

import sys
import tempfile

import peft
import torch
import transformers

import tfg
from tfg.demo import corpus

SHAPE = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
ROWS = [{"input_ids": row, "labels": row} for row in corpus()[: 16 * 256].long().view(16, 256)]


def train(folder, callbacks=(), **arguments):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, use_cache=False))
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    arguments = transformers.TrainingArguments(folder, max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to=[],
                                               save_strategy="no", disable_tqdm=True, use_cpu=True, **arguments)
    trainer = transformers.Trainer(model, arguments, train_dataset=ROWS, callbacks=list(callbacks))
    trainer.remove_callback(transformers.PrinterCallback)
    tfg.cpu.reset_peak_memory_stats()
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], tfg.cpu.max_memory_allocated()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        plain, peak = train(folder)
        stock, stock_peak = train(folder, gradient_checkpointing=True)
        ours, our_peak = train(folder, callbacks=[tfg.TrainerCallback(budget=peak // 2)])
    print(f"losses {plain}\nHF gradient checkpointing: {'equal' if stock == plain else 'DIFFERENT'}, peak {stock_peak / peak:.2f} of plain's")
    print(f"tfg, budget of half plain's peak: {'equal to the last bit' if ours == plain else 'DIFFERENT'}, peak {our_peak / peak:.2f}")
    sys.exit(ours != plain)
