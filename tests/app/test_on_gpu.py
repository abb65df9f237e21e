"""Runs on a GPU, in bf16: they train, and one that crashed repeats its steps bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dpoptim.app import Recipe, RunDirectory, resume, train
from dpoptim.clipping import captured
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from dpoptim.privacy.step_ledger import released_count
from tests.app import tiny
from tests.app.runs import WORDS, CrashAfter, fixed_keys, log_of

pytestmark = pytest.mark.gpu
LONG = 256
SIZES: dict[str, Any] = dict(hidden_size=128, intermediate_size=512, max_position_embeddings=LONG)


def texts(count: int = 200) -> list[dict[str, Any]]:
    """Texts of up to 250 words, so that attention runs the kernels of real texts."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(5, LONG - 6, count)
    return [{"text": " ".join(generator.choice(WORDS, length)), "label": "ab"[int(length) % 2]} for length in lengths]


def saved_model(folder: Path, task: str) -> str:
    torch.manual_seed(0)
    if task == "causal-lm":
        tokenizer = tiny.bytepair()
        config = transformers.GPT2Config(vocab_size=len(tokenizer), n_embd=128, n_layer=2, n_head=2, n_positions=LONG)
        return tiny.saved(folder, transformers.GPT2LMHeadModel(config), tokenizer)
    tokenizer = tiny.wordpiece()
    config = transformers.BertConfig(vocab_size=len(tokenizer), num_hidden_layers=2, num_attention_heads=2, **SIZES)
    kind = transformers.BertForMaskedLM if task == "masked-lm" else transformers.BertForSequenceClassification
    return tiny.saved(folder, kind(config), tokenizer)


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("task", ["masked-lm", "causal-lm", "text-classification"])
def test_a_run_that_crashed_repeats_its_steps(task, lora_rank, tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in texts()))
    recipe = Recipe(
        task=task, model=saved_model(tmp_path / "model", task), data=str(data), noise_multiplier=0.5, delta=1e-5,
        noise="banded-toeplitz:4", sampling="shuffled", batch_size=64, steps=8, checkpoint_every=3, device="cuda",
        lora_rank=lora_rank, max_length=LONG, text_column="text",
        label_column="label" if task == "text-classification" else None,
    )  # fmt: skip
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="the power failed"):
        train(recipe, run, progress=CrashAfter(6 if lora_rank else 5))
    assert resume(run)["reason"] == "finished"
    assert released_count(RunDirectory(run).steps_file) == 8
    start = log_of(run)[0]
    assert "NVIDIA" in json.dumps(start)
    assert RunDirectory(run).read()[0].dtype == "bf16"


def private_trainer(folder: Path, task: str, output: Path, *, count: int = 200, **changes: Any) -> Any:
    model = saved_model(folder, task)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows: list[Any] = [dict(tokenizer(row["text"], truncation=True, max_length=LONG)) for row in texts(count)]
    collator: Any = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=task == "masked-lm")
    auto: Any = {"masked-lm": transformers.AutoModelForMaskedLM, "causal-lm": transformers.AutoModelForCausalLM}.get(
        task, transformers.AutoModelForSequenceClassification
    )
    if task == "text-classification":
        rows = [{**row, "labels": int(number % 8 == 0)} for number, row in enumerate(rows)]
        collator = transformers.DataCollatorWithPadding(tokenizer)
    own: dict[str, Any] = dict(
        per_device_train_batch_size=16, gradient_accumulation_steps=4, max_steps=6, save_strategy="steps",
        save_steps=2, report_to="none", bf16=True, disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    privacy = changes.pop("privacy", PrivacyArguments(noise_multiplier=0.6, delta=1e-3, sampling="poisson"))
    args = transformers.TrainingArguments(output_dir=str(output), **{**own, **changes})
    return PrivateTrainer(
        model=auto.from_pretrained(model), args=args, train_dataset=rows, data_collator=collator,
        processing_class=tokenizer, privacy=privacy,
    )  # fmt: skip


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("task", ["masked-lm", "causal-lm", "text-classification"])
def test_private_trainer_repeats_its_steps(task, tmp_path):
    ends = []
    for checkpoint in (None, str(tmp_path / "out" / "checkpoint-2")):
        trainer = private_trainer(tmp_path / "model", task, tmp_path / "out")
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.args.device.type == "cuda"
        ends.append(weights_of(trainer))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


class NotPrivateLosses(transformers.TrainerCallback):
    """Collects the logged losses."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        self.found += [logs["not_private_loss"]] if "not_private_loss" in logs else []


@pytest.mark.filterwarnings("error:a batch could not be captured", "error:batches run without graphs")
@pytest.mark.parametrize("task", ["masked-lm", "causal-lm", "text-classification"])
def test_private_trainer_captures_graphs(task, tmp_path, monkeypatch):
    """Texts of many lengths run as graphs, train the model, and end at the same bits as without graphs."""
    fixed_keys(monkeypatch)
    privacy = PrivacyArguments(noise_multiplier=0.01, clip_norm=1.0, delta=1e-3, debug_loss=True)
    ends, losses = [], NotPrivateLosses()
    for captures in (True, False):
        if not captures:
            monkeypatch.setattr(captured, "MAX_GRAPHS", 0)  # the same padded operations, launched one by one
        trainer = private_trainer(
            tmp_path / "model", task, tmp_path / str(captures), count=400, privacy=privacy, max_steps=30,
            save_strategy="no", logging_steps=5,
        )  # fmt: skip
        trainer.add_callback(losses)
        trainer.train()
        assert (trainer._captured.graphs > 0) == captures
        ends.append(weights_of(trainer))
    assert sum(losses.found[3:6]) / 3 < 0.9 * losses.found[0]  # of the last 15 steps, and of the first 5
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
