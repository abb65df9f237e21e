"""A step that was released is computed again exactly as it was, or not at all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpoptim.app import Recipe, RunDirectory, resume, train
from dpoptim.app.models.prepared import Prepared
from dpoptim.app.runs.checkpoints import checkpoints
from dpoptim.clipping import PrivateMechanism
from dpoptim.privacy.step_ledger import released_count
from tests.app.runs import (
    CrashAfter,
    StopAfter,
    log_of,
    parameters_at,
    rows_recipe,
    same,
    write_bert,
    write_texts,
)


def crashed(folder: Path, *, at: int = 7, **changes: Any) -> Path:
    """A run of 9 steps with checkpoints at 0 and 5 whose power went after step `at`."""
    recipe = rows_recipe(folder, **{"steps": 9, "checkpoint_every": 5, "evaluate_every": 9, **changes})
    with pytest.raises(RuntimeError, match="the power went"):
        train(recipe, folder / "run", progress=CrashAfter(at))
    return folder / "run"


def released(run: Path) -> int:
    return released_count(RunDirectory(run).steps_file)


# -- the records ---------------------------------------------------------------------------------------------------


def edit(lines: list[str], how: str) -> list[str]:
    header, rows = lines[0], lines[1:]
    if how == "one training row":
        rows[40] = "9.0,9.0,9.0,yes"
    elif how == "one held-out row":
        rows[19] = "9.0,9.0,9.0,yes"
    elif how == "one label":
        rows[40] = rows[40][:-3] + "no" if rows[40].endswith("yes") else rows[40][:-2] + "yes"
    elif how == "rotated":
        rows = [*rows[1:], rows[0]]
    elif how == "two swapped":
        rows[3], rows[4] = rows[4], rows[3]
    else:
        rows = [f"{row_number}.5,1,2,{'yes' if row_number % 2 else 'no'}" for row_number in range(len(rows))]
    return [header, *rows]


@pytest.mark.parametrize("how", ["one training row", "one label", "one held-out row", "rotated", "two swapped", "all"])
def test_other_records_are_refused(how, tmp_path):
    run = crashed(tmp_path)
    file = tmp_path / "rows.csv"
    before, log = file.read_text(), (run / "log.jsonl").read_bytes()
    file.write_text("\n".join(edit(before.splitlines(), how)) + "\n")
    kind = "held-out" if how == "one held-out row" else "training"
    with pytest.raises(ValueError, match=f"the {kind} records are not those that the run was begun with") as refused:
        resume(run)
    assert "\n" not in str(refused.value)
    assert (run / "log.jsonl").read_bytes() == log, "nothing was touched"
    file.write_text(before)
    assert resume(run)["reason"] == "finished"


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("texts")
    recipe = Recipe(
        model=write_bert(folder / "bert"), data=write_texts(folder / "texts.jsonl"), noise_multiplier=0.5, delta=1e-5,
        noise="independent", sampling="poisson", batch_size=8, steps=3, checkpoint_every=3,
    )  # fmt: skip
    with pytest.raises(RuntimeError):
        train(recipe, folder / "run", progress=CrashAfter(1))
    return folder


def test_records_that_are_tokenised_otherwise_are_refused(texts):
    file = texts / "bert" / "tokenizer.json"
    before = file.read_text()
    words = json.loads(before)
    vocabulary = words["model"]["vocab"]
    vocabulary["fox"], vocabulary["the"] = vocabulary["the"], vocabulary["fox"]
    file.write_text(json.dumps(words))
    with pytest.raises(ValueError, match="training records are not those"):
        resume(texts / "run")
    file.write_text(before)


def test_another_dropout_is_refused(texts, tmp_path):
    file = texts / "bert" / "config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "attention_probs_dropout_prob": 0.4}))
    with pytest.raises(ValueError, match="the model's build"):
        resume(texts / "run")
    file.write_text(before)
    shutil.copytree(texts / "run", tmp_path / "run")  # the other tests want it unfinished
    assert resume(tmp_path / "run")["reason"] == "finished"


# -- the settings --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return crashed(tmp_path_factory.mktemp("settings"))


SETTINGS = {
    "learning_rate": 0.5, "schedule": '"cosine"', "seed": 3, "weight_decay": 0.1, "clip_norm": 0.5, "delta": 1e-7,
    "debug": "true", "betas": "[0.8, 0.999]", "warmup": 0.5, "eps": 1e-3, "eps_scale": 1e-3,
    "variant": '"post_processing"', "epsilon": 9.0,
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_an_edited_recipe_is_refused(name, run):
    file = RunDirectory(run).recipe_file
    before = file.read_text()
    kept = [line for line in before.splitlines() if not line.startswith(f"{name} =")]
    file.write_text("\n".join([*kept, f"{name} = {SETTINGS[name]}"]) + "\n")
    with pytest.raises(ValueError, match=rf"{name} was .*: a run keeps the settings it was begun with") as refused:
        resume(run)
    assert "\n" not in str(refused.value)
    file.write_text(before)


def test_an_edited_plan_is_refused(run):
    file = RunDirectory(run).plan_file
    before = file.read_text()
    file.write_text(re.sub(r'"noise_multiplier": [0-9.]+', '"noise_multiplier": 0.01', before))
    with pytest.raises(ValueError, match="plan has changed"):
        resume(run)
    file.write_text(before)


def test_what_changes_no_release_may_change(tmp_path):
    directory = crashed(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows.csv").rename(tmp_path / "elsewhere" / "same.csv")
    recipe = RunDirectory(directory).recipe_file
    text = recipe.read_text().replace(str(tmp_path / "rows.csv"), str(tmp_path / "elsewhere" / "same.csv"))
    for name in ("log_every", "checkpoint_every", "evaluate_every"):
        text = re.sub(rf"{name} = \d+", f"{name} = 2", text)
    recipe.write_text(text)
    assert resume(directory)["reason"] == "finished"
    assert [entry["step"] for entry in log_of(directory) if entry["kind"] == "step"][-3:] == [6, 8, 9]


# -- steps that were released --------------------------------------------------------------------------------------


def otherwise(monkeypatch) -> None:
    """As on another machine: the last bits of the losses are others."""
    own = Prepared.loss_per_example
    monkeypatch.setattr(Prepared, "loss_per_example", lambda self, *args: own(self, *args) * (1 + 2**-22))


def test_steps_that_come_out_otherwise_are_not_repeated(tmp_path, monkeypatch):
    directory = crashed(tmp_path)
    before = released(directory)
    assert before == 7
    with monkeypatch.context() as patched:
        otherwise(patched)
        with pytest.raises(
            ValueError, match="step 6 was released before, and its gradients come out otherwise now"
        ) as no:
            resume(directory)
    assert "\n" not in str(no.value)
    assert released(directory) == before
    assert not [entry for entry in log_of(directory) if entry["kind"] == "step" and entry["step"] > 5]
    assert resume(directory)["reason"] == "finished", "as it was, it goes on"


def test_a_run_goes_on_elsewhere_where_nothing_is_repeated(tmp_path, monkeypatch):
    """Where the last checkpoint is the last step; then each step is held to where it was computed."""
    directory = tmp_path / "run"
    train(rows_recipe(tmp_path, steps=9, checkpoint_every=99), directory, progress=StopAfter(5))
    assert released(directory) == 5
    with monkeypatch.context() as patched:
        otherwise(patched)
        with pytest.raises(RuntimeError):
            resume(directory, progress=CrashAfter(8))
    with pytest.raises(ValueError, match="step 6 was released before"):
        resume(directory)
    otherwise(monkeypatch)
    assert resume(directory)["reason"] == "finished"


def test_an_older_checkpoint_repeats_the_same_run(tmp_path):
    recipe = rows_recipe(tmp_path, steps=9, checkpoint_every=5, sampling="poisson")
    train(recipe, tmp_path / "run")
    after = parameters_at(tmp_path / "run", 9)
    log = tmp_path / "run" / "log.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines() if '"end"' not in line))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000009")
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000005"]
    assert resume(tmp_path / "run")["reason"] == "finished"
    assert same(after, parameters_at(tmp_path / "run", 9))
    assert released(tmp_path / "run") == 9


def test_a_run_without_its_checkpoints_does_not_begin_again(tmp_path):
    """Under a new run_id the steps would have other noise, and nobody would count those that were released."""
    directory = crashed(tmp_path)
    shutil.rmtree(directory / "checkpoints")
    (directory / "checkpoints").mkdir()
    (directory / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no checkpoint left, and beginning again would release") as error:
        resume(directory)
    assert "\n" not in str(error.value)
    assert released(directory) == 7


def test_the_disk_has_a_step_before_its_noise_is_made(tmp_path, monkeypatch):
    counts: list[tuple[int, int]] = []
    add_noise = PrivateMechanism._add_noise

    def counted(self: PrivateMechanism, *args: Any) -> None:
        if (tmp_path / "run" / "noise.steps").is_file():  # not in the trial before the run
            counts.append((self.step, released(tmp_path / "run")))
        add_noise(self, *args)

    monkeypatch.setattr(PrivateMechanism, "_add_noise", counted)
    train(rows_recipe(tmp_path, steps=9, checkpoint_every=9, evaluate_every=9), tmp_path / "run")
    assert counts == [(step, step + 1) for step in range(9)]


def test_a_run_without_its_steps_is_refused(tmp_path):
    directory = crashed(tmp_path)
    file = RunDirectory(directory).steps_file
    before = file.read_text()
    file.write_text(before.replace('"learning_rate": 0.01', '"learning_rate": 0.02'))
    with pytest.raises(ValueError, match=r"noise\.steps was edited"):
        resume(directory)
    lines = before.splitlines()
    file.write_text("\n".join(lines[:5]) + "\n")  # fewer steps than the checkpoint has
    with pytest.raises(ValueError, match=r"the checkpoint is of step 5 and .* has 3 steps"):
        resume(directory)
    file.write_text("not a count")
    with pytest.raises(ValueError, match=r"noise\.steps cannot be read"):
        resume(directory)
    file.unlink()
    with pytest.raises(ValueError, match=r"noise\.steps is missing"):
        resume(directory)


def test_nothing_in_a_run_tells_of_its_records(tmp_path):
    """Two runs over the same records have other digests: without the key they cannot be guessed."""
    digests = []
    for name in ("one", "two"):
        train(rows_recipe(tmp_path, steps=1), tmp_path / name)
        digests.append(json.loads(RunDirectory(tmp_path / name).steps_file.read_text().splitlines()[0])["records"])
    assert digests[0].keys() == digests[1].keys() == {"training", "held-out"}
    assert not set(digests[0].values()) & set(digests[1].values())
