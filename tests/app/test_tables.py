"""Tables: how columns are declared and encoded, one record at a time; runs on them; predictions."""

from __future__ import annotations

import csv
import json
import random
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpoptim.app import load_trained, prepare_run, read_log, read_recipe, resume, train
from dpoptim.app.cli import main
from dpoptim.app.data import estimates
from dpoptim.app.data.readers import record_number
from dpoptim.app.data.tables import encode_table, is_missing
from dpoptim.app.recipes.columns import Categories, Number, column_of
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.predict import predict
from dpoptim.app.runs.run_directory import RunDirectory
from tests.app.runs import StopAfter

DECLARED: dict[str, Any] = {
    "age": {"low": 0, "high": 100},
    "ward": ["a", "b"],
    "dose": {"center": 10, "scale": 5},
}
NAMES = ("age", "age (missing)", "ward = a", "ward = b", "ward (other)", "ward (missing)", "dose", "dose (missing)")
SETTINGS: dict[str, Any] = {"noise": "independent", "sampling": "shuffled", "batch_size": 64, "epochs": 4}


def write_patients(path: Path, *, count: int = 400, seed: int = 0) -> str:
    """Rows with missing numbers, rare wards, dates, a class, and a number that follows from the dose."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "ward", "dose", "admitted", "stay", "outcome"])
        for _ in range(count):
            age, dose, ward = draw.gauss(50, 15), draw.gauss(10, 5), draw.choice("aaabbbc")
            stay = 2 * dose + (5 if ward == "a" else 0) + draw.gauss(0, 1)
            shown = "" if draw.random() < 0.1 else f"{age:.0f}"
            table.writerow([shown, ward, f"{dose:.1f}", "2024-02-03", f"{stay:.2f}", "well" if stay > 22 else "ill"])
    return str(path)


def recipe_for(folder: Path, **changes: Any) -> Recipe:
    data = write_patients(folder / "patients.csv")
    whole = {"model": "mlp", "data": data, "label_column": "outcome", "epsilon": 8.0, "columns": DECLARED}
    return Recipe(**{**whole, "drop": ["*"], **SETTINGS, **changes})


# -- declarations and their encoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "column"),
    [
        ({"low": 0, "high": 120}, Number(center=60.0, scale=30.0, limit=2.0)),
        ({"center": 50, "scale": 20}, Number(center=50.0, scale=20.0)),
        ({"center": 50, "scale": 20, "estimated": True}, Number(center=50.0, scale=20.0)),
        (["a", 2], Categories(names=("a", "2"))),
        ({"categories": ["a"], "estimated": True}, Categories(names=("a",))),
        ("estimate-range", "estimate-range"),
    ],
)
def test_declarations(declared, column):
    assert column_of("age", declared) == column


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ("?", "columns.age is not filled in"),
        ("number", "columns.age='number' is not a declaration"),
        ({"low": 1, "high": 1}, "Expected columns.age.high > 1, got 1"),
        ({"center": 1, "scale": 0}, "Expected columns.age.scale > 0, got 0"),
        ({"low": float("nan"), "high": 1}, "Expected columns.age.low to be finite"),
        ({"low": 0}, "is not a declaration"),
        ([], "must be a list of one or more names"),
        (["a", "a"], "has a repeated or blank name"),
        ([1.5], "must be a list of one or more names"),
    ],
)
def test_bad_declarations_are_refused(declared, named):
    with pytest.raises(ValueError, match=r"columns\.age") as refused:
        Recipe(model="mlp", data="rows.csv", epsilon=1, columns={"age": declared})
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_and_unknown_values_have_their_own_slots():
    columns: dict[str, list[Any]] = {
        "age": ["25", "", None, "1000", "-5"],
        "ward": ["a", "b", "zzz", "NA", None],
        "dose": [10.0, 15, float("nan"), "5", "1e300"],
    }
    features, names = encode_table(columns, DECLARED, list(DECLARED), record_number)
    assert names == NAMES
    expected = [
        [-1, 0, 1, 0, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0, 1, 0],
        [0, 1, 0, 0, 1, 0, 0, 1],
        [2, 0, 0, 0, 0, 1, -1, 0],
        [-2, 0, 0, 0, 0, 1, 10, 0],
    ]
    np.testing.assert_array_equal(features, np.array(expected, np.float32))
    assert features.dtype == np.float32


def test_a_row_is_encoded_by_itself():
    """Nothing of one record may depend on others: no mean, no list of seen categories."""
    draw = random.Random(3)
    columns: dict[str, list[Any]] = {
        "age": [draw.choice(["", "30", "77.5"]) for _ in range(40)],
        "ward": [draw.choice(["a", "b", "c", ""]) for _ in range(40)],
        "dose": [draw.gauss(0, 100) for _ in range(40)],
    }
    together, _ = encode_table(columns, DECLARED, list(DECLARED), record_number)
    for row in range(40):
        alone = {name: values[row : row + 1] for name, values in columns.items()}
        np.testing.assert_array_equal(encode_table(alone, DECLARED, list(DECLARED), record_number)[0][0], together[row])


def test_a_declared_category_may_look_missing():
    features, _ = encode_table({"ward": ["NA", None]}, {"ward": ["NA"]}, ["ward"], record_number)
    np.testing.assert_array_equal(features, [[1, 0, 0], [0, 0, 1]])


def test_whole_numbers_are_categories_with_or_without_decimals():
    features, _ = encode_table({"ward": [3, 3.0, "3", " 3 "]}, {"ward": [3]}, ["ward"], record_number)
    np.testing.assert_array_equal(features, np.tile([1, 0, 0], (4, 1)))


# -- choosing columns -------------------------------------------------------------------------------------------------


def test_every_column_is_declared_or_dropped(tmp_path):
    for drop, named in ((None, "column 'admitted' is not declared"), (["admited"], "did you mean 'admitted'")):
        with pytest.raises(ValueError, match=named) as refused:
            train(recipe_for(tmp_path, drop=drop), tmp_path / "run")
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="has no column 'agee'; did you mean 'age'"):
        train(recipe_for(tmp_path, columns={"agee": [1]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_columns_are_for_tables(tmp_path):
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    recipe = Recipe(model="x", data=str(tmp_path / "lines.txt"), task="masked-lm", epsilon=1.0, columns={"age": ["a"]})
    with pytest.raises(ValueError, match=r"columns=.* is not used by masked-lm; leave it out, or choose mlp or linear"):
        train(recipe, tmp_path / "run")


def test_flags_choose_and_declare_columns(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('model = "mlp"\ndata = "a.csv"\nepsilon = 1\n[columns]\nage = {low = 0, high = 9}\nward = ["a"]\n')
    recipe = read_recipe(file, columns=["age", "dose=-1:2.5", "kind=x,y", "size=estimate-range"])
    assert recipe.columns == {
        "age": {"low": 0, "high": 9},
        "dose": {"low": -1.0, "high": 2.5},
        "kind": ["x", "y"],
        "size": "estimate-range",
    }
    assert recipe.drop == ("*",)
    for flag, named in (("height", "not declared in a recipe; write height=0:120"), ("a=1:e", "not a range")):
        with pytest.raises(ValueError, match=named):
            read_recipe(file, columns=[flag])


def test_a_recipe_with_columns_is_read_back():
    odd = {"a b": {"low": 0.5, "high": 1.0}, "é.x": ["one", 'tw"o'], "c": "estimate-range"}
    recipe = Recipe(model="mlp", data="a.csv", epsilon=1.0, columns=odd)
    text = recipe.to_toml()
    assert Recipe.from_dict(tomllib.loads(text)) == recipe
    assert Recipe.from_dict(tomllib.loads(text + "steps = 5\n")).steps == 5, "settings may follow the columns"


def test_a_template_shows_no_value(tmp_path, capsys):
    data = tmp_path / "patients.csv"
    data.write_text('age,"heart rate",outcome\n31.5,72,well\n')
    assert main(["columns", str(data), "--label-column", "outcome"]) == 0
    text = capsys.readouterr().out
    assert 'age = "?"\n"heart rate" = "?"\n' in text
    assert "outcome = " not in text
    assert not any(value in text for value in ("31.5", "72", "well"))
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ValueError, match=r"columns\.age is not filled in\. Write {low = 0, high = 120}"):
        read_recipe(tmp_path / "recipe.toml", model="mlp", epsilon=1.0)
    assert main(["columns", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"] == ["age", "heart rate", "outcome"]
    assert main(["columns", str(data), "--label-column", "outcom"]) == 2
    assert main(["columns", str(tmp_path / "recipe.toml")]) == 2


def test_the_guide_declares_columns_correctly():
    page = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```text\n(# recipe\.toml\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    recipe = Recipe(model="mlp", epsilon=3.0, **tomllib.loads(text))
    assert recipe.columns is not None
    assert estimates.open_columns(recipe.columns) == ["weight", "diagnosis"]
    for missing in re.findall(r"`([^`]+)`", page.split("| blank, ")[1].split(" |")[0]):
        assert is_missing(missing)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"drop": ["outcome"]}, r"drop=\['outcome'\] contains the label 'outcome'; leave it out"),
        ({"drop": ["*", "ward"], "user_column": "ward", "records_per_user": 2}, "user_column='ward' is not a feature"),
        ({"task": "tabular-regression"}, "'outcome' is not declared; declare its range, as --columns outcome=0:50"),
        ({"label_column": "stay"}, r"for a regression declare its range, as --columns stay=0:50"),
        ({"task": "masked-lm"}, "model='mlp' does not do masked-lm; 'mlp' does tabular-classification"),
        ({"columns": {"admitted": {"low": 0, "high": 1}}}, r"or leave it out \(--drop\)"),
        (
            {"label_column": "outcome", "columns": {"outcome": {"low": 0, "high": 1}, "ward": ["a"]}},
            "correct them, or declare the classes of the label",
        ),
    ],
)
def test_mistakes_are_named_with_the_remedy(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        prepare_run(recipe_for(tmp_path, **changes))


def test_classes_that_were_read_are_noted(tmp_path):
    found = "2 classes read from the data: ill, well"
    assert found in prepare_run(recipe_for(tmp_path)).notes
    declared = {**DECLARED, "outcome": ["ill", "well"]}
    for changes in ({"label_names": ("ill", "well")}, {"columns": declared}):
        assert found not in prepare_run(recipe_for(tmp_path, **changes)).notes
    escapes = tmp_path / "escapes.csv"
    escapes.write_text("ward,outcome\n" + "a,\x1b[2J\n" * 100 + "b,well\n" * 100)
    recipe = recipe_for(tmp_path, data=str(escapes), columns={"ward": ["a", "b"]})
    assert r"2 classes read from the data: '\x1b[2J', well" in prepare_run(recipe).notes, "nothing acts on a terminal"
    ages = tmp_path / "ages.csv"
    ages.write_text("ward,age\n" + "".join(f"a,{place % 30}\n" for place in range(200)))
    recipe = recipe_for(tmp_path, data=str(ages), label_column="age", columns={"ward": ["a", "b"]})
    (note,) = prepare_run(recipe).notes
    assert re.fullmatch(r"\d+ classes read from the data: .*, \.\.\.; for a regression declare .*=0:110", note)


def test_declarations_that_fit_few_held_out_records_are_noted(tmp_path):
    assert len(prepare_run(recipe_for(tmp_path, validation_fraction=0.25)).notes) == 1, "the classes only"
    wrong = {"age": {"low": 0, "high": 1}, "ward": ["A", "b"], "dose": {"center": 10, "scale": 5}}
    held_out = prepare_run(recipe_for(tmp_path, columns=wrong, validation_fraction=0.25))
    rows = list(csv.DictReader((tmp_path / "patients.csv").open()))[3::4]
    ages, wards = sum(row["age"] not in ("", "0", "1") for row in rows), sum(row["ward"] != "b" for row in rows)
    counts = f"'age' in {ages}, 'ward' in {wards} of {len(rows)} held-out records"
    assert f"outside the declared range or categories: {counts}; check [columns]" in held_out.notes


# -- runs and predictions ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    train(recipe_for(folder), folder / "classes")
    stay = {**DECLARED, "stay": {"low": 0, "high": 60}}
    train(recipe_for(folder, model="linear", label_column="stay", columns=stay, epochs=20), folder / "numbers")
    return folder


def test_a_declared_number_as_label_means_regression(runs):
    assert read_recipe(runs / "numbers" / "recipe.toml").task == "tabular-regression"
    scores = [entry for entry in read_log(runs / "numbers" / "log.jsonl") if entry["kind"] == "evaluation"]
    assert scores[-1]["rmse"] == pytest.approx(15 * scores[-1]["loss"] ** 0.5), "in days, not in units of the scale"
    assert scores[-1]["rmse"] < 8 < scores[0]["rmse"], "it learns"
    assert scores[-1]["accuracy"] is None
    assert scores[-1]["perplexity"] is None


def test_predictions_are_those_of_the_model(runs, capsys):
    rows = list(csv.DictReader((runs / "patients.csv").open()))
    columns = {name: [row[name] for row in rows] for name in DECLARED}
    features, _ = encode_table(columns, DECLARED, list(DECLARED), record_number)
    with torch.no_grad():
        outputs = load_trained(runs / "classes")(torch.from_numpy(features))
        numbers = load_trained(runs / "numbers")(torch.from_numpy(features))[:, 0] * 15 + 30
    found = predict(runs / "classes", runs / "patients.csv")
    assert found.label_names == ("ill", "well")
    assert found.values == [found.label_names[i] for i in outputs.argmax(1).tolist()]
    assert found.probabilities is not None
    np.testing.assert_allclose(found.probabilities, outputs.softmax(1).numpy(), atol=1e-6)
    np.testing.assert_allclose(predict(runs / "numbers", runs / "patients.csv").values, numbers.numpy(), rtol=1e-5)
    assert main(["predict", str(runs / "classes"), "--data", str(runs / "patients.csv"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["prediction"] for row in printed] == found.values
    assert printed[0]["probability of ill"] + printed[0]["probability of well"] == pytest.approx(1.0, abs=1e-5)


def test_predict_does_not_overwrite_its_input(runs, tmp_path, capsys):
    data = Path(write_patients(tmp_path / "patients.csv", count=5))
    before = data.read_bytes()
    (tmp_path / "link.csv").symlink_to(data)
    for given, out in ((data, data), (tmp_path / "link.csv", data), (data, tmp_path / "link.csv"), (tmp_path, data)):
        assert main(["predict", str(runs / "classes"), "--data", str(given), "--out", str(out)]) == 2
        assert "would write into --data" in capsys.readouterr().err
        assert data.read_bytes() == before


def test_predict_needs_the_columns_of_the_run(runs, tmp_path, capsys):
    new = tmp_path / "new.csv"
    new.write_text("extra,dose,ward,age\nx,10,zzz,\ny,3,a,40\n")  # in a different order, without the label
    out = tmp_path / "predictions.csv"
    assert main(["predict", str(runs / "classes"), "--data", str(new), "--out", str(out)]) == 0
    assert capsys.readouterr().out == ""
    rows = list(csv.reader(out.open()))
    assert rows[0] == ["prediction", "probability of ill", "probability of well"]
    assert len(rows) == 3
    new.write_text("dosis,ward,age\n10,a,30\n")
    assert main(["predict", str(runs / "classes"), "--data", str(new)]) == 2
    assert "has no column 'dose'; did you mean 'dosis'?" in capsys.readouterr().err
    new.write_text("dose,ward,age\n10,a,thirty\n")
    assert main(["predict", str(runs / "classes"), "--data", str(new)]) == 2
    error = capsys.readouterr().err
    assert "column 'age' has 1 values that are not numbers" in error
    assert "thirty" not in error, "an error quotes no value"


# -- estimated columns ------------------------------------------------------------------------------------------------

OPEN = {"age": "estimate-range", "ward": "estimate-categories", "dose": {"center": 10, "scale": 5}}


def test_the_classes_of_the_label_cannot_be_estimated(tmp_path):
    recipe = recipe_for(tmp_path, columns={**OPEN, "outcome": "estimate-categories"})
    with pytest.raises(ValueError, match=r"columns\.outcome is the label, whose classes cannot be estimated"):
        prepare_run(recipe)


def test_estimates_are_part_of_plan_statement_and_recipe(tmp_path):
    recipe = recipe_for(tmp_path, columns=OPEN, epsilon=20.0, columns_epsilon=15.0)
    train(recipe, tmp_path / "run", progress=StopAfter(2))
    place = RunDirectory(tmp_path / "run")
    plan, settled = place.read_plan(), read_recipe(place.recipe_file)
    assert plan.counts is not None
    assert (plan.counts.columns, plan.counts.releases) == (2, 2)
    assert 19.99 < plan.epsilon() <= 20.0
    assert plan.replace(counts=None).epsilon() < 16.0, "the training alone costs less"
    text = place.statement_file.read_text()
    assert text.startswith("Differentially private: epsilon = 20.0000")
    assert "Before training:    noisy counts of the values of 2 columns, released 2 times" in text
    assert settled.columns is not None
    assert settled.columns["age"]["estimated"] is True
    assert 30 < settled.columns["age"]["center"] < 70
    assert set(settled.columns["ward"]["categories"]) <= {"a", "b", "c"}
    assert resume(tmp_path / "run")["reason"] == "finished", "a resumed run estimates nothing again"
    assert place.read_plan() == plan
    assert main(["audit", str(place.path), "--files-only"]) == 0


def test_held_out_records_are_not_counted(tmp_path, monkeypatch):
    seen = []
    kept = estimates.NoisyCounter.frequent

    def look(self, values, **named):
        seen.append(len(values))
        return kept(self, values, **named)

    monkeypatch.setattr(estimates.NoisyCounter, "frequent", look)
    only = {"ward": "estimate-categories"}
    setup = prepare_run(recipe_for(tmp_path, columns=only, columns_epsilon=7.0, validation_fraction=0.25))
    assert setup.plan.num_examples == 300
    assert seen == [300]


def test_a_dry_run_looks_at_no_value(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "estimated", None)
    found = prepare_run(recipe_for(tmp_path, columns=OPEN), estimate_columns=False)
    assert found.plan.counts is not None
    assert any("a dry run does not estimate age, ward" in note for note in found.notes)


def test_hidden_columns_are_refused(tmp_path):
    with pytest.raises(ValueError, match="column 'ward' cannot be estimated: no value is in more than about"):
        train(recipe_for(tmp_path, columns={"ward": "estimate-categories"}, columns_epsilon=0.01), tmp_path / "run")
    with pytest.raises(ValueError, match=r"columns_epsilon=9\.0 must be below epsilon=8\.0"):
        train(recipe_for(tmp_path, columns=OPEN, columns_epsilon=9.0), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_estimates_of_an_earlier_run_are_reported(tmp_path):
    copied = {**DECLARED, "age": {"center": 50.0, "scale": 20.0, "estimated": True}}
    note, _ = prepare_run(recipe_for(tmp_path, columns=copied)).notes
    assert note == "age: estimated by an earlier run, whose epsilon adds to this one's"
