"""A run that stopped resumes as if it never had: parameters and log, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch

from dpoptim.app import Recipe, RunDirectory, load_trained, resume, train
from dpoptim.app.cli.main import main
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.runs import loop
from dpoptim.app.runs import run as run_module
from dpoptim.app.runs.run_directory import checkpoints, save_checkpoint
from dpoptim.data.processes import Processes
from dpoptim.privacy.step_ledger import released_count
from tests.app.runs import (
    CrashAfter,
    StopAfter,
    copy_run,
    fixed_keys,
    log_of,
    parameters_at,
    rows_recipe,
    same,
    without_times,
    write_bert,
    write_texts,
)
from tests.clipping.tape import never_capture, tape_graphs


class Messages(ProgressReporter):
    """Keeps the lines that are always printed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def one_key(monkeypatch):
    fixed_keys(monkeypatch)


@pytest.mark.parametrize(
    ("variant", "sampling"),
    [
        ("scale_then_privatize", "shuffled"),
        pytest.param("scale_then_privatize", "poisson", marks=pytest.mark.slow),
        pytest.param("independent_moments", "shuffled", marks=pytest.mark.slow),
    ],
)
def test_interrupted_run_resumes_bit_for_bit(variant, sampling, tmp_path, one_key):
    recipe = rows_recipe(tmp_path, variant=variant, sampling=sampling, debug=True)
    whole = train(recipe, tmp_path / "whole")
    stopped = train(recipe, tmp_path / "parts", progress=StopAfter(13))
    assert (stopped["reason"], stopped["step"], stopped["signal"]) == ("interrupted", 13, signal.SIGINT)
    assert not (tmp_path / "parts" / "model").exists()
    finished = resume(tmp_path / "parts")
    assert (whole["reason"], finished["reason"], finished["step"]) == ("finished", "finished", 20)
    assert same(parameters_at(tmp_path / "whole", 20), parameters_at(tmp_path / "parts", 20))
    assert without_times(log_of(tmp_path / "whole")) == without_times(log_of(tmp_path / "parts"))
    starts = [entry["resumed_from"] for entry in log_of(tmp_path / "parts") if entry["kind"] == "start"]
    assert starts == [None, 13]


@pytest.mark.filterwarnings("ignore:batches have more than 0 shapes")
def test_a_run_with_graphs_resumes_bit_for_bit_without_them(tmp_path, one_key, monkeypatch):
    """Batches of 16 have parts of 6, 5 and 5, which are padded to 8 rows."""
    recipe = rows_recipe(tmp_path, micro_batch_size=6)
    monkeypatch.setattr(loop, "part_multiple", lambda batch_size: 4)
    with pytest.MonkeyPatch.context() as patched:
        replays = tape_graphs(patched)
        train(recipe, tmp_path / "whole")
        assert sum(replays) > 20
        with pytest.raises(RuntimeError, match="the power failed"):
            train(recipe, tmp_path / "parts", progress=CrashAfter(17))
    never_capture(monkeypatch)
    resume(tmp_path / "parts")
    assert same(parameters_at(tmp_path / "whole", 20), parameters_at(tmp_path / "parts", 20))


@pytest.mark.slow
def test_language_model_with_dropout_and_correlated_noise_resumes_bit_for_bit(tmp_path, one_key):
    recipe = Recipe(
        model=write_bert(tmp_path / "bert"), data=write_texts(tmp_path / "texts.jsonl"), noise_multiplier=0.5,
        delta=1e-5, noise="banded-toeplitz:4", sampling="cyclic", batch_size=8, steps=8, log_every=2,
        checkpoint_every=3, evaluate_every=4, micro_batch_tokens=128,
    )  # fmt: skip
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "parts", progress=StopAfter(5))
    resume(tmp_path / "parts")
    assert same(parameters_at(tmp_path / "whole", 8), parameters_at(tmp_path / "parts", 8))
    assert without_times(log_of(tmp_path / "whole")) == without_times(log_of(tmp_path / "parts"))


