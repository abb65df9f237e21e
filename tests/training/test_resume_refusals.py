"""A step that was released is computed again exactly as it was, or not at all."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dpoptim.gradients import PrivateRelease, compiled_outer
from dpoptim.noise import NoiseKey
from dpoptim.noise.compiled import compiler_version
from dpoptim.privacy import RunIdentity
from dpoptim.training import Recipe, RunDirectory, resume, train
from dpoptim.training.runs import identity
from dpoptim.training.runs.checkpoints import checkpoints
from tests.training.runs import (
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
    return int(RunDirectory(run).steps_file.read_text().splitlines()[0])


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


def test_another_dropout_is_refused(texts):
    file = texts / "bert" / "config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "attention_probs_dropout_prob": 0.4}))
    with pytest.raises(ValueError, match="the model's build"):
        resume(texts / "run")
    file.write_text(before)
    assert resume(texts / "run")["reason"] == "finished"


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


def elsewhere(monkeypatch, **changes: Any) -> None:
    own = identity.surroundings_of
    monkeypatch.setattr(identity, "surroundings_of", lambda device: {**own(device), **changes})


@pytest.mark.parametrize("changes", [{"device": "NVIDIA H200"}, {"torch": "9.9"}, {"dpoptim": "9"}, {"threads": 99}])
def test_steps_are_repeated_only_where_they_were_computed(changes, run, monkeypatch):
    elsewhere(monkeypatch, **changes)
    (name,) = changes
    with pytest.raises(ValueError, match=f"may only be repeated as it was, and {name} was .* and is"):
        resume(run)


def test_compiled_loops_are_part_of_the_surroundings(monkeypatch):
    """They sum in another order than torch does."""
    found = {}
    for loops in (ctypes.CDLL(None), None):
        monkeypatch.setattr(compiled_outer, "_loops", lambda loops=loops: loops)
        found[loops is not None] = identity.surroundings_of(torch.device("cpu"))
    assert found[True]["compiled loops"] is True
    assert found[True] == {**found[False], "compiled loops": True, "compiler": compiler_version()}
    assert found[False]["compiler"] is None
    assert found[False]["compiled loops"] is False


def test_steps_are_repeated_only_as_they_were_cut(run):
    file = RunDirectory(run).recipe_file
    before = file.read_text()
    file.write_text(re.sub(r"micro_batch_size = \d+", "micro_batch_size = 5", before))
    with pytest.raises(ValueError, match="micro_batch_size was 1024 and is 5"):
        resume(run)
    file.write_text(before)


def test_a_run_goes_on_elsewhere_where_nothing_is_repeated(tmp_path, monkeypatch):
    """Where the last checkpoint is the last step; behind it, every part of the run is held to its own device."""
    directory = tmp_path / "run"
    train(rows_recipe(tmp_path, steps=9, checkpoint_every=99), directory, progress=StopAfter(5))
    assert released(directory) == 5
    shutil.copytree(directory / "checkpoints" / "step-000005", tmp_path / "fifth")
    with monkeypatch.context() as patched:
        elsewhere(patched, device="NVIDIA H200")
        with pytest.raises(RuntimeError):
            resume(directory, progress=CrashAfter(8))
    with pytest.raises(ValueError, match='device was "NVIDIA H200" and is "cpu"'):
        resume(directory)
    shutil.rmtree(directory / "checkpoints" / "step-000005")
    elsewhere(monkeypatch, device="NVIDIA H200")
    with pytest.raises(ValueError, match='device was "cpu" and is "NVIDIA H200"'):
        resume(directory)  # from step 0 on
    shutil.copytree(tmp_path / "fifth", directory / "checkpoints" / "step-000005")
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


def test_the_disk_counts_a_step_before_its_noise_is_made(tmp_path, monkeypatch):
    counts: list[tuple[int, int]] = []
    add_noise = PrivateRelease._add_noise

    def counted(self: PrivateRelease, *args: Any) -> None:
        files = list(tmp_path.glob("run/noise.steps"))
        if files:  # not in the trial before the run
            counts.append((self.step, int(files[0].read_text().splitlines()[0])))
        add_noise(self, *args)

    monkeypatch.setattr(PrivateRelease, "_add_noise", counted)
    train(rows_recipe(tmp_path, steps=40, checkpoint_every=40, evaluate_every=40), tmp_path / "run")
    assert [step for step, _ in counts] == list(range(40))
    assert all(step < on_disk <= step + 16 for step, on_disk in counts)
    assert released(tmp_path / "run") == 40, "exact once it is closed"


def test_a_run_without_its_count_is_refused(tmp_path):
    directory = crashed(tmp_path)
    file = RunDirectory(directory).steps_file
    before = file.read_text()
    for changed in (f"{3:020d}" + before[20:], before.replace('"learning_rate": 0.01', '"learning_rate": 0.02')):
        assert changed != before
        file.write_text(changed)
        with pytest.raises(ValueError, match=r"noise\.steps was edited"):
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
        digests.append(json.loads(RunDirectory(tmp_path / name).steps_file.read_text().splitlines()[2])["records"])
    assert digests[0].keys() == digests[1].keys() == {"training", "held-out"}
    assert not set(digests[0].values()) & set(digests[1].values())


def test_an_identity_is_plain_values():
    found = RunIdentity(key=NoiseKey.generate(), settings={"betas": (0.9, 0.99)}, records={}, surroundings={})
    assert json.loads(json.dumps(found.settings)) == {"betas": [0.9, 0.99]}
