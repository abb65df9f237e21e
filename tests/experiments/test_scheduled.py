"""BERT-Tiny's table with scheduled learning rates: the schedule, the averaged weights, and the plan of runs."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments import results_file
from experiments.framework import MissingInput, Request
from experiments.progress import ProgressReporter
from experiments.results_file import Line
from experiments.tinybert import model as models
from experiments.tinybert import scheduled
from experiments.tinybert.data import synthetic_corpus
from experiments.tinybert.experiment import build_workspace
from experiments.tinybert.grid import SIZES, Hyperparameter, Row, Scoring, column, guarantee, plan_of
from experiments.tinybert.schedule import (
    Setting,
    final_cell,
    first_setting,
    reached,
    tuning_cell,
    tuning_losses,
    wanted,
)
from experiments.tinybert.scheduled import BUDGET, ROWS_SCHEDULED, SIZES_SCHEDULED, places_scheduled, row_scheduled
from experiments.tinybert.training_run import TimeLimitReached, Unfinished, WeightAverage, rate_factor, run

SHARED = {"num_examples": 60, "model": "m"}
PLACE = ("post_processing", "banded")
SETTING = (("lr", 0.02),)


def small_workspace():
    corpus = synthetic_corpus(vocabulary=150, examples=60)
    return build_workspace(corpus, lambda: models.synthetic(vocabulary=150), 64, "cpu", Scoring())


class TestSchedule:
    def test_the_rate_rises_stays_and_falls(self):
        factors = [rate_factor("wsd", step, 1995) for step in range(1995)]
        assert factors[0] == pytest.approx(1 / 200)
        assert factors[199:1397] == [1.0] * 1198
        assert factors[-1] == pytest.approx(1 / 598)
        assert sum(factors) == pytest.approx(1995 * (1 - 0.05 - 0.15), abs=2)
        assert {rate_factor("constant", step, 10) for step in range(10)} == {1.0}
        with pytest.raises(ValueError, match="must be constant or wsd"):
            rate_factor("cosine", 0, 10)

    def test_cells_of_constant_rates_do_not_mention_it(self):
        """So that lines that were written before have the same key."""
        old, new = (final_cell(PLACE, SETTING, sizes["paper"], SHARED, 0) for sizes in (SIZES, SIZES_SCHEDULED))
        assert not {"schedule", "average"} & set(old)
        assert (new["schedule"], new["average"], new["steps"]) == ("wsd", 0.99, 1995)
        tuned = tuning_cell(PLACE, SETTING, SIZES_SCHEDULED["paper"], SHARED)
        assert tuned["schedule"] == "wsd"
        assert "average" not in tuned
        lines = [
            {"cell": cell, "result": {"validation": loss, "ended": "finished"}}
            for cell, loss in ((tuned, 3.0), (tuning_cell(PLACE, SETTING, SIZES["paper"], SHARED), 4.0))
        ]
        assert tuning_losses(lines, PLACE, SIZES_SCHEDULED["paper"]) == {SETTING: 3.0}
        assert tuning_losses(lines, PLACE, SIZES["paper"]) == {SETTING: 4.0}

    def test_an_example_takes_part_five_times(self):
        for name in ("banded", "independent"):
            place, shared = ("post_processing", name), {"num_examples": 817_503}
            cell = final_cell(place, SETTING, SIZES_SCHEDULED["paper"], shared, 0)
            assert plan_of(cell).max_participations == 5
            assert guarantee(cell, plan_of(cell))[0] == pytest.approx(13.6113, abs=1e-3)

    @pytest.mark.parametrize("noise", ["independent", "banded"])
    @pytest.mark.parametrize(("larger", "steps"), [(4, 495), (16, 120)])
    def test_larger_batches_cost_the_same_epsilon(self, noise, larger, steps):
        """In as many times fewer steps; tuning runs keep the noise in the mean of such a batch."""
        place, size = ("post_processing", f"{noise}_x{larger}"), SIZES_SCHEDULED["paper"]
        cell = final_cell(place, SETTING, size, {"num_examples": 817_503}, 0)
        assert (cell["batch_size"], cell["steps"]) == (larger * 2048, steps)
        assert plan_of(cell).max_participations == 5
        assert guarantee(cell, plan_of(cell))[0] == pytest.approx(13.6113, abs=1e-3)
        tuning = tuning_cell(place, SETTING, size, {"num_examples": 272_501})
        assert (tuning["batch_size"], tuning["steps"]) == (larger * 256, 1000 // larger)
        assert plan_of(tuning).noise_multiplier == pytest.approx(1 / 8)

    @pytest.mark.parametrize("name", ["poisson_x16_at_1", "cyclic_x4_at_10", "inverse_x4_at_3"])
    def test_the_curve_has_its_epsilon_and_tuning_runs_its_noise(self, name):
        place, size = ("scale_then_privatize", name), SIZES_SCHEDULED["paper"]
        setting = first_setting(row_scheduled(place[0]), name)
        final = plan_of(final_cell(place, setting, size, {"num_examples": 817_503}, 0))
        tuned = plan_of(tuning_cell(place, setting, size, {"num_examples": 272_501}))
        assert final.epsilon(delta=1e-7) == pytest.approx(column(name).epsilon, rel=1e-3)
        assert final.noise_multiplier is not None
        assert tuned.noise_multiplier == pytest.approx(final.noise_multiplier / 8)


@pytest.mark.slow
class TestRuns:
    def test_the_schedule_scales_every_step(self):
        """Without momentum and noise, the first step of SGD is the rate's factor times that of a constant rate."""
        workspace, losses = small_workspace(), {}
        cell = final_cell(("non_private_sgd", "none"), (("lr", 0.4), ("momentum", 0.0)), SIZES["smoke"], SHARED, 0)
        cell |= {"steps": 20}
        changed: dict[str, dict[str, Any]] = {"wsd": {"schedule": "wsd"}, "half": {"lr": 0.2}, "whole": {}}
        for name, changes in changed.items():
            losses[name] = dict(run({**cell, **changes}, workspace).result["curve"])
        assert losses["wsd"][1] == losses["half"][1] != losses["whole"][1]
        assert losses["wsd"][20] != losses["whole"][20]

    def test_the_average_is_that_of_the_weights_after_each_step(self):
        model = models.synthetic(vocabulary=150)
        average, expected = WeightAverage(model, 0.9), [p.detach().clone() for p in model.parameters()]
        for _ in range(3):
            for i, parameter in enumerate(model.parameters()):
                parameter.data += 0.1 * torch.randn_like(parameter)
                expected[i] = 0.9 * expected[i] + 0.1 * parameter.detach()
            average.after_step()
        own = [p.detach().clone() for p in model.parameters()]
        with average.in_model() as averaged:
            for parameter, value in zip(averaged.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.detach(), value)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), own, strict=True))

    def test_a_run_scores_both_and_resumes_exactly(self, tmp_path, monkeypatch):
        workspace = small_workspace()
        cell = final_cell(PLACE, SETTING, replace(SIZES_SCHEDULED["smoke"], steps=6), SHARED, 0)
        whole = run(cell, workspace).result
        assert set(whole["test_average"]) == set(whole["test"]) == {"tokens", "examples"}
        assert whole["test_average"] != whole["test"]
        assert whole["validation_average"] != whole["validation"]
        unfinished = Unfinished(tmp_path, until=math.inf)
        with monkeypatch.context() as patch:
            patch.setattr(Unfinished, "is_over", lambda self: True)
            with pytest.raises(TimeLimitReached):
                run(cell, workspace, unfinished=unfinished)
        resumed = run(cell, workspace, unfinished=unfinished).result
        assert resumed["test_average"] == whole["test_average"]
        assert resumed["curve"] == whole["curve"]