def test_a_crash_between_checkpoints_repeats_the_same_steps(tmp_path, one_key, monkeypatch):
    recipe = rows_recipe(tmp_path)
    train(recipe, tmp_path / "whole")

    with pytest.raises(RuntimeError):
        train(recipe, tmp_path / "parts", progress=CrashAfter(17))
    end = log_of(tmp_path / "parts")[-1]
    assert (end["kind"], end["reason"], end["step"]) == ("end", "error: RuntimeError", 17)
    assert [path.name for path in checkpoints(tmp_path / "parts" / "checkpoints")] == ["step-000000", "step-000010"]
    resume(tmp_path / "parts")
    assert same(parameters_at(tmp_path / "whole", 20), parameters_at(tmp_path / "parts", 20))
    assert without_times(log_of(tmp_path / "whole")) == without_times(log_of(tmp_path / "parts"))
    steps = [entry["step"] for entry in log_of(tmp_path / "parts") if entry["kind"] == "step"]
    assert steps == [1, 5, 10, 15, 20], "a step that was repeated must be in the log once"


def test_the_log_has_no_gap_where_another_process_ended(tmp_path, one_key, monkeypatch):
    """The last step is saved then, and its evaluation must not be missing."""
    recipe, place = rows_recipe(tmp_path, checkpoint_every=15), RunDirectory(tmp_path / "parts")
    train(recipe, tmp_path / "whole")
    from_first = Processes.from_first

    def lost(processes, value):
        if value is False and released_count(place.steps_file) == 10:
            raise ConnectionError("process 1 ended")
        return from_first(processes, value)

    with monkeypatch.context() as patched:
        patched.setattr(Processes, "from_first", lost)
        with pytest.raises(OSError, match="step 10 is saved"):
            train(recipe, place.path)
    assert checkpoints(place.checkpoints)[-1].name == "step-000010"
    resume(place.path)
    assert without_times(log_of(tmp_path / "whole")) == without_times(log_of(tmp_path / "parts"))


def test_a_run_that_is_killed_at_its_first_checkpoint_has_one_first_evaluation(tmp_path, one_key, monkeypatch):
    recipe, place = rows_recipe(tmp_path), RunDirectory(tmp_path / "parts")
    train(recipe, tmp_path / "whole")
    for when in ("before", "after"):

        def killed(folder, step, state, when=when):
            if when == "after":
                save_checkpoint(folder, step, state)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(run_module, "save_checkpoint", killed)
            with pytest.raises(KeyboardInterrupt):
                resume(place.path) if place.path.exists() else train(recipe, place.path)
    resume(place.path)
    assert without_times(log_of(tmp_path / "whole")) == without_times(log_of(tmp_path / "parts"))


def flip_bit_of_a_parameter(file):
    (value, *_) = torch.load(file)["model"].values()
    content = bytearray(file.read_bytes())
    content[content.index(value.numpy().tobytes()) + 2] ^= 64
    file.write_bytes(content)


def foreign_pickle(file):
    file.write_bytes(pickle.dumps(print, protocol=2))


BROKEN = {
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "one bit flipped": flip_bit_of_a_parameter,
    "foreign pickle": foreign_pickle,
    "another dictionary": lambda file: torch.save({"weight": torch.ones(2)}, file),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_checkpoint_falls_back_to_the_one_before(how, tmp_path, one_key):
    """The step ledger holds: steps 6 to 10 are repeated bit for bit, and no step is released twice differently."""
    recipe = rows_recipe(tmp_path, checkpoint_every=5)
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "parts", progress=StopAfter(10))
    ledger = RunDirectory(tmp_path / "parts").steps_file
    before, folder = ledger.read_bytes(), tmp_path / "parts" / "checkpoints"
    BROKEN[how](folder / "step-000010" / "state.pt")
    (folder / "unreadable-step-000010").mkdir()  # as if it had happened before
    (folder / "unreadable-step-000010" / "state.pt").touch()
    progress = Messages()
    assert resume(tmp_path / "parts", progress=progress)["reason"] == "finished"
    (line,) = progress.lines
    assert re.search(r"step-000010/state\.pt cannot be read \(.+\).* Resuming from step-000005 instead\.$", line)
    assert "\n" not in line
    assert (folder / "unreadable-step-000010").is_dir()
    assert ledger.read_bytes().startswith(before)
    assert same(parameters_at(tmp_path / "whole", 20), parameters_at(tmp_path / "parts", 20))
    assert without_times(log_of(tmp_path / "whole")) == without_times(log_of(tmp_path / "parts"))


