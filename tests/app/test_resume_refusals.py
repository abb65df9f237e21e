"""A released step is repeated exactly, or not at all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dpoptim.app import Recipe, RunDirectory, resume, train
from dpoptim.app.cli.main import main
from dpoptim.app.models.prepared import Prepared
from dpoptim.app.runs.run_directory import checkpoints
from dpoptim.clipping import PrivateMechanism
from dpoptim.privacy.step_ledger import read_ledger, released_count
from tests.app.runs import (
    CrashAfter,
    StopAfter,
    copy_run,
    log_of,
    parameters_at,
    rows_recipe,
    same,
    write_bert,
    write_texts,
)


def crashed(folder: Path, *, at: int = 7, **changes: Any) -> Path:
    """A run of 9 steps with checkpoints at 0 and 5 that crashed after step `at`."""
    recipe = rows_recipe(folder, **{"steps": 9, "checkpoint_every": 5, "evaluate_every": 9, **changes})
    with pytest.raises(RuntimeError, match="the power failed"):
        train(recipe, folder / "run", progress=CrashAfter(at))
    return folder / "run"


def released(run: Path) -> int:
    return released_count(RunDirectory(run).steps_file)


# -- the records ---------------------------------------------------------------------------------------------------


def edit(lines: list[str], how: str) -> list[str]:
    header, rows = lines[0], lines[1:]
    if how == "one training row":
        rows[40] = "9.0,9.0,9.0,yes"
    elif how == "one label":
        rows[40] = rows[40][:-3] + "no" if rows[40].endswith("yes") else rows[40][:-2] + "yes"
    else:
        rows[3], rows[4] = rows[4], rows[3]
    return [header, *rows]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return crashed(tmp_path_factory.mktemp("settings"))


@pytest.mark.parametrize("how", ["one training row", "one label", "two swapped"])
def test_different_records_are_refused(how, run):
    file = run.parent / "rows.csv"
    before, log = file.read_text(), (run / "log.jsonl").read_bytes()
    file.write_text("\n".join(edit(before.splitlines(), how)) + "\n")
    with pytest.raises(ValueError, match="saved with different examples or user ids, or in a different order"):
        resume(run)
    assert (run / "log.jsonl").read_bytes() == log, "nothing was touched"
    file.write_text(before)


def test_a_different_tokenizer_is_refused(tmp_path):
    recipe = Recipe(
        model=write_bert(tmp_path / "bert"), data=write_texts(tmp_path / "texts.jsonl"), noise_multiplier=0.5,
        delta=1e-5, noise="independent", sampling="shuffled", batch_size=8, steps=3, checkpoint_every=3,
    )  # fmt: skip
    with pytest.raises(RuntimeError):
        train(recipe, tmp_path / "run", progress=CrashAfter(1))
    file = tmp_path / "bert" / "tokenizer.json"
    words = json.loads(file.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["fox"], vocabulary["the"] = vocabulary["the"], vocabulary["fox"]
    file.write_text(json.dumps(words))
    with pytest.raises(ValueError, match="saved with different examples"):
        resume(tmp_path / "run")


# -- the settings --------------------------------------------------------------------------------------------------


SETTINGS = {"learning_rate": 0.5, "seed": 3, "debug": "true", "betas": "[0.8, 0.999]", "warmup": 0.5, "epsilon": 9.0}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_edited_recipe_is_refused(name, run):
    file = RunDirectory(run).recipe_file
    before = file.read_text()
    kept = [line for line in before.splitlines() if not line.startswith(f"{name} =")]
    file.write_text("\n".join([*kept, f"{name} = {SETTINGS[name]}"]) + "\n")
    with pytest.raises(ValueError, match=f"setting {name} was .* when the run started and is .* now"):
        resume(run)
    file.write_text(before)


def test_an_edited_recipe_of_a_finished_run_is_refused(trained_run, tmp_path, capsys):
    copy = copy_run(trained_run, tmp_path / "run")
    assert main(["train", "--resume", str(copy.path)]) == 0
    before, plan = copy.recipe_file.read_text(), copy.plan_file.read_text()
    copy.recipe_file.write_text(re.sub(r"learning_rate = .*", "learning_rate = 0.123", before))
    capsys.readouterr()
    assert main(["train", "--resume", str(copy.path)]) == 2
    assert re.fullmatch(
        r"dpoptim: setting learning_rate was .+ when the run started and is 0\.123 now\. Undo the change, .*\n",
        capsys.readouterr().err,
    )
    copy.recipe_file.write_text(re.sub(r"log_every = .*", "log_every = 7", before))  # affects no release
    assert main(["train", "--resume", str(copy.path)]) == 0
    copy.plan_file.write_text(re.sub(r'"clip_norm": [0-9.]+', '"clip_norm": 0.01', plan))
    with pytest.raises(ValueError, match=r"plan clip_norm was .* when the run started and is 0\.01 now"):
        resume(copy.path)
    shutil.rmtree(copy.secret_folder)  # passed on without secrets
    assert resume(copy.path)["reason"] == "finished"


def test_an_edited_plan_is_refused(run):
    file = RunDirectory(run).plan_file
    before = file.read_text()
    file.write_text(re.sub(r'"noise_multiplier": [0-9.]+', '"noise_multiplier": 0.01', before))
    with pytest.raises(ValueError, match="a different privacy plan"):
        resume(run)
    file.write_text(before)


def test_settings_that_affect_no_release_may_change(tmp_path):
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


def perturb_losses(monkeypatch) -> None:
    """As on a different machine: the last bits of the losses differ."""
    own = Prepared.loss_per_example
    monkeypatch.setattr(Prepared, "loss_per_example", lambda self, *args: own(self, *args) * (1 + 2**-22))


def test_steps_with_different_gradients_are_not_repeated(tmp_path, monkeypatch):
    directory = crashed(tmp_path)
    assert released(directory) == 7
    with monkeypatch.context() as patched:
        perturb_losses(patched)
        with pytest.raises(ValueError, match="step 6 was released before with different gradients"):
            resume(directory)
    assert released(directory) == 7
    assert not [entry for entry in log_of(directory) if entry["kind"] == "step" and entry["step"] > 5]
    assert resume(directory)["reason"] == "finished", "unchanged, it resumes"


def test_run_resumes_on_a_different_machine_if_no_step_is_repeated(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    train(rows_recipe(tmp_path, steps=9, checkpoint_every=99), directory, progress=StopAfter(5))
    assert released(directory) == 5
    perturb_losses(monkeypatch)
    assert resume(directory)["reason"] == "finished"


def scale_weights(state: dict[str, Any]) -> None:
    for value in state["model"].values():
        value.mul_(1.5)


EDITS: dict[str, tuple[Any, str]] = {
    "weights": (scale_weights, "step 6 was released before"),
    "moments": (
        lambda state: next(iter(state["optimizer"]["state"].values()))["second_moment"].mul_(2),
        "step 6 was released before",
    ),
    "run_id": (lambda state: state["optimizer"]["privacy"].update(run_id="other"), 'run_id was .* is "other" now'),
    "step": (lambda state: state["optimizer"]["privacy"].update(step=3), "the optimizer at step 3"),
}


@pytest.mark.parametrize("how", EDITS)
def test_edited_checkpoint_cannot_repeat_a_step(how, run, tmp_path, monkeypatch):
    """Files are not authenticated: the ledger compares what a step would release."""
    change, error = EDITS[how]
    shutil.copytree(run.parent, tmp_path, dirs_exist_ok=True)
    recipe = RunDirectory(tmp_path / "run").recipe_file
    recipe.write_text(recipe.read_text().replace(str(run.parent), str(tmp_path)))
    file = tmp_path / "run" / "checkpoints" / "step-000005" / "state.pt"
    state = torch.load(file, weights_only=True)
    change(state)
    torch.save(state, file)
    noised: list[int] = []
    monkeypatch.setattr(PrivateMechanism, "_add_noise", lambda self, *args: noised.append(self.step))
    with pytest.raises(ValueError, match=error):
        resume(tmp_path / "run")
    assert noised == []


def test_an_older_checkpoint_repeats_the_same_run(tmp_path):
    recipe = rows_recipe(tmp_path, steps=9, checkpoint_every=5)
    train(recipe, tmp_path / "run")
    after = parameters_at(tmp_path / "run", 9)
    log = tmp_path / "run" / "log.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines() if '"end"' not in line))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000009")
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000005"]
    assert resume(tmp_path / "run")["reason"] == "finished"
    assert same(after, parameters_at(tmp_path / "run", 9))
    assert released(tmp_path / "run") == 9


def test_run_without_checkpoints_does_not_start_over(tmp_path):
    """With a new run_id the steps would have new noise, on top of those that were released."""
    directory = crashed(tmp_path)
    shutil.rmtree(directory / "checkpoints")
    (directory / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="records 7 released steps, and a new run would release them again"):
        resume(directory)
    assert released(directory) == 7


def test_step_is_on_disk_before_its_noise_is_drawn(tmp_path, monkeypatch):
    counts: list[tuple[int, int]] = []
    add_noise = PrivateMechanism._add_noise

    def counted(self: PrivateMechanism, *args: Any) -> None:
        if (tmp_path / "run.secret" / "noise.steps").is_file():  # not in the trial before the run
            counts.append((self.step, released(tmp_path / "run")))
        add_noise(self, *args)

    monkeypatch.setattr(PrivateMechanism, "_add_noise", counted)
    train(rows_recipe(tmp_path, steps=9, checkpoint_every=9, evaluate_every=9), tmp_path / "run")
    assert counts == [(step, step + 1) for step in range(9)]


def test_a_run_without_its_ledger_is_refused(run):
    file = RunDirectory(run).steps_file
    before = file.read_text()
    for text, error in (
        ("\n".join(before.splitlines()[:4]) + "\n", "records 3 steps, but the checkpoint is of step 5"),
        ("not a ledger\n", "cannot be read"),
        (None, "is missing"),
    ):
        file.unlink() if text is None else file.write_text(text)
        with pytest.raises(ValueError, match=rf"noise\.steps {error}"):
            resume(run)
    file.write_text(before)


def test_a_ledger_reveals_nothing_about_the_records(tmp_path):
    """Two runs over the same records have different digests, so nobody can guess records without the key."""
    for name in ("one", "two"):
        train(rows_recipe(tmp_path, steps=1), tmp_path / name)
    one, two = (read_ledger(RunDirectory(tmp_path / name).steps_file)[0] for name in ("one", "two"))
    assert one["data"] != two["data"]
