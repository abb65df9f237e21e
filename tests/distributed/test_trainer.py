"""PrivateTrainer, loops under Accelerate and `dpoptim train` in two processes."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import run_jobs

pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return run_jobs(1, f"exact:{folder}", "own_loop", f"command:{folder}", module="trainer_jobs")[0]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    exact, noisy = tmp_path_factory.mktemp("exact"), tmp_path_factory.mktemp("noisy")
    command = tmp_path_factory.mktemp("command")
    return run_jobs(2, f"exact:{exact}", f"paused:{noisy}", "loop", f"command:{command}", module="trainer_jobs")


def test_two_processes_train_as_one_does(alone, both):
    assert torch.equal(both[0]["exact"], both[1]["exact"])
    torch.testing.assert_close(both[0]["exact"], alone["exact"], rtol=1e-4, atol=1e-6)


def test_all_processes_have_the_same_key_plan_and_weights(both):
    first, second = (found["paused"] for found in both)
    assert first["batch size"] == 12
    assert first["key"] == second["key"]
    assert torch.equal(first["weights"], second["weights"])


def test_a_resumed_run_repeats_its_steps(both):
    for found in both:
        assert torch.equal(found["paused"]["again"], found["paused"]["weights"])


def test_one_process_writes_the_run(both):
    found = both[0]["paused"]
    assert found["secrets"] == [".key", ".steps"]
    assert {"private_loader.json", "optimizer.pt", "model.safetensors"} <= set(found["files"])
    assert "loss" not in found["logged"]
    assert "epsilon" in found["logged"]


def test_a_loop_under_accelerate(alone, both):
    for found in both:
        assert found["loop"]["kind"] == "Sequential"  # not wrapped
        assert "one step per process" in found["loop"]["scheduler"]
        torch.testing.assert_close(found["loop"]["weights"], alone["own_loop"], rtol=1e-4, atol=1e-5)


def test_the_command_line(alone, both):
    """Noise and batches are those of one process; a run that is stopped in process 0 stops and resumes in both."""
    for found in both:
        torch.testing.assert_close(found["command"]["whole"], alone["command"]["whole"], rtol=1e-4, atol=1e-5)
        assert torch.equal(found["command"]["paused"], found["command"]["whole"])
    assert both[0]["command"]["summaries"] == ["finished", "finished"]
    assert both[1]["command"]["summaries"] == [None, None]
    assert both[0]["command"]["logged"] == alone["command"]["logged"]