def test_with_a_broken_checkpoint_the_micro_batch_cannot_change(tmp_path):
    """Steps 6 to 10 are repeated, so their sums must keep their rounding."""
    train(rows_recipe(tmp_path, checkpoint_every=5), tmp_path / "run", progress=StopAfter(10))
    place = RunDirectory(tmp_path / "run")
    BROKEN["empty"](place.checkpoints / "step-000010" / "state.pt")
    before = place.recipe_file.read_text()
    with pytest.raises(ValueError, match="would change the rounding of step 6"):
        resume(tmp_path / "run", micro_batch_size=3)
    assert place.recipe_file.read_text() == before
    assert resume(tmp_path / "run")["reason"] == "finished"


def test_a_run_whose_checkpoints_are_all_broken_is_refused(tmp_path):
    train(rows_recipe(tmp_path), tmp_path / "run", progress=StopAfter(13))
    found = checkpoints(tmp_path / "run" / "checkpoints")
    for path in found:
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"step-000010/state\.pt cannot be read .* Restore the original"):
        resume(tmp_path / "run")
    assert checkpoints(tmp_path / "run" / "checkpoints") == found


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    def full(folder, step, state):
        if step == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save_checkpoint(folder, step, state)

    monkeypatch.setattr(run_module, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left on device; step 10 is saved, resume with") as failed:
        train(rows_recipe(tmp_path), tmp_path / "run")
    assert "\n" not in str(failed.value)
    monkeypatch.setattr(run_module, "save_checkpoint", save_checkpoint)
    assert resume(tmp_path / "run")["reason"] == "finished"


def test_a_checkpoint_that_cannot_be_written_leaves_no_trace(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 10, {"step": 10})

    def fail(state, path):
        path.write_bytes(b"half of it")
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr("torch.save", fail)
    with pytest.raises(OSError, match="is the disk full"):
        save_checkpoint(tmp_path, 20, {"step": 20})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


@pytest.mark.parametrize(
    ("function", "file"), [("fsync", r"log\.jsonl"), ("write", r"noise\.steps"), ("log", r"log\.jsonl")]
)
def test_a_full_disk_at_resume_names_the_file(function, file, tmp_path, monkeypatch, capsys):
    train(rows_recipe(tmp_path), tmp_path / "run", progress=StopAfter(3))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if function == "log":
        monkeypatch.setattr("dpoptim.app.runs.run_log.plain", full)
    else:
        monkeypatch.setattr(os, function, full)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "No space left" in line]
    assert re.search(rf"No space left on device: '.*{file}'", line)
    monkeypatch.undo()
    assert resume(tmp_path / "run")["reason"] == "finished"


BAD_JSON = {"empty": "", "truncated": '{"plan": {"num_ex', "nested": "[" * 100_000, "a list": "[]", "no plan": "{}"}


@pytest.mark.parametrize("how", BAD_JSON)
def test_a_broken_plan_is_named_in_one_line(how, tmp_path, capsys):
    train(rows_recipe(tmp_path), tmp_path / "run", progress=StopAfter(3))
    (tmp_path / "run" / "plan.json").write_text(BAD_JSON[how])
    for command in (["train", "--resume"], ["report"], ["audit"]):
        capsys.readouterr()
        assert main([*command, str(tmp_path / "run")]) == 2
        assert re.fullmatch(r"dpoptim: .*run/plan\.json cannot be read .*\n", capsys.readouterr().err)


def test_failed_first_checkpoint_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(state, path):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 640 vs 534")

    recipe = rows_recipe(tmp_path)
    before = set(tmp_path.rglob("*"))
    monkeypatch.setattr("torch.save", fail)
    with pytest.raises(OSError, match=r"disk full\?\); nothing was released, and .*run is removed") as error:
        train(recipe, tmp_path / "run")
    assert "enforce" not in str(error.value)
    assert "\n" not in str(error.value)
    assert set(tmp_path.rglob("*")) == before


def test_a_finished_run_is_not_trained_again(trained_run):
    before, summary = (trained_run / "log.jsonl").read_bytes(), (trained_run / "summary.json").read_bytes()
    (trained_run / "summary.json").unlink()  # the process was killed before it wrote it
    assert resume(trained_run)["reason"] == "finished"
    assert (trained_run / "log.jsonl").read_bytes() == before
    assert (trained_run / "summary.json").read_bytes() == summary


