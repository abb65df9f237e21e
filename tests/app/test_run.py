"""Run directories: complete, in agreement with their plan, and not made at all if the input is wrong."""

from __future__ import annotations

import json
import os
import stat
import sys
import types

import numpy as np
import pytest
import torch
import transformers

import dpoptim
from dpoptim.app import (
    Recipe,
    RunDirectory,
    load_trained,
    prepare,
    prepare_run,
    read_recipe,
    read_records,
    resume,
    train,
)
from dpoptim.app.data.records import held_out_places
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.recipes.defaults import chosen_device
from dpoptim.app.runs.metrics import evaluate
from dpoptim.integrations.losses import Task
from tests.app.runs import COLUMNS, CrashAfter, log_of, rows_recipe, write_bert, write_rows, write_texts


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that every test reads."""
    folder = tmp_path_factory.mktemp("run")
    summary = train(rows_recipe(folder, variant="post_processing"), folder / "run")
    return RunDirectory(folder / "run"), summary


def test_directory_is_complete(finished):
    place, summary = finished
    names = {path.name for path in place.path.iterdir()}
    expected = {
        "recipe.toml", "plan.json", "statement.txt", "log.jsonl", "checkpoints", "model", "summary.json"
    }  # fmt: skip
    assert names == expected
    secret = place.path.with_name("run.secret")
    assert sorted(secret.iterdir()) == [place.key_file, place.steps_file]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (place.path, secret, place.key_file, place.steps_file)]
    assert modes == [0o700, 0o700, 0o600, 0o600]
    mask = os.umask(0o077)
    os.umask(mask)
    readable = {stat.S_IMODE(path.stat().st_mode) for path in place.model.iterdir()}
    assert readable == {0o666 & ~mask}, "a model is meant to be shared"
    assert stat.S_IMODE(place.model.stat().st_mode) == 0o777 & ~mask
    assert [path.name for path in sorted(place.checkpoints.iterdir())] == ["step-000010", "step-000020"]
    assert json.loads(place.summary_file.read_text()) == summary
    assert summary["reason"] == "finished"


def test_recipe_and_plan_agree(finished):
    place, _ = finished
    recipe = read_recipe(place.recipe_file)
    described = json.loads(place.plan_file.read_text())
    plan = dpoptim.PrivacyPlan.from_dict(described["plan"])
    assert (recipe.num_examples, recipe.batch_size, recipe.steps) == (114, 16, 20)
    assert (plan.num_examples, plan.batch_size, plan.steps, plan.delta) == (114, 16, 20, recipe.delta)
    assert recipe.epsilon is not None
    assert described["epsilon"] == plan.epsilon() <= recipe.epsilon
    assert place.statement_file.read_text() == plan.statement() + "\n"
    assert recipe.label_names == ("no", "yes")


def test_averaged_weights_are_scored_and_saved(tmp_path):
    place = RunDirectory(tmp_path / "run")
    summary = train(rows_recipe(tmp_path, averaged=0.9), place.path)
    state = torch.load(place.checkpoints / "step-000020" / "state.pt")
    averages = [own["average"] for own in state["optimizer"]["state"].values()]
    saved = dict(load_trained(place.path).named_parameters())
    for name, average in zip(saved, averages, strict=True):
        assert torch.equal(saved[name], average)
        assert not torch.equal(saved[name], state["model"][name])

    setup = prepare_run(read_recipe(place.recipe_file))
    setup.model.load_state_dict(load_trained(place.path).state_dict())
    assert setup.validation is not None
    scores = evaluate(setup.validation, setup.model, batch_tokens=2**16)
    assert summary["validation"]["last"]["loss"] == scores.loss


def test_log_holds_steps_scores_and_times(finished):
    place, _ = finished
    entries = log_of(place.path)
    kinds = [entry["kind"] for entry in entries]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    start, end = entries[0], entries[-1]
    assert (start["steps"], start["batch_size"], start["examples"], start["validation_examples"]) == (20, 16, 114, 6)
    assert start["resumed_from"] is None
    assert start["parameters"] == start["trained_parameters"] == 290
    assert (end["step"], end["reason"]) == (20, "finished")
    steps = [entry for entry in entries if entry["kind"] == "step"]
    assert [entry["step"] for entry in steps] == [1, 5, 10, 15, 20]
    assert all("not_private" not in entry for entry in steps), "training losses are for debugging alone"
    epsilons = [entry["epsilon"] for entry in steps]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == start["epsilon"]
    assert all(entry["released"]["gradient_norm"] > 0 for entry in steps)
    times = [entry["seconds"] for entry in steps]
    assert times[:2] == [None, None], "the time of fewer than ten steps reveals single batches"
    assert all(found > 0 and found == float(f"{found:.2g}") for found in times[2:])
    assert [entry["kind"] for entry in entries if "time" in entry] == ["start", "end"]
    scores = [entry for entry in entries if entry["kind"] == "evaluation"]
    assert [entry["step"] for entry in scores] == [0, 10, 20]
    assert all(entry["outside_guarantee"] and entry["examples"] == 6 for entry in scores)


def test_saved_model_is_the_trained_one(finished):
    place, summary = finished
    records = read_records(place.path.parent / "rows.csv", declared=COLUMNS)
    held_out = records.take(held_out_places(len(records), 0.05))
    prepared = prepare(task=Task.TABULAR_CLASSIFICATION, model="mlp", records=held_out)
    prepared.model.load_state_dict(torch.load(place.model / "model.pt"))
    found = dpoptim.app.evaluate(prepared)
    assert found.loss == pytest.approx(summary["validation"]["last"]["loss"], rel=1e-5)


def test_debug_logs_values_that_are_not_private(tmp_path):
    train(rows_recipe(tmp_path, debug=True, steps=5, clip_norm=0.1), tmp_path / "run")
    steps = [entry for entry in log_of(tmp_path / "run") if entry["kind"] == "step"]
    for entry in steps:
        assert entry["not_private"].keys() == {"loss", "clipped_fraction", "nonfinite"}
        assert 0 < entry["not_private"]["loss"] < 5
        assert 0 < entry["not_private"]["clipped_fraction"] <= 1


@pytest.mark.slow
def test_language_model_with_default_settings(tmp_path):
    model = write_bert(tmp_path / "bert")
    recipe = Recipe(model=model, data=write_texts(tmp_path / "texts.jsonl", 80), epsilon=8.0, steps=6)
    summary = train(recipe, tmp_path / "run")
    settled = read_recipe(tmp_path / "run" / "recipe.toml")
    assert settled.task == "masked-lm"
    assert (settled.variant, settled.batch_size, settled.delta) == ("scale_then_privatize", 8, 1e-3)
    assert settled.sampling == "shuffled"
    assert settled.noise != "auto"
    assert summary["epsilon"] <= 8.0
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    assert sum(p.numel() for p in again.parameters()) > 1000
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")) > 50


def test_lora_trains_in_bf16(tmp_path):
    recipe = Recipe(
        model=write_bert(tmp_path / "bert"), data=write_texts(tmp_path / "texts.jsonl"), noise_multiplier=0.5,
        lora_rank=2, dtype="bf16", steps=2, batch_size=8, validation_fraction=0.0, noise="independent",
        sampling="shuffled",
    )  # fmt: skip
    summary = train(recipe, tmp_path / "run")
    start = log_of(tmp_path / "run")[0]
    assert 0 < start["trained_parameters"] < start["parameters"]
    assert summary["validation"] is None
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()


def test_held_out_records_never_enter_training(tmp_path):
    setup = prepare_run(rows_recipe(tmp_path, validation_fraction=0.25))
    records = read_records(tmp_path / "rows.csv", declared=COLUMNS)
    out = held_out_places(120, 0.25)
    assert len(out) == 30
    assert setup.validation is not None
    kept, other = setup.prepared.records.features, setup.validation.records.features
    assert records.features is not None
    assert kept is not None
    assert other is not None
    assert (other == records.features[out]).all()
    assert len(kept) == 90 == setup.plan.num_examples
    rows = {tuple(row) for row in kept}
    assert not any(tuple(row) in rows for row in other)
    # the rule looks at places alone: other contents, the same places
    assert (held_out_places(120, 0.25) == out).all()


def test_validation_data_is_not_the_training_data(tmp_path):
    recipe = rows_recipe(tmp_path, validation_data=str(tmp_path / "." / "rows.csv"))
    with pytest.raises(ValueError, match="is the training data; give other records"):
        prepare_run(recipe)


def test_copies_of_the_training_data_are_refused(tmp_path):
    """As a link, as a copy in a different order, and in part."""
    rows = write_rows(tmp_path / "rows.csv")
    header, *lines = (tmp_path / "rows.csv").read_text().splitlines()
    (tmp_path / "link.csv").symlink_to(rows)
    (tmp_path / "copy.csv").write_text("\n".join([header, *lines[::-1]]) + "\n")
    (tmp_path / "part.csv").write_text("\n".join([header, *lines[:60]]) + "\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "rows.csv").write_text((tmp_path / "rows.csv").read_text())
    (folder / "more.csv").write_text("\n".join([header, "9,9,9,yes", "8,8,8,no"]) + "\n")
    for data, validation, why in (
        (rows, tmp_path / "link.csv", "is the training data; "),
        (rows, tmp_path / "copy.csv", "are training records"),
        (rows, tmp_path / "part.csv", "all 60 records of .* are training records"),
    ):
        with pytest.raises(ValueError, match=why):
            prepare_run(rows_recipe(tmp_path, data=str(data), validation_data=str(validation)))
    found = prepare_run(rows_recipe(tmp_path, data=str(folder / "rows.csv"), validation_data=str(folder / "more.csv")))
    assert found.notes == ["2 classes read from the data: no, yes"], "no shared records"


def test_equal_rows_of_small_tables_are_allowed(tmp_path):
    generator = np.random.default_rng(0)
    rows = [",".join(map(str, generator.integers(0, 2, 4))) for _ in range(140)]
    for name, part in (("rows.csv", rows[:100]), ("other.csv", rows[100:])):
        (tmp_path / name).write_text("\n".join(["a,b,c,label", *part]) + "\n")
    recipe = rows_recipe(tmp_path).replace(data=str(tmp_path / "rows.csv"))
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,c,label", *rows[:100]]) + "\n")
    found = prepare_run(recipe.replace(validation_data=str(tmp_path / "other.csv")))
    assert "40 of the 40 records of validation_data are also training records" in found.notes[0]


def test_records_in_both_sources_are_counted(tmp_path):
    rows = write_rows(tmp_path / "rows.csv")
    header, *lines = (tmp_path / "rows.csv").read_text().splitlines()
    flipped = lines[7].replace("yes", "no") if lines[7].endswith("yes") else lines[7].replace("no", "yes")
    (tmp_path / "other.csv").write_text("\n".join([header, lines[3], flipped, "9,9,9,yes"]) + "\n")
    setup = prepare_run(rows_recipe(tmp_path, data=rows, validation_data=str(tmp_path / "other.csv")))
    assert setup.notes[0].startswith("2 of the 3 records of validation_data are also training records")
    train(setup.recipe.replace(steps=2), tmp_path / "run")
    written = "".join(path.read_text() for path in (tmp_path / "run").glob("*.json*"))
    assert "shared" not in written, "the number reveals single records: it is printed, not written"


@pytest.mark.parametrize(
    ("name", "count", "use"),
    [
        ("cuda:7", 1, "auto, cpu, cuda:0"),
        ("cuda:2", 2, "auto, cpu, cuda:0, cuda:1"),
        ("cuda", 0, "auto, cpu"),
        ("mps", 0, "auto, cpu"),
        ("nonsense", 1, "auto, cpu"),
        ("cuda:-1", 1, "auto, cpu"),
    ],
)
def test_missing_device_is_refused(name, count, use, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError, match=f"^device='{name}' is not available here; use {use}"):
        chosen_device(name)


def test_available_device_is_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("cuda", "cuda:0", "cuda:1", "cpu"):
        assert chosen_device(name) == torch.device(name)
    assert chosen_device("auto") == torch.device("cuda")


class Never(ProgressReporter):
    def begin(self, **values) -> None:
        raise AssertionError("training began")


def refused(recipe: Recipe, tmp_path, match: str) -> None:
    before = set(tmp_path.iterdir())
    with pytest.raises(ValueError, match=match) as error:
        train(recipe, tmp_path / "run", progress=Never())
    assert "\n" not in str(error.value)
    assert set(tmp_path.iterdir()) == before, "something was written"


def test_bad_data_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    good = rows_recipe(tmp_path)
    refused(good.replace(data=str(tmp_path / "absent.csv")), tmp_path, "does not exist")
    refused(good.replace(label_column="colour"), tmp_path, "label_column='colour' is not a column")
    refused(good.replace(batch_size=500), tmp_path, "batch_size <= num_examples")
    refused(good.replace(num_examples=100), tmp_path, "there are 114 training records")
    refused(good.replace(device="cuda:9"), tmp_path, "device='cuda:9'")
    refused(good.replace(text_column="a"), tmp_path, "text_column='a' is not used by tabular-classification")
    refused(good.replace(noise="buffered-toeplitz:2", sampling="poisson"), tmp_path, "no proof")
    refused(good.replace(eps_scale=1.0, variant="dp_sgd"), tmp_path, "eps_scale")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    refused(good.replace(report_to="tensorboard"), tmp_path, "needs the package tensorboard")
    (tmp_path / "empty.csv").write_text("a,b,label\n")
    refused(good.replace(data=str(tmp_path / "empty.csv")), tmp_path, "no records")
    refused(good.replace(model=str(tmp_path / "no-model"), task=None), tmp_path, "does not exist")


def test_directory_that_cannot_be_written_is_refused(tmp_path):
    recipe = rows_recipe(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a writable folder"):
        train(recipe, tmp_path / "file" / "run", progress=Never())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("")
    with pytest.raises(ValueError, match="already exists; choose a different name"):
        train(recipe, tmp_path / "full", progress=Never())
    (tmp_path / "run.secret").mkdir()
    refused(recipe, tmp_path, "holds the key of an earlier run")


def test_model_that_mixes_examples_is_refused(tmp_path):
    """A ResNet normalises over the batch."""
    from PIL import Image

    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (16, 16), (number, 20 * number, 7)).save(tmp_path / "images" / label / f"{number}.png")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic")
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "resnet")
    recipe = Recipe(
        model=str(tmp_path / "resnet"), data=str(tmp_path / "images"), epsilon=8.0, image_size=16, noise="independent"
    )
    refused(recipe, tmp_path, "mixes examples")


def test_add_remove_needs_a_declared_size(tmp_path):
    data = write_rows(tmp_path / "rows.csv")
    recipe = Recipe(
        model="mlp", data=data, columns=COLUMNS, noise_multiplier=1.0, adjacency="add_remove", num_examples=150,
        steps=3, batch_size=16, noise="independent", sampling="poisson",
    )  # fmt: skip
    summary = train(recipe, tmp_path / "run")
    assert (summary["examples"], summary["validation"]) == (150, None)


def test_tensorboard_has_each_step_once(tmp_path, monkeypatch):
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "run" / "tensorboard")
            written.clear()

        def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
            assert walltime == 0.0
            written.append((name, value, step))

        def flush(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "tensorboard", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    (tmp_path / "run").mkdir()
    every = {"evaluate_every": 5, "log_every": 1, "checkpoint_every": 2}
    recipe = rows_recipe(tmp_path, steps=5, report_to="tensorboard", **every)
    with pytest.raises(RuntimeError):
        train(recipe, tmp_path / "run", progress=CrashAfter(3))
    (tmp_path / "run" / "tensorboard").mkdir()
    (tmp_path / "run" / "tensorboard" / "events").write_text("steps 1 to 3")
    resume(tmp_path / "run")
    entries = log_of(tmp_path / "run")
    assert [step for name, _, step in written if name == "run/epsilon"] == [1, 2, 3, 4, 5], "one version of each step"
    assert not (tmp_path / "run" / "tensorboard").exists(), "events of later steps are removed"
    last = [entry for entry in entries if entry["kind"] == "step"][-1]
    assert ("released/gradient_norm", last["released"]["gradient_norm"], 5) in written
    assert ("run/epsilon", last["epsilon"], 5) in written
    assert ("held-out/loss", entries[-3]["loss"], 5) in written
    assert not any("loss" in name for name, _, _ in written if not name.startswith("held-out"))
