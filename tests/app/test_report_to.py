"""TensorBoard and W&B get each released value once, and nothing that is not private or that times single steps."""

from __future__ import annotations

import itertools
import json
import sys
import types
from typing import Any

import pytest

from dpoptim.app import resume, train
from dpoptim.app.recipes.recipe import Recipe, read_recipe
from tests.app.runs import CrashAfter, log_of, rows_recipe

EVERY = {"evaluate_every": 5, "log_every": 1, "checkpoint_every": 2}


class FakeRun:
    def __init__(self, id: str) -> None:
        self.id, self.ended = id, False
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.described: dict[str, object] = {}
        self.config = types.SimpleNamespace(update=self._describe)

    def _describe(self, values: dict[str, object], allow_val_change: bool) -> None:
        self.described |= values

    def log(self, values: dict[str, float], step: int) -> None:
        assert not self.ended
        self.rows.append((step, values))

    def finish(self) -> None:
        self.ended = True


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for W&B, which keeps what its runs get."""
    fake = types.SimpleNamespace(runs=[], calls=[], Settings=lambda **values: values)

    def init(**arguments: object) -> FakeRun:
        fake.calls.append(arguments)
        fake.runs.append(FakeRun(str(arguments.get("id", "run-1"))))
        return fake.runs[-1]

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


def test_wandb_gets_released_values_only(tmp_path, wandb):
    recipe = rows_recipe(tmp_path, steps=5, report_to="wandb", debug=True, **EVERY)
    train(recipe, tmp_path / "run")
    (run,), (call,) = wandb.runs, wandb.calls
    entries = log_of(tmp_path / "run")
    steps = [entry for entry in entries if entry["kind"] == "step"]
    assert "not_private" in steps[0], "debug logs it, and W&B must not get it"
    assert run.ended
    assert call["dir"] == str(tmp_path / "run")
    assert (call["project"], call["name"]) == ("dpoptim", "run")
    assert call["settings"] == {
        "x_disable_stats": True, "x_disable_meta": True, "console": "off", "disable_git": True, "disable_code": True,
    }  # fmt: skip
    assert [step for step, _ in run.rows] == [0, 1, 2, 3, 4, 5, 5]
    allowed = {
        "run/epsilon",
        "run/learning_rate",
        "run/seconds",
        *(f"released/{name}" for name in steps[0]["released"]),
    }
    held_out = {"held-out/loss", "held-out/accuracy", "held-out/perplexity"}
    for _, values in run.rows:
        assert set(values) <= allowed or set(values) <= held_out
    assert run.rows[1][1]["released/gradient_norm"] == steps[0]["released"]["gradient_norm"]
    assert run.described["epsilon"] == entries[0]["epsilon"]
    assert not {"validation_examples", "data", "label_names"} & set(run.described)


def test_wandb_gets_bundles_of_at_least_ten_steps(tmp_path, wandb):
    received: list[int] = []
    recipe = rows_recipe(tmp_path, steps=24, report_to="wandb", evaluate_every=24, log_every=1, checkpoint_every=1)

    class Watch(CrashAfter):
        def step(self, *, step: int, epsilon: float, seconds: float) -> None:
            received.append(len(wandb.runs[0].rows))

    train(recipe, tmp_path / "run", progress=Watch(99))
    arrivals = [step for step, (before, after) in enumerate(itertools.pairwise(received), 1) if after > before]
    assert arrivals == [10, 21], "steps 1 to 10 with the scores of step 0, then steps 11 to 21; the rest at the end"
    assert len(wandb.runs[0].rows) == 24 + 2


def test_wandb_gets_no_step_twice(tmp_path, wandb):
    recipe = rows_recipe(tmp_path, steps=24, report_to="wandb", evaluate_every=24, log_every=1, checkpoint_every=11)
    with pytest.raises(RuntimeError):
        train(recipe, tmp_path / "run", progress=CrashAfter(14))
    assert wandb.runs[0].ended
    kept = json.loads((tmp_path / "run" / "wandb.json").read_text())
    assert kept["id"] == "run-1"
    resume(tmp_path / "run")
    assert (wandb.calls[1]["id"], wandb.calls[1]["resume"]) == ("run-1", "allow")
    steps = [step for run in wandb.runs for step, values in run.rows if "run/epsilon" in values]
    assert steps == list(range(1, 25)), "steps 12 to 14 were repeated, and sent once"


def test_errors_of_wandb_are_one_line(tmp_path, wandb, monkeypatch):
    recipe = rows_recipe(tmp_path, steps=5, report_to=["wandb"])

    def init(**arguments: object) -> None:
        raise RuntimeError("api_key not configured\nmore")

    wandb.init = init
    with pytest.raises(OSError, match=r"W&B cannot start \(api_key not configured\).*offline.*is removed") as error:
        train(recipe, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="report_to='wandb' needs the package wandb; run: pip install wandb"):
        train(recipe, tmp_path / "other")


def test_targets_of_a_recipe(tmp_path):
    def targets(value: Any) -> object:
        return Recipe(model="mlp", data="d.csv", epsilon=1.0, report_to=value).report_to

    assert targets("tensorboard") == ("tensorboard",)
    assert targets(["wandb", "tensorboard"]) == ("wandb", "tensorboard")
    assert targets(["none"]) == targets([]) == ()
    with pytest.raises(ValueError, match="combines none with other names"):
        targets(["none", "wandb"])
    with pytest.raises(ValueError, match="'none', 'tensorboard', 'wandb', got 'mlflow'"):
        targets("mlflow")
    file = tmp_path / "recipe.toml"
    file.write_text(Recipe(model="mlp", data="d.csv", epsilon=1.0, report_to=("wandb",)).to_toml())
    assert read_recipe(file).report_to == ("wandb",)
    assert read_recipe(file, report_to=["none"]).report_to == ()
