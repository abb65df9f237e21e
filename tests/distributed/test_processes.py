"""Several processes train as one does: the same noise, the same weights, and clear errors if they disagree."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.jobs import NOISES, STEPS, plan_of
from tests.distributed.launch import run_jobs


@pytest.fixture(scope="module")
def alone(case):
    """What one process finds, by job."""
    return run_jobs(1, f"variants:{case[1]}", "noise_alone", "small_shares", "users")[0]


@pytest.fixture(scope="module")
def results(case):
    """What each process finds, by job."""
    count, which = case
    others = ["small_shares", "users", "noise_faults", "one_record", "defaults", "disagree", "ledger", "public"]
    others += ["wrapped", "ledger_everywhere"]
    return run_jobs(count, f"variants:{which}", "noise_alone", *others)


def test_the_noise_has_the_same_bits(results, alone):
    """So it is added once: not by each process, and neither divided nor multiplied by √count."""
    for found in results:
        for noise in NOISES:
            assert torch.equal(found["noise_alone"][noise], alone["noise_alone"][noise]), noise


def has_planned_level(released):
    """Whether noise alone has the standard deviation of the plan, within four standard deviations of the estimate."""
    plan = plan_of()
    level = plan.noise_stddevs().gradient_sum / plan.batch_size
    return abs(float(released.std()) / level - 1) < 4 / (2 * released.numel()) ** 0.5


def test_noise_has_the_planned_level(results, alone):
    for found in (alone, *results):
        assert len(found["noise_alone"]["independent"]) == STEPS
        assert has_planned_level(found["noise_alone"]["independent"])


@pytest.mark.parametrize("fault", ["summed", "divided"])
def test_the_level_shows_noise_that_is_added_by_each_process_or_divided(results, fault):
    for found in results:
        assert not has_planned_level(found["noise_faults"][fault])


def test_weights_are_those_of_one_process(results, alone):
    for name, expected in alone["variants"].items():
        assert all(torch.equal(found["variants"][name], results[0]["variants"][name]) for found in results), name
        torch.testing.assert_close(results[0]["variants"][name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_one_record_changes_a_release_by_at_most_the_clip_norm(results):
    """All noise cancels in the difference."""
    clip_norm = plan_of().clip_norm
    for found in results:
        all_records, without_one = found["one_record"]
        assert 0.5 * clip_norm < float((all_records - without_one).norm()) * 60 <= clip_norm * (1 + 1e-4)


def test_empty_shares_and_uneven_micro_batches_take_part(results, alone):
    for found in results:
        for name, expected in alone["small_shares"].items():
            torch.testing.assert_close(found["small_shares"][name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_users_are_shared_out_whole(results, alone):
    for found in results:
        for name, expected in alone["users"].items():
            torch.testing.assert_close(found["users"][name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_processes_share_what_is_not_given(results):
    first, second = (found["defaults"] for found in results[:2])
    assert torch.equal(first["weights"], second["weights"])
    assert first["fingerprint"] == second["fingerprint"]
    assert not torch.equal(first["masks"], second["masks"])  # dropout differs


def test_processes_that_disagree_are_refused(results):
    expected = {
        "data": "the dataset of process 1 differs",
        "order": "the dataset of process 1 differs",
        "plan": "the plan of process 1 differs",
        "model": "the model of process 1 differs",
        "key": "the noise key of process 1 differs",
        "lr": "lr or another setting of process 1 differs",
        "scale": "the variant of process 1 differs",
        "decay": "lr or another setting of process 1 differs",
        "step": "differ in step, run or scale",
        "moment": "differ in step, run or scale",
        "wrapped": "DistributedDataParallel combines gradients itself",
        "external": "external_batches=True runs in one process",
        "given key": "key= (given or not) of process 1 differs",
        "given run_id": "run_id= (given or not) of process 1 differs",
        "no loader": "the next call (private_loader or optimizer) of process 1 differs",
        "version": "the version of dpoptim of process 1 differs",
        "code": "the code of dpoptim of process 1 differs",
        "script": "the script of process 1 differs",
        "nothing": "no error",
    }
    for found in results:
        for what, words in expected.items():
            assert words in found["disagree"][what]


def test_a_wrapper_that_calls_the_model_changes_nothing(results):
    """DistributedDataParallel has no gradients to combine, because the engine computes none."""
    for found in results:
        plain, *others = found["wrapped"].values()
        assert len(others) == 3
        assert all(torch.equal(weights, plain) for weights in others)


def test_a_ledger_in_all_processes_is_refused(results):
    answers = sorted(found["ledger_everywhere"] for found in results)
    assert answers.pop() == "opened"
    assert all("open the ledger in process 0 only" in answer for answer in answers)


def test_public_gradients_are_those_of_the_first_process(results):
    assert all(torch.equal(found["public"], results[0]["public"]) for found in results)


def test_a_step_is_not_released_again_with_different_gradients(results):
    for rank, found in enumerate(results):
        *same, refused = found["ledger"]
        assert same == ["released"] * 2
        assert ("process 0 refused" if rank else "different gradients") in refused


@pytest.mark.slow
def test_a_run_continues_with_fewer_processes(tmp_path):
    for count, steps in ((4, 7), (2, 14), (1, STEPS)):
        found = run_jobs(count, f"resume:{tmp_path / 'run.pt'}:{steps}")
    (expected,) = run_jobs(1, f"resume:{tmp_path / 'whole.pt'}:{STEPS}")
    torch.testing.assert_close(found[0]["resume"], expected["resume"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_released_step_is_repeated_with_the_same_number_of_processes_only(tmp_path):
    """Sums that are added up in a different order round differently, so the noise would reveal their difference."""
    file = tmp_path / "run.pt"
    run_jobs(2, f"resume:{file}:7")
    saved = {path: path.read_bytes() for path in tmp_path.glob("run.pt.*") if path.suffix != ".steps"}
    (first, _) = run_jobs(2, f"resume:{file}:14")
    for path, content in saved.items():
        path.write_bytes(content)
    (refused,) = run_jobs(1, f"resume:{file}:14")
    assert "step 8 was released before with different gradients" in refused["resume"]
    (again, _) = run_jobs(2, f"resume:{file}:14")
    assert torch.equal(again["resume"], first["resume"])


@pytest.mark.slow
def test_a_changed_number_of_processes_needs_a_ledger(tmp_path):
    run_jobs(2, f"resume:{tmp_path / 'run.pt'}:7:no")
    (found,) = run_jobs(1, f"resume:{tmp_path / 'run.pt'}:14:no")
    assert "Expected processes=2, got 1. To change them, use the run's step ledger" in found["resume"]
    (found,) = run_jobs(1, f"loaded_twice:{tmp_path / 'run.pt.BandMF'}")
    assert "use the run's step ledger" in found["loaded_twice"]


@pytest.mark.slow
def test_a_late_start_of_torch_distributed_is_refused():
    for found in run_jobs(2, "late_start"):
        assert all("was started" in error for error in found["late_start"].values()), found
