"""Comparisons of two variants, seeds and settings: what runs, what it costs, and how it resumes."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest

from dpoptim.app import prepare_run, read_log, read_recipe
from dpoptim.app.comparison import compare as compare_module
from dpoptim.app.comparison.compare import Interrupted, compare, trial_recipe
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.runs.run_log import last_reason
from dpoptim.privacy import PrivacyPlan, gaussian_epsilon
from dpoptim.privacy.composition import epsilon_of_runs
from tests.app.comparisons import VARIANTS, request_for, write_rows

DELTA = 1e-4


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "private.csv")
    write_rows(folder / "public.csv", count=120, seed=1)
    return folder


@pytest.fixture(scope="module")
def tuned(rows, tmp_path_factory):
    """A finished comparison tuned at an ε, with references."""
    folder = tmp_path_factory.mktemp("tuned") / "out"
    request = request_for(rows, references=True, tuning_steps=3)
    return folder, request, compare(request, folder)


def plans_under(folder: Path) -> dict[str, PrivacyPlan]:
    return {
        str(file.parent.relative_to(folder)): PrivacyPlan.from_dict(json.loads(file.read_text())["plan"])
        for file in folder.rglob("plan.json")
    }


def last_loss(run: Path) -> float:
    return [entry for entry in read_log(run / "log.jsonl") if entry["kind"] == "evaluation"][-1]["loss"]


def private_plans(folder: Path) -> list[PrivacyPlan]:
    return [plan for name, plan in plans_under(folder).items() if "non_private" not in name]


def test_every_setting_and_seed_runs_once(tuned):
    folder, _, result = tuned
    found = plans_under(folder)
    assert sum(name.startswith("trials") for name in found) == 2 * 3
    assert sum(name.startswith("runs") for name in found) == 2 * 3
    assert [row["variant"] for row in result["variants"]] == list(VARIANTS)
    assert [row["variant"] for row in result["references"]] == ["no_fine_tuning", "non_private"]
    keys = {file.read_bytes() for file in folder.rglob("noise.key")}
    assert len(keys) == len(found)


def test_all_variants_have_the_same_budget(tuned):
    folder, _, result = tuned
    plans = {name: plan for name, plan in plans_under(folder).items() if "runs/" in name and "non_private" not in name}
    assert len(plans) == 4
    shared = {(plan.sampling, plan.noise, plan.batch_size, plan.steps, plan.delta) for plan in plans.values()}
    assert len(shared) == 1
    assert all(2.999 < plan.epsilon() <= 3.0 for plan in plans.values())
    assert result["epsilon"]["one_run"] == pytest.approx(3.0, abs=1e-3)


def test_trials_share_their_budget(tuned):
    folder, _, result = tuned
    for variant in VARIANTS:
        plans = list(plans_under(folder / "trials" / variant).values())
        assert len(plans) == 2
        assert all(plan.steps == 3 for plan in plans)
        assert 0.999 < epsilon_of_runs(plans, delta=DELTA) <= 1.0
        assert result["epsilon"]["tuning"][variant] == epsilon_of_runs(plans, delta=DELTA)
        assert all(plan.epsilon(delta=DELTA) < 0.8 for plan in plans)


def test_total_epsilon_equals_the_closed_form(tuned):
    """Without amplification, squares of sensitivity over noise add up."""
    folder, _, result = tuned

    def closed(plans):
        shifts = [plan.max_participations / plan.noise_multiplier**2 for plan in plans]
        return gaussian_epsilon(math.fsum(shifts) ** -0.5, DELTA)

    cost = result["epsilon"]
    everything = private_plans(folder)
    assert len(everything) == cost["runs_on_private_records"] == cost["runs_in_folder"] == 8
    assert cost["everything"] == pytest.approx(closed(everything), rel=1e-9)
    assert cost["folder"] == pytest.approx(cost["everything"], rel=1e-9)
    for variant in VARIANTS:
        trials = list(plans_under(folder / "trials" / variant).values())
        run = next(iter(plans_under(folder / "runs" / variant).values()))
        assert cost["one_run_with_tuning"][variant] == pytest.approx(closed([*trials, run]), rel=1e-9)
        assert cost["one_run"] < cost["one_run_with_tuning"][variant] < cost["one_run"] + 1.0


def test_runs_use_the_setting_of_the_best_trial(tuned):
    folder, _, result = tuned
    for row in result["variants"]:
        logs = (folder / "trials" / row["variant"]).glob("*/log.jsonl")
        losses = {log.parent: last_loss(log.parent) for log in logs}
        best = min(losses, key=lambda run: losses[run])
        assert best.name == f"learning_rate={row['setting']['learning_rate']}"
        assert [Path(run).parent.name for run in row["runs"]] == [best.name] * 2
        seeds = [read_recipe(Path(run) / "recipe.toml").seed for run in row["runs"]]
        assert seeds == [0, 1]
        assert read_recipe(best / "recipe.toml").seed not in seeds


def test_scores_match_the_logs(tuned):
    _, _, result = tuned
    for row in (*result["variants"], result["references"][1]):
        assert row["loss"]["values"] == [last_loss(Path(run)) for run in row["runs"]]
        assert row["loss"]["mean"] == pytest.approx(sum(row["loss"]["values"]) / 2)
    best = min(result["variants"], key=lambda row: row["loss"]["mean"])
    other = next(row for row in result["variants"] if row is not best)
    assert result["best"] == best["variant"]
    assert best["difference_to_best"] is None
    pairs = zip(other["loss"]["values"], best["loss"]["values"], strict=True)
    assert other["difference_to_best"]["mean"] == pytest.approx(sum(a - b for a, b in pairs) / 2)


def test_reference_rows(tuned):
    folder, _, result = tuned
    before, without = result["references"]
    logs = [read_log(Path(run) / "log.jsonl") for run in result["variants"][1]["runs"]]
    firsts = [next(entry for entry in log if entry["kind"] == "evaluation") for log in logs]
    assert [entry["step"] for entry in firsts] == [0, 0]
    assert before["loss"]["values"] == [entry["loss"] for entry in firsts]
    assert (before["private"], before["epsilon"]) == (True, 0.0)
    assert without["private"] is False
    assert "NOT PRIVATE" in without["label"]
    plan = next(iter(plans_under(folder / "runs" / "non_private").values()))
    assert (plan.noise_multiplier, plan.clip_norm) == (0.0, 1e9)
    assert result["epsilon"]["without"] == ["non_private: NOT PRIVATE"]


def test_result_has_no_secrets_and_checkpoints_are_removed(tuned):
    folder, _, result = tuned
    stored = (folder / "comparison.json").read_text()
    assert json.loads(stored)["epsilon"]["everything"] == result["epsilon"]["everything"]
    for key in folder.rglob("noise.key"):
        assert key.read_bytes().hex() not in stored
        assert key.stat().st_mode & 0o077 == 0
    assert not list(folder.rglob("step-*"))
    assert len(list(folder.glob("runs/*/*/*/model"))) == 6


def test_finished_runs_are_not_repeated(tuned, monkeypatch):
    folder, request, result = tuned

    def refuse(*values, **options):
        raise AssertionError("a finished run was run again")

    for name in ("train", "resume", "prepare_run"):
        monkeypatch.setattr(compare_module, name, refuse)
    assert compare(request, folder) == result


class Counting(ProgressReporter):
    """Collects which runs begin, and sends Ctrl-C in step 2 of the chosen one."""

    def __init__(self, interrupt: int | None = None) -> None:
        super().__init__()
        self.begun: list[str] = []
        self._interrupt = interrupt

    def message(self, text):
        if text.startswith("run "):
            assert ("left for all" in text) == bool(self.begun)
            self.begun.append(text.partition(";")[0])

    def step(self, *, step, epsilon, seconds):
        if step == 2 and len(self.begun) == self._interrupt:
            signal.raise_signal(signal.SIGINT)


def test_same_call_resumes_after_ctrl_c(rows, tmp_path):
    request = request_for(rows, grid={})
    with pytest.raises(Interrupted, match="2 of 4") as stopped:
        compare(request, tmp_path / "out", progress=Counting(interrupt=3))
    assert stopped.value.signal == signal.SIGINT
    finished = {run: (run / "log.jsonl").read_bytes() for run in sorted((tmp_path / "out" / "runs").glob("*/*/seed-0"))}
    stopped_run = tmp_path / "out" / "runs" / VARIANTS[0] / "as-in-recipe" / "seed-1"
    assert last_reason(stopped_run) != "finished"
    secret = stopped_run.with_name("seed-1.secret") / "noise.key"
    key = secret.read_bytes()

    progress = Counting()
    result = compare(request, tmp_path / "out", progress=progress)
    assert [text.partition(":")[0] for text in progress.begun] == ["run 3 of 4", "run 4 of 4"]
    assert {run: (run / "log.jsonl").read_bytes() for run in finished} == finished
    starts = [entry for entry in read_log(stopped_run / "log.jsonl") if entry["kind"] == "start"]
    assert starts[-1]["resumed_from"] == 2
    assert secret.read_bytes() == key
    assert result["tuning"]["kind"] == "not tuned"
    assert result["epsilon"]["one_run_with_tuning"][VARIANTS[0]] == pytest.approx(result["epsilon"]["one_run"])

    # A third seed, and a third variant, add runs and change none; all that was ever started is counted.
    more = request_for(rows, grid={}, seeds=(2,), variants=("dp_sgd",))
    progress = Counting()
    fewer = compare(more, tmp_path / "out", progress=progress)
    assert progress.begun == ["run 1 of 1: dp_sgd at as-in-recipe, seed 2"]
    cost = fewer["epsilon"]
    assert (cost["runs_on_private_records"], cost["runs_in_folder"]) == (1, 5)
    assert cost["folder"] > result["epsilon"]["everything"] > cost["everything"]
    # One seed has no interval.
    assert fewer["variants"][0]["loss"]["half_width"] is None


def test_public_tuning_is_free_and_uses_the_noise_of_the_runs(rows, tmp_path):
    public = str(rows / "public.csv")
    request = request_for(rows, seeds=(0,), tuning_epsilon="public", tuning_data=public)
    result = compare(request, tmp_path / "out")
    plans = plans_under(tmp_path / "out")
    trials = {name: plan for name, plan in plans.items() if name.startswith("trials")}
    runs = {name: plan for name, plan in plans.items() if name.startswith("runs")}
    assert len(trials) == 4
    assert {plan.noise_multiplier for plan in trials.values()} == {plan.noise_multiplier for plan in runs.values()}
    recipes = [read_recipe(tmp_path / "out" / name / "recipe.toml") for name in trials]
    assert {recipe.data for recipe in recipes} == {public}
    assert {plan.num_examples for plan in trials.values()} == {114}
    cost = result["epsilon"]
    assert cost["tuning"] == dict.fromkeys(VARIANTS, 0.0)
    assert cost["everything"] == pytest.approx(epsilon_of_runs(list(runs.values()), delta=DELTA))
    assert cost["runs_on_private_records"] == cost["runs_in_folder"] == 2
    assert result["tuning"]["covered_by_epsilon_of_one_run"]


def test_private_records_declared_public_are_refused(rows, tmp_path):
    """As a link, as a copy in a different order, and a few of them (held-out ones too) among others."""
    header, *lines = (rows / "private.csv").read_text().splitlines()
    (tmp_path / "link.csv").symlink_to(rows / "private.csv")
    (tmp_path / "copy.csv").write_text("\n".join([header, *lines[::-1]]) + "\n")
    (tmp_path / "few.csv").write_text("\n".join([*(rows / "public.csv").read_text().splitlines(), lines[3]]) + "\n")
    for name, count in (("link", 240), ("copy", 240), ("few", 1)):
        request = request_for(rows, tuning_epsilon="public", tuning_data=str(tmp_path / f"{name}.csv"))
        with pytest.raises(ValueError, match=f"is declared public, but {count} of its"):
            compare(request, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_delta_does_not_limit_the_number_of_public_records(rows, tmp_path):
    many = write_rows(tmp_path / "many.csv", count=600, seed=2)
    request = request_for(rows, recipe={"delta": 0.005}, tuning_epsilon="public", tuning_data=many)
    recipe = trial_recipe(request, request.recipe.replace(num_examples=180), VARIANTS[0], {"learning_rate": 0.03})
    assert prepare_run(recipe).plan.num_examples == 570, "more than 1/delta, which is allowed for public records"


@pytest.mark.slow
def test_uncovered_tuning_is_reported_and_counted(rows, tmp_path):
    """With secret sampling, where the totals are privacy loss distributions."""
    request = request_for(
        rows, recipe={"sampling": "poisson"}, variants=VARIANTS[:1], seeds=(0,), tuning_epsilon="uncovered"
    )
    result = compare(request, tmp_path / "out")
    assert "TUNING IS NOT COVERED" in result["tuning"]["note"]
    assert not result["tuning"]["covered_by_epsilon_of_one_run"]
    plans = private_plans(tmp_path / "out")
    assert len(plans) == 3
    assert len({plan.noise_multiplier for plan in plans}) == 1
    three = plans[0].replace(steps=12).epsilon(delta=DELTA)
    assert result["epsilon"]["everything"] == pytest.approx(three, rel=1e-9)
    assert result["epsilon"]["one_run"] < three


def test_folder_of_another_comparison_is_refused(tuned, rows, tmp_path):
    folder, _, _ = tuned
    with pytest.raises(ValueError, match=r"epsilon=3\.0, not 2\.0; use a different --run-dir"):
        compare(request_for(rows, recipe={"epsilon": 2.0}, tuning_steps=3), folder)
    with pytest.raises(ValueError, match=r"tuning_epsilon=1\.0, not 'uncovered'"):
        compare(request_for(rows, tuning_epsilon="uncovered", tuning_steps=3), folder)
    grid = {"learning_rate": [1e-4, 1e-3, 0.03]}
    with pytest.raises(ValueError, match="a trial of a different grid"):
        compare(request_for(rows, grid=grid, tuning_steps=3), folder)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="does not hold a comparison"):
        compare(request_for(rows), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": {"validation_fraction": 0.0}}, "no records are held out"),
        ({"recipe": {"data": "missing.csv"}}, "missing.csv"),
        ({"recipe": {"batch_size": 10_000}}, "batch_size <= num_examples"),
        ({"recipe": {"delta": 0.1}}, "delta=0.1 is not below 1/180"),
        ({"tuning_epsilon": "public", "tuning_data": "missing.csv"}, "missing.csv"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(rows, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        compare(request_for(rows, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()
