"""`dpoptim train` with a user column: sizes, held-out users, statement, resuming and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpoptim.app import Recipe, RunDirectory, resume, train
from dpoptim.app.cli import main
from dpoptim.app.data.records import read_records
from dpoptim.app.runs.setup import prepare_run, records_of
from dpoptim.integrations.losses import Task
from tests.app.runs import StopAfter, fixed_keys, parameters_at, rows_recipe, same

USERS = 40


def write_visits(path: Path, *, blank: int | None = None) -> str:
    """A table of visits, between one and seven of each patient, in no order."""
    generator = np.random.default_rng(0)
    owners = generator.permutation(np.repeat(np.arange(USERS), 1 + np.arange(USERS) % 7))
    rows = generator.normal(size=(len(owners), 3))
    names = [f"patient-{owner * 37}" if place != blank else "" for place, owner in enumerate(owners)]
    lines = [
        f"{a:.4f},{name},{b:.4f},{c:.4f},{'yes' if a + b > 0 else 'no'}"
        for name, (a, b, c) in zip(names, rows, strict=True)
    ]
    path.write_text("\n".join(["a,patient,b,c,label", *lines]) + "\n")
    return str(path)


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    own = {
        "data": write_visits(folder / "visits.csv"),
        "user_column": "patient",
        "records_per_user": 3,
        "batch_size": 8,
    }
    return rows_recipe(folder, **{**own, **changes})


def test_a_run_counts_users_and_holds_out_whole_users(tmp_path):
    recipe = recipe_of(tmp_path, validation_fraction=0.2)
    training, held_out = records_of(recipe, Task.TABULAR_CLASSIFICATION)
    assert held_out is not None
    assert training.users is not None
    assert held_out.users is not None
    assert "patient" not in " ".join(training.feature_names)
    assert not {*training.users} & {*held_out.users}
    assert (len({*training.users}), len({*held_out.users})) == (32, 8)
    summary = train(recipe, tmp_path / "run")
    assert summary["reason"] == "finished"
    place = RunDirectory(tmp_path / "run")
    plan = place.read_plan()
    assert (plan.num_examples, plan.unit, plan.records_per_user) == (32, "user", 3)
    statement = place.statement_file.read_text()
    assert "one user (all records with one id)" in statement
    assert "patient-" not in statement
    for file in place.path.rglob("*"):  # ids are in no file of the run
        assert not file.is_file() or b"patient-" not in file.read_bytes()
    assert main(["audit", str(place.path), "--canaries", "300"]) == 0


def test_a_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    fixed_keys(monkeypatch)
    recipe = recipe_of(tmp_path, sampling="poisson", micro_batch_size=7)
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "parts", progress=StopAfter(13))
    resume(tmp_path / "parts")
    assert same(parameters_at(tmp_path / "whole", 20), parameters_at(tmp_path / "parts", 20))


def test_a_run_does_not_resume_with_other_users(tmp_path):
    recipe = recipe_of(tmp_path)
    train(recipe, tmp_path / "run", progress=StopAfter(13))
    data = Path(recipe.data)
    lines = data.read_text().splitlines()
    first, second = (lines[place].split(",") for place in (1, 2))
    assert first[1] != second[1]
    first[1], second[1] = second[1], first[1]
    data.write_text("\n".join([lines[0], ",".join(first), ",".join(second), *lines[3:]]) + "\n")
    with pytest.raises(ValueError, match="saved with different examples or user ids"):
        resume(tmp_path / "run")


def test_texts_have_users_too(tmp_path):
    rows = [{"text": f"record {number}", "author": number // 3} for number in range(9)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_records(tmp_path / "texts.jsonl", user_column="author")
    assert found.users == [number // 3 for number in range(9)]
    assert found.take([8, 0]).users == [2, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"records_per_user": None}, "user_column='patient' and records_per_user=None do not match"),
        ({"user_column": None}, "user_column=None and records_per_user=3 do not match"),
        ({"user_column": "nobody"}, "user_column='nobody' is not a column; the columns are a, patient, b, c, label"),
        ({"delta": 0.1}, r"delta=0.1 is not below 1/38"),
        ({"num_examples": 500}, "num_examples=500, but there are 38 training users"),
        ({"batch_size": 39}, "batch_size <= num_examples, got 39 > 38"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare_run(recipe_of(tmp_path, **changes))


def test_a_record_without_a_user_is_named(tmp_path):
    recipe = recipe_of(tmp_path)
    write_visits(Path(recipe.data), blank=4)
    with pytest.raises(ValueError, match=r"user_column='patient' has 1 records without a user \(first: .*record 5\)"):
        prepare_run(recipe)


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (("NA", "p"), "has 1 records without a user"),
        (("p", "NaN"), "has 1 records without a user"),
        (
            ("12", "12.0"),
            r"has 1 ids such as 12\.0 that also occur as 12 \(first: .*record 2\); write each id in one way",
        ),
    ],
)
def test_missing_users_and_users_with_two_ids_are_refused(tmp_path, ids, named):
    file = tmp_path / "visits.csv"
    file.write_text("a,patient,label\n" + "".join(f"1,{own},yes\n" for own in ids))
    declared = {"a": {"low": 0, "high": 1}}
    with pytest.raises(ValueError, match=named):
        read_records(file, user_column="patient", declared=declared)
    file.write_text("a,patient,label\n1,12.0,yes\n2,p.0,no\n2,p,no\n")
    assert read_records(file, user_column="patient", declared=declared).users == ["12.0", "p.0", "p"]


def test_users_in_training_and_validation_data_are_noted(tmp_path):
    held_out = tmp_path / "other.csv"
    held_out.write_text("a,b,c,label,patient\n1,2,3,yes,patient-37\n2,1,0,no,new\n")
    setup = prepare_run(recipe_of(tmp_path, validation_data=str(held_out)))
    assert any("1 users have records in both" in note for note in setup.notes)


def test_dry_run_speaks_of_users(tmp_path, capsys):
    data = write_visits(tmp_path / "visits.csv")
    train_on = ["train", "--model", "mlp", "--data", data, "--epsilon", "8", "--steps", "4", "--batch-size", "8"]
    train_on += ["--columns", "a=-3:3", "b=-3:3", "c=-3:3"]
    assert main([*train_on, "--user-column", "patient", "--records-per-user", "2", "--dry-run", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert "38 training users" in printed
    assert "steps of 8 users, at most 2 records of each, with" in printed
    assert "Protected:          one user" in printed
    assert main([*train_on, "--user-column", "patient", "--records-per-user", "40", "--dry-run"]) == 0, "any number"


def test_plan_speaks_of_users(capsys):
    sizes = ["--steps", "20", "--batch-size", "50", "--num-examples", "1000", "--epsilon", "8", "--delta", "1e-5"]
    assert main(["plan", *sizes, "--records-per-user", "6"]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # lines may be wrapped
    assert "steps of 50 from 1,000 users" in printed
    assert "unit='user', records_per_user=6" in printed
    assert main(["plan", *sizes, "--records-per-user", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unit"] == "user"
    assert main(["audit", *sizes, "--records-per-user", "6", "--canaries", "500", "--variant", "dp_sgd"]) == 0
    assert "adjacency of users" in capsys.readouterr().out