def test_processes_wait_for_each_other_where_a_run_was_finished(trained_run, monkeypatch):
    """torch.distributed fails in a process that connects while another one ends."""
    waited: list[object] = []
    monkeypatch.setattr(Processes, "from_first", lambda processes, value: waited.append(value))
    assert resume(trained_run)["reason"] == "finished"
    assert waited == [None]


def test_a_finished_run_without_its_model_makes_it_again(trained_run, tmp_path, capsys):
    copy = copy_run(trained_run, tmp_path / "run")
    shutil.rmtree(copy.model)
    (copy.path / ".model.1234.unfinished").mkdir()  # the process was killed while it saved
    assert main(["train", "--resume", str(copy.path)]) == 0
    assert not list(copy.path.glob(".*"))
    printed = capsys.readouterr().err
    assert "already finished" not in printed
    assert "holds the noise key" in printed
    assert same(load_trained(copy.path).state_dict(), load_trained(trained_run).state_dict())
    shutil.rmtree(copy.secret_folder)
    assert main(["train", "--resume", str(copy.path)]) == 0
    printed = capsys.readouterr().err
    assert "already finished" in printed
    assert "holds the noise key" not in printed, "there is none"


def test_missing_or_changed_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="is not a run directory"):
        resume(tmp_path)
    train(rows_recipe(tmp_path), tmp_path / "run", progress=StopAfter(3))
    key = tmp_path / "run.secret" / "noise.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    secret = key.read_bytes()
    key.unlink()
    with pytest.raises(ValueError, match=r"noise\.key is missing"):
        resume(tmp_path / "run")
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    with pytest.raises(ValueError, match="a different noise key"):
        resume(tmp_path / "run")
    key.write_bytes(bytes(10))
    with pytest.raises(ValueError, match=r"noise\.key is damaged. Restore it"):
        resume(tmp_path / "run")
    key.write_bytes(secret)
    statement = RunDirectory(tmp_path / "run").statement_file
    text = statement.read_text()
    statement.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"statement\.txt cannot be read"):
        resume(tmp_path / "run")
    statement.write_text(text)
    recipe = RunDirectory(tmp_path / "run").recipe_file
    text = recipe.read_text()
    recipe.write_text("")
    with pytest.raises(ValueError, match=r"recipe\.toml is damaged \(model is missing\)\. Restore the original\.$"):
        resume(tmp_path / "run")
    recipe.write_text(text)
    (tmp_path / "rows.csv").write_text("a,b,c,label\n1,2,3,yes\n1,2,4,no\n")
    with pytest.raises(ValueError, match="training records"):
        resume(tmp_path / "run")


def test_ctrl_c_at_any_moment_saves_the_last_step(tmp_path, monkeypatch):
    """The signal arrives while the loop decides whether to save."""

    class Stop:
        asked = 0

        @property
        def signal(self) -> signal.Signals | None:
            self.asked += 1
            return signal.SIGINT if self.asked >= 4 else None

    monkeypatch.setattr("dpoptim.app.runs.run.stopping_between_steps", lambda: contextlib.nullcontext(Stop()))
    summary = train(rows_recipe(tmp_path, checkpoint_every=100), tmp_path / "run")
    assert summary["reason"] == "interrupted"
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{summary['step']:06d}"


@pytest.mark.slow
def test_ctrl_c_stops_a_process_with_a_checkpoint(tmp_path):
    """SIGINT to a running `dpoptim train`: exit 130, a checkpoint, and the command that resumes it."""
    recipe = rows_recipe(tmp_path, steps=100_000, epsilon=None, noise_multiplier=1.0, evaluate_every=100_000)
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    directory = tmp_path / "run"
    command = [sys.executable, "-m", "dpoptim", "train", str(file), "--run-dir", str(directory)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (directory / "checkpoints" / "step-000010").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"dpoptim train --resume {directory}" in printed
    assert "Traceback" not in printed
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["reason"] == "interrupted"
    last = checkpoints(directory / "checkpoints")[-1]
    assert last.name == f"step-{summary['step']:06d}"
