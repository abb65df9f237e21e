"""Parameters that are not finite: a run stops and keeps its last good checkpoint; a comparison continues."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch
import transformers
from rich.console import Console

from dpoptim.app import resume, train
from dpoptim.app.comparison.compare import compare
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.runs import loop
from dpoptim.app.runs.run_log import Diverged, last_reason
from dpoptim.integrations.released_norms import not_finite
from tests.app import comparisons
from tests.app.runs import StopAfter, log_of, parameters_at, rows_recipe, write_bert, write_texts


@pytest.fixture
def too_far(monkeypatch):
    """The twelfth step has an infinite learning rate."""
    monkeypatch.setattr(loop, "learning_rate_at", lambda recipe, step: math.inf if step == 11 else 0.01)


@pytest.mark.parametrize(
    ("every", "progress", "step", "saved"),
    [
        ({"log_every": 5, "evaluate_every": 10, "checkpoint_every": 10}, ProgressReporter(), 15, [0, 10]),
        ({"log_every": 100, "evaluate_every": 7, "checkpoint_every": 10}, ProgressReporter(), 14, [0, 10]),
        ({"log_every": 100, "evaluate_every": 20, "checkpoint_every": 10}, StopAfter(13), 13, [0, 10]),
    ],
)  # fmt: skip
def test_diverging_run_keeps_its_last_good_checkpoint(every, progress, step, saved, too_far, tmp_path):
    recipe = rows_recipe(tmp_path, validation_fraction=0.25, **every)
    with pytest.raises(Diverged, match=f"between steps .* and {step}: 4 parameters .first: '0.weight'") as error:
        train(recipe, tmp_path / "run", progress=progress)
    assert "a learning_rate below 0.03" in str(error.value)
    assert f"the last checkpoint is of step {saved[-1]}" in str(error.value)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{number:06d}" for number in saved]
    for number in saved:
        assert all(bool(value.isfinite().all()) for value in parameters_at(tmp_path / "run", number).values())
    assert not (tmp_path / "run" / "model").exists()
    assert last_reason(tmp_path / "run") != "finished"
    assert log_of(tmp_path / "run")[-1]["reason"] == "error: Diverged"


def test_resuming_a_diverged_run_fails_again(too_far, tmp_path):
    with pytest.raises(Diverged) as first:
        train(rows_recipe(tmp_path), tmp_path / "run")
    with pytest.raises(Diverged) as again:
        resume(tmp_path / "run")
    assert str(again.value) == str(first.value)


def test_model_that_is_not_finite_is_refused(tmp_path):
    folder, data = write_bert(tmp_path / "bert"), write_texts(tmp_path / "texts.jsonl")
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight[0, 0] = math.nan
    model.save_pretrained(folder)
    assert not_finite(model) == ["bert.encoder.layer.0.output.dense.weight"]
    recipe = rows_recipe(tmp_path, model=folder, data=data, columns=None)
    for changes in ({}, {"lora_rank": 2}):
        with pytest.raises(ValueError, match=r"^1 parameters of model=.* are not finite \(first: .*0\.output\.dense"):
            train(recipe.replace(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_loss_that_is_not_finite_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "learning_rate_at", lambda recipe, step: 1e30)
    file = io.StringIO()
    recipe = rows_recipe(tmp_path, validation_fraction=0.25, steps=4, evaluate_every=2)
    train(recipe, tmp_path / "run", progress=ProgressReporter(Console(file=file, width=200)))
    lines = [line for line in file.getvalue().splitlines() if "held-out loss not finite" in line]
    assert [line.partition(":")[0] for line in lines] == ["step 2/4", "step 4/4"]
    assert [entry["loss"] for entry in log_of(tmp_path / "run") if entry["kind"] == "evaluation"][1:] == [None, None]


def test_comparison_continues_without_settings_that_diverge(monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "learning_rate_at", lambda recipe, step: math.inf if recipe.learning_rate == 1 else 0.01)
    comparisons.write_rows(tmp_path / "private.csv")
    request = comparisons.request_for(
        tmp_path, variants=("post_processing",), seeds=(0,), grid={"learning_rate": [1.0, 0.03]}, tuning_steps=2
    )
    result = compare(request, tmp_path / "out")
    row = result["variants"][0]
    assert row["learning_rate"] == 0.03
    assert [trial["loss"] is None for trial in row["trials"]] == [True, False]
    assert row["accuracy"] is not None
    logs = {path: path.read_bytes() for path in (tmp_path / "out" / "trials").rglob("log.jsonl")}
    assert len(logs) == 2
    assert json.dumps(compare(request, tmp_path / "out")) == json.dumps(result)
    assert {path: path.read_bytes() for path in logs} == logs  # none was run again


def test_diverging_variant_has_an_infinite_loss(monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "learning_rate_at", lambda recipe, step: math.inf)
    comparisons.write_rows(tmp_path / "private.csv")
    request = comparisons.request_for(
        tmp_path, variants=("post_processing",), seeds=(0,), grid={"learning_rate": [1.0]}, tuning_epsilon=None
    )
    row = compare(request, tmp_path / "out")["variants"][0]
    assert row["loss"]["mean"] == row["accuracy"]["mean"] == math.inf
