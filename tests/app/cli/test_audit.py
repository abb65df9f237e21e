"""The `dpoptim audit` command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dpoptim
from dpoptim import PrivacyPlan
from dpoptim.app.cli import main
from tests.app.runs import copy_run, rows_recipe, write_bert, write_texts

SIZES = ["--steps", "10", "--batch-size", "50", "--num-examples", "500", "--epsilon", "4", "--delta", "1e-4"]
FEW = ["--canaries", "500"]


def test_plan_from_options(capsys):
    assert main(["audit", *SIZES, *FEW, "--noise", "banded-toeplitz:2", "--sampling", "shuffled"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(
        "nothing contradicts the claim\nscale_then_privatize, BandedToeplitz(bands=2), Shuffled(), zero-out"
    )
    assert "noise level" in printed.out


def test_json_is_the_only_output(capsys):
    assert main(["audit", *SIZES, *FEW, "--sampling", "shuffled", "--variant", "dp_sgd", "--json", "--seed", "3"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["passed"] is True
    assert values["variant"] == "dp_sgd"
    assert values["files"] == []
    assert values["plan"]["steps"] == 10
    assert values["game"]["canaries"] == 500
    assert values["game"]["epsilon"] == pytest.approx(4.0, abs=1e-3)


def test_edited_statement_is_found(trained_run, tmp_path, capsys):
    copy_run(trained_run, tmp_path / "run")
    assert main(["audit", str(tmp_path / "run"), *FEW]) == 0
    printed = capsys.readouterr().out
    assert "Plan and files" in printed
    assert "FAILED" not in printed
    (tmp_path / "run" / "statement.txt").write_text("epsilon = 0")
    assert main(["audit", str(tmp_path / "run"), "--files-only"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED  the statement matches the plan" in printed
    assert "1 FAILED" in printed
    assert "Game:" not in printed
    assert main(["audit", str(tmp_path / "run"), "--files-only", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["game"] is None


def test_plan_from_a_file(tmp_path, capsys):
    plan = PrivacyPlan(num_examples=500, batch_size=50, steps=10).calibrate(epsilon=4.0, delta=1e-4)
    for release in (dpoptim.Gradient(), dpoptim.IndependentMoments(balance="mse"), dpoptim.JointMoments()):
        own = plan.replace(allow_mixing="batch norm").with_release(release)
        (tmp_path / "plan.json").write_text(json.dumps(own.to_dict()))
        assert main(["audit", str(tmp_path / "plan.json"), *FEW, "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["plan"] == own.to_dict()
        assert {"name": "examples do not mix", "passed": None, "found": "not covered: batch norm"} in values["files"]


def test_plans_that_no_audit_fits_are_refused(tmp_path, refusal):
    plan = PrivacyPlan(num_examples=500, batch_size=50, steps=10).calibrate(epsilon=4.0, delta=1e-4)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan.to_dict()))
    assert "the plan releases Gradient(), but --variant joint_moments releases JointMoments" in refusal(
        "audit", str(file), "--variant", "joint_moments"
    )
    file.write_text(json.dumps(plan.with_release(dpoptim.NoiselessSquare()).to_dict()))
    assert "the plan makes no guarantee" in refusal("audit", str(file))
    for claimed in ("4.0", True, None):
        file.write_text(json.dumps({"plan": plan.to_dict(), "epsilon": claimed}))
        assert f"epsilon={claimed!r} must be a number" in refusal("audit", str(file))


def test_recipe_is_trained(tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text(rows_recipe(tmp_path, steps=5).to_toml())
    assert main(["audit", "--recipe", str(tmp_path / "recipe.toml"), "--games", "2", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["variant"] == "scale_then_privatize"
    assert values["game"]["games"] == 2
    assert values["game"]["canaries"] == 2 * (values["plan"]["num_examples"] // 2)
    checks = {check["name"]: check["passed"] for check in values["game"]["checks"]}
    assert checks["gradients of the model"] is True


def test_recipe_for_texts_is_trained(tmp_path, capsys):
    texts = {"model": write_bert(tmp_path / "bert"), "data": write_texts(tmp_path / "texts.jsonl"), "columns": None}
    (tmp_path / "recipe.toml").write_text(rows_recipe(tmp_path, steps=2, **texts).to_toml())
    assert main(["audit", "--recipe", str(tmp_path / "recipe.toml"), "--games", "4"]) == 0
    assert "nothing contradicts the claim; 1 not checked" in capsys.readouterr().out  # because of dropout


def test_claim_in_the_plan_file_is_checked(tmp_path, capsys):
    plan = PrivacyPlan(num_examples=500, batch_size=50, steps=10).calibrate(epsilon=4.0, delta=1e-4)
    (tmp_path / "plan.json").write_text(json.dumps({"plan": plan.to_dict(), "epsilon": 3}))
    assert main(["audit", str(tmp_path / "plan.json"), *FEW]) == 1
    assert "FAILED  epsilon follows from the plan: claimed 3.0000" in capsys.readouterr().out


def test_contradicted_claim_exits_with_status_1(monkeypatch, capsys):
    """As if the accountant returned a tenth of what is spent."""
    whole = PrivacyPlan.epsilon
    monkeypatch.setattr(PrivacyPlan, "epsilon", lambda plan, **at: whole(plan, **at) / 10)
    assert main(["audit", *SIZES[:-4], "--epsilon", "40", "--delta", "1e-4", *FEW, "--sampling", "shuffled"]) == 1
    assert "FAILED  the claim stands" in capsys.readouterr().out


def test_plot_is_written(tmp_path, capsys):
    assert main(["audit", *SIZES, *FEW, "--sampling", "shuffled", "--plot", str(tmp_path / "audit.png")]) == 0
    assert (tmp_path / "audit.png").stat().st_size > 20_000
    assert "wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give RUN, a folder of `dpoptim train`, or a plan: --steps, --batch-size, --num-examples"),
        (SIZES[:-2], "--delta missing"),
        (["nowhere"], "RUN nowhere does not exist"),
        (["nowhere", "--steps", "3"], "--steps and RUN nowhere both define a plan"),
        ([".", "--files-only"], "is not a run directory"),
        ([*SIZES, "--files-only"], "give its folder"),
        ([".", "--files-only", "--plot", "a.png"], "--files-only skips"),
        ([*SIZES, "--noise", "pink"], "noise='pink' must be auto or one of"),
        ([*SIZES, "--canaries", "3"], "Expected canaries >= 100 and <= 1e+06, got 3"),
        ([*SIZES, "--canaries", "1e12"], "Expected canaries >= 100 and <= 1e+06"),
        ([*SIZES[:-4], "--epsilon", "1e6", "--delta", "1e-4"], "Expected --epsilon > 0 and <= 100, got 1000000.0"),
        ([*SIZES, "--games", "0"], "Expected games to be a whole number >= 1, got 0"),
        ([*SIZES, "--recipe", "a.toml"], "--recipe and --steps cannot be used together"),
        (["runs/a", "--recipe", "a.toml"], "--recipe and RUN cannot be used together"),
        (["--files-only", "--recipe", "a.toml"], "--recipe and --files-only cannot be used together"),
        (["--recipe", "nowhere.toml"], "nowhere.toml"),
        ([*SIZES, "--confidence", "2"], "Expected confidence >= 0.5 and < 1, got 2.0"),
    ],
)
def test_mistakes_print_one_line(tmp_path, monkeypatch, refusal, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in refusal("audit", *arguments)


@pytest.mark.parametrize("text", ["[]", "{", '{"plan": 3}', '{"steps": 3}'])
def test_file_without_a_plan_is_refused(tmp_path, refusal, text):
    file = Path(tmp_path / "plan.json")
    file.write_text(text)
    assert str(file) in refusal("audit", str(file))
