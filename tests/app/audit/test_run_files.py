"""The audit of a run's files reports every mismatch."""

from __future__ import annotations

import base64
import json

import pytest

from dpoptim.app import RunDirectory
from dpoptim.app.audit import audit_folder
from dpoptim.noise import NoiseKey
from tests.app.runs import copy_run


@pytest.fixture
def run(trained_run, tmp_path):
    return copy_run(trained_run, tmp_path / "run")


LOG = "the log holds only released values"


def failed(run: RunDirectory) -> dict[str, str]:
    return {check.name: check.found for check in audit_folder(run.path)[2] if check.passed is False}


def test_untouched_run_passes(run):
    plan, recipe, checks = audit_folder(run.path)
    assert plan == run.read_plan()
    assert recipe.steps == plan.steps == 6
    assert [check.name for check in checks if not check.passed] == []
    assert len(checks) == 6
    assert {check.found for check in checks} >= {"6 of 6, under this plan", "word for word"}


def test_claim_below_the_plans_epsilon_fails(run):
    values = json.loads(run.plan_file.read_text())
    run.plan_file.write_text(json.dumps({**values, "epsilon": values["epsilon"] - 0.01}))
    assert failed(run).keys() == {"epsilon follows from the plan", LOG}


def test_plan_edited_after_training_fails(run):
    values = json.loads(run.plan_file.read_text())
    values["plan"]["noise_multiplier"] *= 2
    run.plan_file.write_text(json.dumps(values))
    assert failed(run).keys() == {"the statement matches the plan", "released steps are counted"}


def test_recipe_with_a_smaller_epsilon_fails(run):
    run.recipe_file.write_text(run.recipe_file.read_text().replace("epsilon = 8.0", "epsilon = 2.0"))
    assert "spends 8.0000" in failed(run)["the plan matches the recipe"]


def test_edited_statement_fails(run):
    run.statement_file.write_text(run.statement_file.read_text().replace("epsilon = 8", "epsilon = 1"))
    assert failed(run).keys() == {"the statement matches the plan"}


@pytest.mark.parametrize("form", [bytes, lambda key: key.hex().encode(), lambda key: base64.b64encode(key)])
def test_key_leaked_into_another_file_fails(run, form):
    key = run.key_file.read_bytes()
    (run.model / "notes.bin").write_bytes(b"." + form(key) + b".")
    assert failed(run) == {"the noise key is safe": "its bytes are in model/notes.bin"}


def test_key_readable_by_others_fails(run):
    run.key_file.chmod(0o644)
    assert failed(run).keys() == {"the noise key is safe"}
    assert "0644" in failed(run)["the noise key is safe"]


def test_empty_key_fails(run):
    run.key_file.chmod(0o600)
    run.key_file.write_bytes(b"")
    assert failed(run).keys() == {"the noise key is safe"}
    assert failed(run)["the noise key is safe"].startswith("noise.key: A noise key has 32 bytes, got 0.")


def test_checks_that_need_a_missing_key_are_skipped(run):
    run.key_file.unlink()
    left_out = {check.name: check.found for check in audit_folder(run.path)[2] if check.passed is None}
    assert left_out == {"the noise key is safe": "noise.key is missing"}
    assert failed(run) == {}
    run.steps_file.unlink()
    assert failed(run) == {}


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ("adjacency", '"replace"'), ("clip_norm", "5.0"), ("noise", '"square-root"'), ("sampling", '"poisson"'),
        ("delta", "1e-5"), ("batch_size", "17"), ("num_examples", "99"), ("steps", "5"),
    ],
)  # fmt: skip
def test_recipe_that_differs_from_the_plan_fails(run, setting, other):
    lines = [line for line in run.recipe_file.read_text().splitlines() if not line.startswith(f"{setting} =")]
    run.recipe_file.write_text("\n".join([f"{setting} = {other}", *lines]))
    assert failed(run) == {"the plan matches the recipe": f"{setting} of plan.json and recipe.toml differ"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 1 is not JSON"),
        ('{"kind": "step", "step": 6, "epsilon": 9}', "epsilon = 9.0000 is above"),
    ],
)
def test_edited_log_fails(run, line, words):
    run.log_file.write_text(line + "\n" + run.log_file.read_text())
    assert words in failed(run)[LOG]


def test_a_log_without_a_readable_line_is_not_called_ok(run):
    run.log_file.write_text("garbage")
    assert [check.passed for check in audit_folder(run.path)[2] if check.name == LOG] == [None]


def test_more_steps_than_planned_fail(run):
    lines = run.steps_file.read_text().splitlines()
    run.steps_file.write_text("\n".join([*lines, lines[-1]]) + "\n")
    assert failed(run) == {"released steps are counted": "7 were released, but the plan covers 6"}


def test_edited_or_missing_ledger_fails(run):
    whole = run.steps_file.read_text()
    run.steps_file.write_text(whole.replace('"batch_size": 16', '"batch_size": 17'))
    assert "under a different plan" in failed(run)["released steps are counted"]
    run.steps_file.write_text(whole.replace(NoiseKey.load(run.key_file).fingerprint(), "0" * 16))
    assert "a different noise key" in failed(run)["released steps are counted"]
    run.steps_file.unlink()
    assert "missing" in failed(run)["released steps are counted"]


def test_debug_values_in_the_log_fail(run):
    assert failed(run) == {}
    run.recipe_file.write_text(run.recipe_file.read_text().replace("debug = false", "debug = true"))
    assert failed(run).keys() == {LOG}
    run.recipe_file.write_text(run.recipe_file.read_text().replace("debug = true", "debug = false"))
    with run.log_file.open("a") as log:
        log.write('{"kind": "step", "step": 6, "not_private": {"loss": 1.0}}\n')
    assert "1 lines hold values that are not private" in failed(run)[LOG]


@pytest.mark.parametrize("file", ["plan.json", "recipe.toml"])
def test_incomplete_run_is_refused(run, file):
    (run.path / file).unlink()
    with pytest.raises(ValueError, match=r"is not a run directory|plan\.json cannot be read"):
        audit_folder(run.path)


def test_invalid_plan_is_refused(run):
    run.plan_file.write_text("{}")
    with pytest.raises(ValueError, match=r"plan\.json cannot be read"):
        audit_folder(run.path)