class TestPlan:
    def test_every_start_is_on_its_grid_and_every_move_has_knobs(self):
        for name, kind in places_scheduled():
            row = row_scheduled(name)
            for knob, (_, value) in zip(row.knobs, first_setting(row, kind), strict=True):
                assert value in knob.grid, (name, kind, knob.name)
            assert {knob for move in row.directions() for knob in move} == {knob.name for knob in row.knobs}

    def test_ime_may_have_an_eps_up_to_a_tenth(self):
        assert max(next(k.grid for k in row_scheduled("independent_moments").knobs if k.name == "eps")) == 0.1

    def test_moves_of_two_knobs_follow_their_ratio(self):
        """The loss depends on lr/eps and, weakly, on eps: single moves of eps would be stuck."""
        grid = tuple(10.0**i for i in range(7))
        knobs = Hyperparameter("lr", grid, 10.0), Hyperparameter("eps", grid, 1.0)

        def ended(moves):
            row = Row(name="x", label="x", knobs=knobs, moves=moves)
            tried: dict[Setting, float] = {}
            while settings := wanted(row, "any", tried):
                for setting in settings:
                    lr, eps = (math.log10(value) for _, value in setting)
                    tried[setting] = 10 * abs(lr - eps - 1) - eps
            return reached(row, "any", tried)

        assert ended(({"lr": 1}, {"lr": 1, "eps": 1})) == (("lr", 1e6), ("eps", 1e5))
        assert ended(()) == (("lr", 10.0), ("eps", 1.0))

    def test_a_search_that_starts_too_high_comes_down(self):
        row = row_scheduled("post_processing")
        tried: dict[Setting, float] = {}
        while settings := wanted(row, "banded", tried):
            tried |= {s: abs(math.log(s[0][1] / 1e-3)) if s[0][1] < 4e-3 else math.inf for s in settings}
        assert reached(row, "banded", tried) == (("lr", 1e-3),)

    def test_every_place_has_the_same_budget(self):
        """On a loss that always falls, searches end with the budget, column by column; final runs have the best."""
        size, budget, columns = SIZES_SCHEDULED["paper"], 5, []
        lines: list[Line] = []
        while found := scheduled.search_jobs(lines, size, budget, SHARED):
            columns.append(found[0].cell["column"])
            loss = 9.0 - 0.1 * len(lines)
            result = {"validation": loss, "ended": "finished", "curve": [(50, loss)], "test": {"tokens": loss}}
            lines.append({"cell": found[0].cell, "result": result})
        assert columns == sorted(columns, key=scheduled.COLUMN_ORDER.index)
        counts = {len(tuning_losses(lines, place, size)) for place in places_scheduled()}
        assert max(counts) == 5
        finals = scheduled.final_jobs([], lines, size, budget, 3, SHARED)
        assert len(finals) == 2 * len(places_scheduled())
        assert scheduled.final_jobs([], lines[:1], size, budget, 3, SHARED) == [], "its search has not ended"

    @pytest.mark.parametrize(
        ("best_rate", "diverges_at", "runs"), [(0.5, 9, 2), (1.5, 9, 3), (2.25, 9, 3), (1.5, 0.8, 3), (1.5, 0.55, 4)]
    )
    def test_final_runs_try_other_rates_before_other_seeds(self, best_rate, diverges_at, runs):
        """Losses depend on the rate over that of the search; other seeds run with the best of the first."""
        size, budget = SIZES_SCHEDULED["paper"], 1
        result = {"validation": 4.0, "ended": "finished", "curve": []}
        search: list[Line] = [
            {"cell": job.cell, "result": result} for job in scheduled.search_jobs([], size, budget, SHARED)
        ]
        finals: list[Line] = []
        while found := scheduled.final_jobs(finals, search, size, budget, 3, SHARED):
            for job in found:
                start = dict(first_setting(row_scheduled(job.cell["row"]), job.cell["column"]))["lr"]
                ratio = job.cell["lr"] / start
                loss, ended = 3.0 + abs(math.log(ratio / best_rate)), "diverged" if ratio > diverges_at else "finished"
                finals.append({"cell": job.cell, "result": {"validation": loss, "ended": ended}})
        assert len(finals) == (runs + 2) * len(places_scheduled())
        place = [line for line in finals if (line["cell"]["row"], line["cell"]["column"]) == PLACE]
        whole = [line for line in place[:runs] if line["result"]["ended"] == "finished"]
        lowest = min(whole, key=lambda line: line["result"]["validation"])
        assert [line["cell"]["lr"] for line in place[runs:]] == [lowest["cell"]["lr"]] * 2

    def test_final_runs_need_all_train_files(self, tmp_path, monkeypatch):
        """They are refused before a line of them is written."""
        size = SIZES_SCHEDULED["paper"]
        scheduled._check_participations(size, 817_503, "paper")
        maker = lambda request, files: small_workspace  # noqa: E731
        monkeypatch.setattr("experiments.tinybert.experiment.workspace_maker", maker)
        with pytest.raises(MissingInput, match="Add the other train files"):
            scheduled.run_final(Request(scale="paper", out=tmp_path, commit="x"), ProgressReporter())
        assert not list(tmp_path.iterdir())

    def test_all_rows_of_the_table_are_in_it(self):
        assert len(ROWS_SCHEDULED) == 13
        assert len(places_scheduled()) * BUDGET["paper"] == 1216


