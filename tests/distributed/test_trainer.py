"""PrivateTrainer, loops under Accelerate and `dpoptim train` in two processes."""

from __future__ import annotations

import shutil

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
    jobs = f"exact:{exact}", f"paused:{noisy}", f"ignored:{exact}", "loop", f"command:{command}"
    return run_jobs(2, *jobs, f"in_one_process:{command}", module="trainer_jobs")


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


@pytest.fixture(scope="module")
def noisy_alone(tmp_path_factory):
    """A run of one process with a whole model, other models, and the second half of a run of two processes."""
    folder, others = tmp_path_factory.mktemp("noisy_alone"), tmp_path_factory.mktemp("models")
    return run_jobs(1, f"noisy:{folder}", f"models:{others}", "own_loop", module="trainer_jobs")[0]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What two processes find with FSDP2; `paused` has only the checkpoint of the second of four steps."""
    whole, paused, others = (tmp_path_factory.mktemp(name) for name in ("whole", "paused", "others"))
    run_jobs(2, f"noisy:{paused}:2", module="trainer_jobs", sharded=True)
    shutil.copytree(paused, again := tmp_path_factory.mktemp("again"), dirs_exist_ok=True)
    jobs = f"noisy:{whole}", f"resumed:{paused}", f"models:{others}", "sharded_loop", f"refused:{others}"
    found = run_jobs(2, *jobs, module="trainer_jobs", sharded=True)
    (one,) = run_jobs(1, f"resumed:{again}", module="trainer_jobs")
    return found, one


def test_sharded_training_is_that_of_one_process(noisy_alone, sharded):
    alone = noisy_alone["noisy"]
    for found in (one["noisy"] for one in sharded[0]):
        assert found["sharded"]
        assert not found["gradients"]
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
        assert torch.equal(found["saved"], found["weights"])
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    first = sharded[0][0]["noisy"]
    assert [name for name in first["files"] if "rng" not in name] == [n for n in alone["files"] if "rng" not in n]
    assert "loss" not in first["logged"]


def test_a_sharded_run_resumes_on_two_processes_and_on_one(noisy_alone, sharded):
    found, one = sharded
    for both in found:
        assert torch.equal(both["resumed"], both["noisy"]["weights"])
    torch.testing.assert_close(one["resumed"], noisy_alone["noisy"]["weights"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["causal", "lora", "bf16", "loaded by one process"])
def test_sharded_models(noisy_alone, sharded, kind):
    expected, atol = noisy_alone["models"][kind], 1e-4 if kind == "bf16" else 1e-6
    for found in (one["models"][kind] for one in sharded[0]):
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-4, atol=atol)
        for name, tensor in expected["saved"].items():
            torch.testing.assert_close(found["saved"][name], tensor, rtol=1e-4, atol=atol)


def test_a_sharded_loop_under_accelerate(noisy_alone, sharded):
    for found in (one["sharded_loop"] for one in sharded[0]):
        assert found["is prepared"] == [True, True]
        assert "shard_for_accelerate" in found["whole"]
        assert "whole_state" in found["state"]
        torch.testing.assert_close(found["weights"], noisy_alone["own_loop"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("FSDP1", "fsdp_version=2"),
        ("activation checkpointing", "gradient checkpointing"),
        ("offload", "offload"),
        ("best model", "load_best_model_at_end"),
    ],
)
def test_fsdp_settings_are_refused(sharded, what, message):
    for found in sharded[0]:
        assert message in found["refused"][what]


def test_fsdp_is_refused_where_accelerate_ignores_it(both):
    assert all("does not shard models on the CPU" in found["ignored"] for found in both)


def test_what_runs_in_one_process_is_refused(both):
    for found in (one["in_one_process"] for one in both):
        assert len(found) == 5
        for what, printed in found.items():
            assert f"{what} runs in one process for now. Start it without torchrun" in printed
            assert printed.count("\n") <= 1
