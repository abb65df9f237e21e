"""A run that was stopped and taken up again is the run that was not."""

from __future__ import annotations

import itertools

import pytest

from experiments import result_files
from experiments.experiment import Request
from experiments.tinybert import model as models
from experiments.tinybert.corpus import made_up_corpus
from experiments.tinybert.experiment import grounded, run_table
from experiments.tinybert.sizes import Scoring
from experiments.tinybert.training_run import run
from experiments.tinybert.unfinished import TimeIsOver, Unfinished
from experiments.voice import Voice
from tests.experiments.test_tinybert import VOCABULARY, cell

STEPS = 6


@pytest.fixture(scope="module")
def ground():
    corpus = made_up_corpus(vocabulary=VOCABULARY, examples=60)
    return grounded(corpus, lambda: models.made_up(vocabulary=VOCABULARY), 64, "cpu", Scoring())


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
def test_stopped_after_every_step_it_ends_as_if_it_had_not_been(ground, tmp_path, name, kind):
    made = cell(name, kind, steps=STEPS, lr=1e-5)
    expected = run(made, ground)
    over = Unfinished(tmp_path, until=0.0)
    for _ in range(STEPS - 1):
        with pytest.raises(TimeIsOver):
            run(made, ground, unfinished=over)
    found = run(made, ground, unfinished=over)
    assert {**found.result, "ms_a_step": 0} == {**expected.result, "ms_a_step": 0}


def test_cells_are_kept_apart(ground, tmp_path):
    over = Unfinished(tmp_path, until=0.0)
    for seed in (0, 1):
        with pytest.raises(TimeIsOver):
            run(cell("post_processing", steps=2, seed=seed), ground, unfinished=over)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_is_killed_goes_on_from_its_last_copy(ground, tmp_path, monkeypatch):
    made = cell("post_processing", steps=STEPS)
    expected = run(made, ground).result["curve"]
    often = Unfinished(tmp_path, every=0.0)
    kept = itertools.count()

    def keep_three(self, cell, state, keep=Unfinished.keep):
        if next(kept) == 3:
            raise KeyboardInterrupt
        keep(self, cell, state)

    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "keep", keep_three)
        with pytest.raises(KeyboardInterrupt):
            run(made, ground, unfinished=often)
    state = often.found(made)
    assert state is not None
    assert state["loader"]["next_step"] == 3
    assert run(made, ground, unfinished=often).result["curve"] == expected


def test_a_file_that_cannot_be_read_is_named(ground, tmp_path):
    made = cell("post_processing", steps=2)
    over = Unfinished(tmp_path, until=0.0)
    with pytest.raises(TimeIsOver):
        run(made, ground, unfinished=over)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"no")
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read; delete it"):
        run(made, ground, unfinished=over)


class Heard(Voice):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("workers", [1, 2])
def test_when_time_is_over_the_table_says_what_was_begun_and_goes_on(tmp_path, monkeypatch, workers):
    only = ("row=post_processing", "column=independent_low")
    voice = Heard()
    passed = itertools.chain([100.0, 100.0], itertools.repeat(-1.0))  # as the deadline is set, and as the run is begun
    with monkeypatch.context() as patch:
        patch.setattr(Request, "seconds_left", lambda self: next(passed))
        patch.setattr("experiments.tinybert.experiment.Unfinished", lambda folder, until: Unfinished(folder, 0.0))
        run_table(Request(scale="smoke", out=tmp_path, only=only, seeds=1, workers=workers), voice)
    assert any("1 cells or more are left, 1 of them begun" in text for text in voice.said), voice.said
    assert len(list((tmp_path / "unfinished").rglob("*.pt"))) == 1
    run_table(Request(scale="smoke", out=tmp_path, only=only, seeds=1), voice)
    (line,) = [line for line in result_files.read(tmp_path / "tinybert.jsonl").lines if line["cell"]["seed"] == 0][1:]
    assert line["result"]["steps_done"] == 3
    assert not list((tmp_path / "unfinished").rglob("*.pt"))
