# SPDX-License-Identifier: BSD-3-Clause
"""tfg.TrainerCallback: the same script with nothing changed but the callback gives the same losses and weights, to the last bit."""

import logging
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
from bitwise import differences

import tfg
from tfg.subclass import state_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread", "no_budget_left")]

from tfg.trainer_callback import METRICS, process_bytes  # noqa: E402

TEXT = "\n".join(topics.values()).encode()[:16_384]
LENGTH = 32


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                                      num_key_value_heads=2, attention_dropout=0.1, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def samples(n=24):
    """Bytes of real text."""
    rows = torch.frombuffer(bytearray(TEXT[: n * LENGTH]), dtype=torch.uint8).long().view(n, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(folder, model=None, callbacks=(), model_init=None, **more):
    settings = {"max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1, "report_to": [], "save_strategy": "no",
                "disable_tqdm": True, "use_cpu": True, "seed": 0, "learning_rate": 1e-3, **more}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings)
    return transformers.Trainer(model=model, model_init=model_init, args=arguments, train_dataset=samples(), eval_dataset=samples(4),
                                callbacks=list(callbacks))


def left_by(made, **how):
    """Losses, gradient norms and weights after training."""
    made.train(**how)
    history = [(row["step"], row["loss"], row["grad_norm"]) for row in made.state.log_history if "loss" in row]
    return [history, [p.detach().clone() for p in made.model.parameters()]]


SETTINGS = ({"budget": "8GiB"}, {"interval": 2}, {})


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("is_on", [False, True], ids=["off", "gradient_checkpointing"])
def test_a_run_differs_in_nothing_but_the_callback(tmp_path, how, is_on):
    wanted = left_by(trainer(tmp_path, llama()))
    callback = tfg.TrainerCallback(**how)
    made = trainer(tmp_path, llama(), [callback], gradient_checkpointing=is_on)
    assert not differences(left_by(made), wanted)
    total = callback.report.to_dict()["total"]
    assert total["regions"] == 3 * 3 and (total["ops_replayed"] > 0) == ("interval" in how)
    assert not any(state_of(module) for module in made.model.modules())


def test_a_budget_that_presses_gives_the_same_run(tmp_path):
    model = llama()
    wanted = left_by(trainer(tmp_path, llama()))
    room = tfg.cpu.memory_allocated() + 2**20
    callback = tfg.TrainerCallback(budget=room)
    assert not differences(left_by(trainer(tmp_path, model, [callback], gradient_checkpointing=True)), wanted)
    assert callback.report.to_dict()["total"]["evictions"] > 0


