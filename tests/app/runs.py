"""Small runs: tiny models and data in a folder, recipes over them, and logs without their times."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dpoptim.app import Recipe, RunDirectory, read_log
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.runs.run_directory import load_checkpoint
from dpoptim.noise import NoiseKey
from tests.app import tiny

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "private", "training", "adds", "noise", "to", "gradients"]
TIMES = ("time", "seconds", "examples_per_second")


def fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give runs one key and one run_id, which only tests may do."""
    monkeypatch.setattr(NoiseKey, "generate", classmethod(lambda cls: cls.from_bytes(bytes(32))))
    monkeypatch.setattr(os, "urandom", bytes)


COLUMNS = {name: {"center": 0, "scale": 1} for name in "abc"}
COLUMN_FLAGS = ["--columns", *(f"{name}=-10:10" for name in "abc")]


def write_rows(path: Path, count: int = 120) -> str:
    """A table of three features and a label that follows from two of them."""
    rows = np.random.default_rng(0).normal(size=(count, 3))
    lines = [f"{a:.4f},{b:.4f},{c:.4f},{'yes' if a + b > 0 else 'no'}" for a, b, c in rows]
    path.write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    return str(path)


def write_texts(path: Path, count: int = 60) -> str:
    generator = np.random.default_rng(1)
    texts = [" ".join(generator.choice(WORDS, generator.integers(2, 12))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_bert(folder: Path, *, dropout: float = 0.1) -> str:
    """A BERT of two layers with dropout, so that a resumed run must also repeat the dropout."""
    tokenizer = tiny.wordpiece()
    torch.manual_seed(0)
    config = tiny.bert_config(len(tokenizer), hidden_dropout_prob=dropout)
    return tiny.saved(folder, transformers.BertForMaskedLM(config), tokenizer)


def rows_recipe(folder: Path, **changes: Any) -> Recipe:
    """Twenty steps of the built-in network on a table, shuffled: its accountant is a closed form."""
    settings: dict[str, Any] = {
        "model": "mlp", "data": write_rows(folder / "rows.csv"), "columns": COLUMNS, "epsilon": 8.0,
        "noise": "independent", "steps": 20, "sampling": "shuffled", "batch_size": 16,
        "evaluate_every": 10, "checkpoint_every": 10, "log_every": 5,
    }  # fmt: skip
    return Recipe(**{**settings, **changes})


class StopAfter(ProgressReporter):
    """Presses Ctrl-C during a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._at = step

    def step(self, *, step: int, epsilon: float, seconds: float) -> None:
        if step == self._at:
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)


class CrashAfter(ProgressReporter):
    """Crashes after a step, behind the last checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._at = step

    def step(self, *, step: int, epsilon: float, seconds: float) -> None:
        if step == self._at:
            raise RuntimeError("the power failed\nand more")


def without_times(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be the same in two runs: steps and evaluations, without the clock."""
    kept = [entry for entry in entries if entry["kind"] in ("step", "evaluation")]
    return [{name: value for name, value in entry.items() if name not in TIMES} for entry in kept]


def log_of(directory: Path) -> list[dict[str, Any]]:
    return read_log(RunDirectory(directory).log_file)


def copy_run(run: Path, to: Path) -> RunDirectory:
    """Copy a run directory and its secrets."""
    copy = RunDirectory(to)
    shutil.copytree(run, to)
    shutil.copytree(RunDirectory(run).secret_folder, copy.secret_folder)
    return copy


def parameters_at(directory: Path, step: int) -> dict[str, torch.Tensor]:
    path = directory / "checkpoints" / f"step-{step:06d}"
    found: dict[str, torch.Tensor] = load_checkpoint(path)["model"]
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
