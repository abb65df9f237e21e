"""Out of memory in `dpoptim train`: one line names the flag to change, and the run resumes with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpoptim.app import resume, train
from dpoptim.app.cli import main
from dpoptim.app.models.prepared import Prepared
from dpoptim.app.recipes.recipe import read_recipe
from dpoptim.app.runs.run_directory import checkpoints
from dpoptim.clipping import PrivateMechanism, clipped_sums
from dpoptim.optim import fused
from tests.app.runs import (
    COLUMN_FLAGS,
    CrashAfter,
    log_of,
    parameters_at,
    rows_recipe,
    write_bert,
    write_rows,
    write_texts,
)

SETTINGS = ["--epsilon", "4", "--steps", "4", "--batch-size", "16", "--noise", "independent", "--sampling", "shuffled"]


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    whole, calls = getattr(owner, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)


def test_the_command_names_a_flag_if_the_first_batch_does_not_fit(tmp_path, monkeypatch, capsys):
    """The command prints one line; the command in that line then finishes the run."""
    monkeypatch.chdir(tmp_path)
    data = ["train", "--model", write_bert(tmp_path / "bert"), "--data", write_texts(tmp_path / "texts.jsonl")]
    fail_at(monkeypatch, clipped_sums, "_sum", 1)
    assert main([*data, *SETTINGS, "--validation-fraction", "0", "--run-dir", "run"]) == 2
    printed = capsys.readouterr()
    line = printed.err.splitlines()[-1]
    assert line.startswith("dpoptim: Out of memory while clipping. Known use: parameters ")
    assert "What to change first: --micro-batch-tokens 512 (the guarantee and the expected batch of 16 stay" in line
    assert "in a new run, --lora-rank 16" in line
    assert "Step 1 has released nothing." in line
    assert line.endswith("Step 0 is saved. Resume with: dpoptim train --resume run --micro-batch-tokens 512")
    assert log_of(tmp_path / "run")[-1]["reason"] == "error: OutOfMemoryError"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(line.partition("Resume with: dpoptim ")[2].split()) == 0
    assert read_recipe(tmp_path / "run" / "recipe.toml").micro_batch_tokens == 512


@pytest.mark.parametrize(("owner", "name", "call"), [(Prepared, "loss_per_example", 30), (clipped_sums, "_sum", 28)])
def test_a_late_failure_loses_no_step(owner, name, call, tmp_path, monkeypatch):
    """Two micro-batches per step; the second of step 14 fails, far from the checkpoint of step 10."""
    recipe = rows_recipe(tmp_path, micro_batch_size=8, validation_fraction=0.0)
    train(recipe, tmp_path / "whole")
    fail_at(monkeypatch, owner, name, call)
    with pytest.raises(torch.OutOfMemoryError) as failed:
        train(recipe, tmp_path / "run")
    step = int(checkpoints(tmp_path / "run" / "checkpoints")[-1].name[-2:])
    assert 10 < step < 15
    assert f"Step {step + 1} has released nothing." in failed.value.__notes__[0]
    assert f"Step {step} is saved." in failed.value.__notes__[-1]
    assert resume(tmp_path / "run", micro_batch_size=4)["reason"] == "finished"
    steps = [entry["step"] for entry in log_of(tmp_path / "run") if entry["kind"] == "step"]
    assert steps == [1, 5, 10, 15, 20]
    assert parameters_at(tmp_path / "run", 20).keys() == parameters_at(tmp_path / "whole", 20).keys()


@pytest.mark.parametrize(("owner", "name"), [(PrivateMechanism, "_add_noise"), (fused, "adam_step_")])
def test_a_failed_update_is_not_saved(owner, name, tmp_path, monkeypatch):
    """The step is in the ledger, so it is repeated exactly, from the last checkpoint."""
    fail_at(monkeypatch, owner, name, 13)
    with pytest.raises(torch.OutOfMemoryError) as failed:
        train(rows_recipe(tmp_path), tmp_path / "run")
    (note,) = failed.value.__notes__
    assert "The update is incomplete: resume from a checkpoint." in note
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-000010"
    before = (tmp_path / "run" / "recipe.toml").read_text()
    with pytest.raises(ValueError, match="micro_batch_size=4 would change the rounding of step 11"):
        resume(tmp_path / "run", micro_batch_size=4)
    assert (tmp_path / "run" / "recipe.toml").read_text() == before
    assert resume(tmp_path / "run")["reason"] == "finished"


def test_a_crash_keeps_its_micro_batches(tmp_path):
    with pytest.raises(RuntimeError, match="the power failed") as failed:
        train(rows_recipe(tmp_path), tmp_path / "run", progress=CrashAfter(13))
    assert not hasattr(failed.value, "__notes__")
    with pytest.raises(ValueError, match="Resume without it, stop with Ctrl-C after step 13, and change it then"):
        resume(tmp_path / "run", micro_batch_size=4)


def test_a_dry_run_names_a_flag(tmp_path, monkeypatch, capsys):
    data = ["train", "--model", "mlp", "--data", write_rows(tmp_path / "rows.csv"), *COLUMN_FLAGS]
    fail_at(monkeypatch, clipped_sums, "_sum", 1)
    assert main([*data, *SETTINGS, "--dry-run", "--micro-batch-size", "8"]) == 2
    assert "What to change first: --micro-batch-size 4 (" in capsys.readouterr().err
