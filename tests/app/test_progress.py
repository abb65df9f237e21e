"""Progress prints the right lines, and step times are means over blocks that do not overlap."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dpoptim.app import progress
from dpoptim.app.progress import ProgressReporter, StepTimes


@pytest.mark.parametrize("over", [1, 10, 25])
def test_mean_times_do_not_reveal_single_steps(over):
    times, size = StepTimes(over=over), max(10, over)
    seconds = [1.0 + (7 * step % 11) for step in range(100)]
    shown = [times.add(value) for value in seconds]
    assert shown[: size - 1] == [None] * (size - 1)
    for block in range(100 // size):
        values = shown[(block + 1) * size - 1 : (block + 2) * size - 1]
        assert len(set(values)) == 1, "one value while the next block is filled"
        assert values[0] == pytest.approx(sum(seconds[block * size : (block + 1) * size]) / size, rel=0.05)


def shown(*, terminal: bool, brief: bool = False, whole_run: bool = False) -> str:
    """What a short run prints."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200)
    with ProgressReporter(console, brief=brief) as reporter:
        reporter.note("note: few records")
        reporter.stage("reading the records")
        reporter.begin(step=0, steps=2, batch_size=10, whole_run=whole_run)
        reporter.evaluation({"step": 0, "loss": 2.0})
        for step in (1, 2):
            reporter.step(step=step, epsilon=1.5, seconds=0.5)
        reporter.not_private(3.0)
        reporter.step(step=2, epsilon=1.5, seconds=0.5)
        reporter.evaluation({"step": 2, "loss": 1.0, "accuracy": 0.5})
        reporter.message("done")
    return file.getvalue()


def test_log_prints_evaluations():
    assert shown(terminal=False).splitlines() == [
        "note: few records",
        "step 0/2: held-out loss 2.0000",
        "step 2/2: held-out loss 1.0000, accuracy 50.0 %; epsilon 1.5000 so far, 20 examples/s, training loss 3.0000 "
        "(not private: for debugging)",
        "done",
    ]
    assert shown(terminal=False, brief=True) == "done\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_an_epsilon_that_never_changes_is_not_repeated(terminal):
    text = shown(terminal=terminal, whole_run=True)
    assert "1.5000" not in text
    assert "; 20 examples/s, " in text or "20 examples/s; held-out" in text


def test_terminal_shows_a_bar():
    text = shown(terminal=True)
    assert "2/2" in text
    assert "ε 1.5000 so far; 20 examples/s" in text
    assert "note: few records" in text


def test_long_silence_is_broken(monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", 0.0)
    assert "step 1/2; epsilon 1.5000 so far" in shown(terminal=False)


def test_long_stage_is_named_and_a_short_one_is_not(monkeypatch):
    file = io.StringIO()
    with ProgressReporter(Console(file=file)) as reporter:
        reporter.stage("reading the records")
        monkeypatch.setattr(progress, "SILENCE", 0.0)
        reporter.stage("making the privacy plan")
        assert reporter._timer is not None
        reporter._timer.join()
        monkeypatch.setattr(progress, "SILENCE", 60.0)
        reporter.stage("trying the model")
    reporter._timer.join()  # canceled when the block ended
    assert file.getvalue() == "making the privacy plan ...\n"


def test_nothing_is_printed_without_a_console(capsys):
    with ProgressReporter() as reporter:
        reporter.stage("reading")
        reporter.begin(step=0, steps=2, batch_size=10, whole_run=True)
        reporter.step(step=1, epsilon=1.0, seconds=0.0)
        reporter.message("done")
    assert capsys.readouterr() == ("", "")


def test_a_narrow_terminal_shows_the_step():
    file = io.StringIO()
    with ProgressReporter(Console(file=file, force_terminal=True, width=60)) as reporter:
        reporter.begin(step=0, steps=200, batch_size=10, whole_run=True)
        reporter.evaluation({"step": 60, "loss": 3.567, "perplexity": 34.64})
        reporter.step(step=60, epsilon=8.0, seconds=0.1)
    assert "60/200" in file.getvalue()
    assert "100 examples/s" in file.getvalue()