class Reporter(transformers.TrainerCallback):
    """Stands where TensorBoard would: before the user's callbacks."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **others):
        self.seen.append(dict(logs))


def test_metrics_reach_reporters_and_the_history(tmp_path):
    reporter = Reporter()
    made = trainer(tmp_path, llama(), [reporter, tfg.TrainerCallback(interval=1, budget="8GiB")])
    left_by(made)
    for rows in (reporter.seen, made.state.log_history):
        for row in [row for row in rows if "loss" in row]:
            assert METRICS.keys() <= row.keys()
            assert 0 < row["tfg/budget_used"] < 1 and 0 < row["tfg/recompute_frac"] < 1
            assert row["tfg/dropped_gib_per_step"] > 0 and 0 < row["tfg/peak_allocated_gib"] < row["tfg/process_gib"] < 100
    assert sum("loss" in row for row in reporter.seen) == 3


def test_a_callback_that_is_added_late_works_and_leaves_the_user_s_peak_alone(tmp_path):
    made = trainer(tmp_path, llama())
    made.add_callback(tfg.TrainerCallback(interval=1))
    tfg.cpu.reset_peak_memory_stats()
    left_by(made)
    logged = max(row["tfg/peak_allocated_gib"] for row in made.state.log_history if "loss" in row)
    assert tfg.cpu.max_memory_allocated() >= logged * 2**30 > 0


def test_model_init_gets_the_new_model_wrapped(tmp_path):
    wanted = left_by(trainer(tmp_path, model_init=llama))
    callback = tfg.TrainerCallback(interval=1)
    assert not differences(left_by(trainer(tmp_path, model_init=llama, callbacks=[callback])), wanted)
    assert callback.report.to_dict()["total"]["regions"] == 9


def test_a_model_that_is_wrapped_already_stays_as_it_is(tmp_path):
    callback = tfg.TrainerCallback()
    model = tfg.wrap(llama(), interval=3)
    left_by(trainer(tmp_path, model, [callback]))
    assert callback.report.settings == "interval=3" and state_of(model.model.layers[0]) is not None


def test_evaluation_accumulation_clipping_and_resuming_are_plain(tmp_path):
    how = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps",
           "save_steps": 2, "gradient_checkpointing": True}
    wanted = left_by(trainer(tmp_path / "plain", llama(), **{**how, "gradient_checkpointing": False}))
    got = left_by(trainer(tmp_path / "ours", llama(), [tfg.TrainerCallback(budget="8GiB")], **how))
    assert not differences(got, wanted)
    again = trainer(tmp_path / "ours", llama(), [tfg.TrainerCallback(interval=1)], **how)
    assert not differences(left_by(again, resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))[1], wanted[1])


class TooLarge(transformers.TrainerCallback):
    """Lets a real out-of-memory error of ours happen in the forward of batches of more than `most`."""

    def __init__(self, model, most):
        self.sizes, self.most = [], most
        model.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, model, args, given):
        if not model.training:
            return
        self.sizes.append(len(given["input_ids"]))
        if self.sizes[-1] > self.most:
            tfg.cpu.set_memory_limit(tfg.cpu.memory_allocated() + 1024)
            try:
                torch.empty(4096)
            finally:
                tfg.cpu.set_memory_limit(None)


def test_auto_find_batch_size_recognises_the_error_and_goes_on(tmp_path):
    model = llama()
    large = TooLarge(model, 7)
    callback = tfg.TrainerCallback(interval=1)
    made = trainer(tmp_path, model, [callback], auto_find_batch_size=True, per_device_train_batch_size=8)
    made.train()
    assert large.sizes[0] == 8 and large.sizes[-3:] == [large.sizes[-1]] * 3 and large.sizes[-1] <= 7
    assert made.state.global_step == 3 and callback.report.to_dict()["total"]["regions"] == 9


def test_a_first_step_without_a_region_is_said(tmp_path, caplog):
    class SwitchOff(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **others):
            model.gradient_checkpointing_disable()

    with caplog.at_level(logging.WARNING, logger="tfg"):
        left_by(trainer(tmp_path, llama(), [tfg.TrainerCallback(interval=1), SwitchOff()], max_steps=1))
    assert "ran as a region in the first step" in caplog.text


def test_a_full_machine_is_said_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tfg.budget, "machine_memory", lambda: (process_bytes(), "a test"))
    with caplog.at_level(logging.WARNING, logger="tfg"):
        left_by(trainer(tmp_path, llama(), [tfg.TrainerCallback(interval=1)]))
    assert caplog.text.count("a lower budget, or a smaller batch") == 1


@pytest.mark.parametrize("how", [{"interval": 0}, {"interval": 1, "every_n_layers": 1}], ids=str)
def test_bad_arguments_are_refused_at_once(how):
    with pytest.raises(ValueError):
        tfg.TrainerCallback(**how)


def test_offloading_by_the_trainer_is_refused(tmp_path):
    made = trainer(tmp_path, llama())
    made.args.activation_offloading = True
    with pytest.raises(ValueError, match="activation_offloading"):
        tfg.TrainerCallback().on_init_end(made.args, made.state, made.control, model=made.model)


def test_transformers_is_imported_only_when_the_callback_is_asked_for():
    code = ("import sys, tfg; assert 'transformers' not in sys.modules and 'TrainerCallback' not in tfg.__all__\n"
            "sys.modules['transformers'] = None\n"
            "try: tfg.TrainerCallback\n"
            "except ImportError as error: assert \"tfg[hf]\" in str(error)\n"
            "else: raise SystemExit('no error')\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_contract_every_event_gets_the_model_and_is_called_by_the_handler():
    from transformers.trainer_callback import CallbackHandler
    seen = {}

    class Look(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **others):
            seen.update(model=model, caller=sys._getframe(1).f_locals.get("self"))

    handler = CallbackHandler([Look()], "the model", None, None, None)
    handler.call_event("on_step_end", None, None, transformers.TrainerControl())
    assert seen == {"model": "the model", "caller": handler}, "how Trainer calls its callbacks has changed"