@pytest.mark.slow
def test_the_command_resumes_and_respects_the_limit(tmp_path, capsys):
    def call(what, *more):
        only = ["--only", "row=post_processing", "--only", "column=banded"]
        code = scheduled.main([what, "--scale", "smoke", "--out", str(tmp_path), "--commit", "x", *only, *more])
        return code, capsys.readouterr().out

    def count(name):
        return len(results_file.read(tmp_path / f"{name}.jsonl").lines) - 1  # the first is without fine-tuning

    code, said = call("search", "--until", str(time.time() + 100), "--needs", "1000")
    assert (code, count("scheduled_search")) == (0, 0), "a run would not finish before the limit"
    assert "1 runs can start now" in said
    assert call("final")[0] == 2
    assert count("scheduled") == 0, "nothing is tuned yet"
    code, said = call("search")
    assert (code, count("scheduled_search")) == (0, BUDGET["smoke"])
    assert "nothing is left" in said
    before = (tmp_path / "scheduled_search.jsonl").read_text()
    call("search")
    assert (tmp_path / "scheduled_search.jsonl").read_text() == before
    assert call("final")[0] == 0
    assert count("scheduled") in (2, 3), "with larger learning rates"
    assert " ended " in call("progress")[1]
    assert "| post-processing | BandMF, σ = 1, b = 128 | lr 0.0" in call("render")[1]
