"""A run that was stopped and resumed equals one that was not."""

from __future__ import annotations

import itertools

import pytest

from experiments import results_file
from experiments.framework import Request
from experiments.progress import ProgressReporter
from experiments.tinybert import model as models
from experiments.tinybert.data import synthetic_corpus
from experiments.tinybert.experiment import build_workspace, run_table
from experiments.tinybert.grid import Scoring
from experiments.tinybert.training_run import TimeLimitReached, Unfinished, run
from tests.experiments.test_tinybert import VOCABULARY, cell

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def workspace():
    corpus = synthetic_corpus(vocabulary=VOCABULARY, examples=60)
    return build_workspace(corpus, lambda: models.synthetic(vocabulary=VOCABULARY), 64, "cpu", Scoring())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("non_private_adam", "none"),
        ("noiseless", "independent_low"),
        ("bias_correction", "banded"),
        ("scale_then_privatize", "banded"),
        ("scale_then_privatize", "buffered_10"),
        ("delayed", "independent"),
    ],
)
def test_a_run_stopped_after_every_step_ends_the_same(workspace, tmp_path, name, kind):
    made = cell(name, kind, steps=STEPS, lr=1e-5)
    expected = run(made, workspace)
    over = Unfinished(tmp_path, until=0.0)
    for _ in range(STEPS - 1):
        with pytest.raises(TimeLimitReached):
            run(made, workspace, unfinished=over)
    found = run(made, workspace, unfinished=over)
    assert {**found.result, "ms_a_step": 0} == {**expected.result, "ms_a_step": 0}


def test_cells_are_kept_separate(workspace, tmp_path):
    over = Unfinished(tmp_path, until=0.0)
    for seed in (0, 1):
        with pytest.raises(TimeLimitReached):
            run(cell("post_processing", steps=2, seed=seed), workspace, unfinished=over)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_killed_run_resumes_from_its_last_checkpoint(workspace, tmp_path, monkeypatch):
    made = cell("post_processing", steps=STEPS)
    expected = run(made, workspace).result["curve"]
    often = Unfinished(tmp_path, every=0.0)
    kept = itertools.count()

    def keep_three(self, cell, state, keep=Unfinished.keep):
        if next(kept) == 3:
            raise KeyboardInterrupt
        keep(self, cell, state)

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "keep", keep_three)
        with pytest.raises(KeyboardInterrupt):
            run(made, workspace, unfinished=often)
    state = often.found(made)
    assert state is not None
    assert state["loader"]["next_step"] == 3
    assert run(made, workspace, unfinished=often).result["curve"] == expected


def test_an_unreadable_file_is_named(workspace, tmp_path):
    made = cell("post_processing", steps=2)
    over = Unfinished(tmp_path, until=0.0)
    with pytest.raises(TimeLimitReached):
        run(made, workspace, unfinished=over)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"no")
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read; delete it"):
        run(made, workspace, unfinished=over)


class Recorder(ProgressReporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_table_resumes_after_the_time_limit(tmp_path, monkeypatch, workers):
    only = ("row=post_processing", "column=independent_low")
    reporter = Recorder()
    passed = itertools.chain([100.0, 100.0], itertools.repeat(-1.0))  # as the deadline is set, and as the run is begun
    with monkeypatch.context() as patch:
        patch.setattr(Request, "seconds_left", lambda self: next(passed))
        patch.setattr("experiments.tinybert.experiment.Unfinished", lambda folder, until: Unfinished(folder, 0.0))
        run_table(Request(scale="smoke", out=tmp_path, only=only, seeds=1, workers=workers), reporter)
    assert any("1 cells or more are left, 1 of them begun" in text for text in reporter.said), reporter.said
    assert len(list((tmp_path / "unfinished").rglob("*.pt"))) == 1
    run_table(Request(scale="smoke", out=tmp_path, only=only, seeds=1), reporter)
    (line,) = [line for line in results_file.read(tmp_path / "tinybert.jsonl").lines if line["cell"]["seed"] == 0][1:]
    assert line["result"]["steps_done"] == 3
    assert not list((tmp_path / "unfinished").rglob("*.pt"))
