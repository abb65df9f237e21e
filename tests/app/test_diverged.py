"""Parameters that are no finite numbers: a run stops with its last good checkpoint, and a comparison goes on."""

from __future__ import annotations

import json
import math

import pytest
import torch
import transformers

from dpoptim.app import prepare, resume, train
from dpoptim.app.comparison.compare import compare
from dpoptim.app.models.finite import not_finite
from dpoptim.app.runs import loop
from dpoptim.app.runs.progress import Lines, ProgressDisplay
from dpoptim.app.runs.run_result import Diverged, is_finished
from dpoptim.integrations.losses import Task
from tests.app import cases, comparisons
from tests.app.runs import StopAfter, log_of, parameters_at, rows_recipe, write_bert, write_texts


@pytest.fixture
def too_far(monkeypatch):
    """The step behind the eleventh has an infinite learning rate."""
    monkeypatch.setattr(loop, "learning_rate_at", lambda recipe, step: math.inf if step == 11 else 0.01)


@pytest.mark.parametrize(
    ("every", "progress", "step", "saved"),
    [
        ({"log_every": 5, "evaluate_every": 10, "checkpoint_every": 10}, ProgressDisplay(), 15, [0, 10]),
        ({"log_every": 100, "evaluate_every": 7, "checkpoint_every": 10}, ProgressDisplay(), 14, [0, 10]),
        ({"log_every": 100, "evaluate_every": 20, "checkpoint_every": 1}, ProgressDisplay(), 12, [10, 11]),
        ({"log_every": 100, "evaluate_every": 20, "checkpoint_every": 10}, StopAfter(13), 13, [0, 10]),
        ({"log_every": 100, "evaluate_every": 20, "checkpoint_every": 100}, ProgressDisplay(), 20, [0]),
    ],
)  # fmt: skip
def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(every, progress, step, saved, too_far, tmp_path):
    recipe = rows_recipe(tmp_path, validation_fraction=0.25, **every)
    with pytest.raises(Diverged, match=f"stopped after step {step} of 20: 6 parameters .first: '0.weight'.") as error:
        train(recipe, tmp_path / "run", progress=progress)
    assert "learning_rate=0.01 is probably too large" in str(error.value)
    assert f"checkpoint, of step {saved[-1]}, is kept" in str(error.value)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{number:06d}" for number in saved]
    for number in saved:
        assert all(bool(value.isfinite().all()) for value in parameters_at(tmp_path / "run", number).values())
    assert not (tmp_path / "run" / "model").exists()
    assert not is_finished(tmp_path / "run")
    assert log_of(tmp_path / "run")[-1]["reason"] == "error: Diverged"


def test_going_on_with_it_says_the_same(too_far, tmp_path):
    with pytest.raises(Diverged) as first:
        train(rows_recipe(tmp_path), tmp_path / "run")
    with pytest.raises(Diverged) as again:
        resume(tmp_path / "run")
    assert str(again.value) == str(first.value)


def test_a_model_that_is_not_finite_is_refused_before_anything_is_written(tmp_path):
    folder, data = write_bert(tmp_path / "bert"), write_texts(tmp_path / "texts.jsonl")
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight[0, 0] = math.nan
    model.save_pretrained(folder)
    assert not_finite(model) == ["bert.encoder.layer.0.output.dense.weight"]
    recipe = rows_recipe(tmp_path, model=folder, data=data)
    for changes in ({}, {"lora_rank": 2}):
        with pytest.raises(ValueError, match=r"has 1 parameter with NaN.*0\.output\.dense.*before any training"):
            train(recipe.replace(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_module_that_is_not_finite_is_refused():
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.bias, math.inf)
    with pytest.raises(ValueError, match="model='Linear' has 1 parameter"):
        prepare(task=Task.TABULAR_CLASSIFICATION, model=model, records=cases.rows())


def test_a_loss_that_is_not_finite_is_noted_once(monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "learning_rate_at", lambda recipe, step: 1e30)
    said: list[str] = []
    monkeypatch.setattr(Lines, "say", lambda self, text: said.append(text))
    recipe = rows_recipe(tmp_path, validation_fraction=0.25, steps=4, evaluate_every=2)
    train(recipe, tmp_path / "run", progress=Lines(None))  # type: ignore[arg-type]
    assert [line for line in said if "not finite" in line] == [
        next(line for line in said if line.startswith("step 2/4: held-out loss not finite; ")),
        next(line for line in said if line.startswith("note: the held-out loss is not finite after step 2, ")),
        next(line for line in said if line.startswith("step 4/4: held-out loss not finite; ")),
    ]
    assert [entry["loss"] for entry in log_of(tmp_path / "run") if entry["kind"] == "evaluation"][1:] == [None, None]


def test_a_comparison_goes_on_without_the_settings_that_diverge(monkeypatch, tmp_path):
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


def test_a_variant_that_diverges_is_shown_so(monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "learning_rate_at", lambda recipe, step: math.inf)
    comparisons.write_rows(tmp_path / "private.csv")
    request = comparisons.request_for(
        tmp_path, variants=("post_processing",), seeds=(0,), grid={"learning_rate": [1.0]}, budget_for_tuning=None
    )
    row = compare(request, tmp_path / "out")["variants"][0]
    assert row["loss"]["mean"] == row["accuracy"]["mean"] == math.inf
