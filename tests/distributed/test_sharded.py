"""Models that FSDP2 shards train as whole models do: the same noise, the same weights, less memory in each process."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.jobs import NOISES, STEPS, plan_of
from tests.distributed.launch import ROOT, run_jobs, torchrun


@pytest.fixture(scope="module")
def alone(case):
    """What one process finds with a whole model, by job."""
    return run_jobs(1, f"variants:{case[1]}", "noise_alone", "small_shares", "users", "evaluated", "tied", "memory")[0]


@pytest.fixture(scope="module")
def results(case):
    """What each process finds, by job."""
    count, which = case
    same = "noise_alone", "small_shares", "users", "evaluated", "one_record", "ledger", "tied"
    return run_jobs(count, f"variants:{which}", *same, "memory", "sent", "mixing", "refused", sharded=True)


@pytest.fixture(scope="module")
def mistakes():
    return [found["mistakes"] for found in run_jobs(2, "mistakes", sharded=True)]


def test_the_noise_has_the_same_bits(results, alone):
    for found in results:
        for noise in NOISES:
            assert torch.equal(found["noise_alone"][noise], alone["noise_alone"][noise]), noise


@pytest.mark.parametrize("job", ["variants", "small_shares", "users", "evaluated", "tied"])
def test_weights_are_those_of_one_process(results, alone, job):
    for name, expected in alone[job].items():
        assert all(torch.equal(found[job][name], results[0][job][name]) for found in results), name
        torch.testing.assert_close(results[0][job][name], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_one_record_changes_a_release_by_at_most_the_clip_norm(results):
    clip_norm = plan_of().clip_norm
    for found in results:
        all_records, without_one = found["one_record"]
        assert 0.5 * clip_norm < float((all_records - without_one).norm()) * 60 <= clip_norm * (1 + 1e-4)


def test_each_process_holds_its_part_of_parameters_state_noise_and_everything_else(results, alone, case):
    for found in results:
        for what, whole in alone["memory"].items():
            assert found["memory"][what] <= 1.02 * whole / case[0], what


def test_a_micro_batch_gathers_the_scale_and_adds_up_the_sums_once(results):
    for found in results:
        for collective in ("all_gather", "reduce_scatter"):  # of small parameters that are padded to equal rows
            assert 1 <= found["sent"][collective] < 1.5


def test_a_step_is_not_released_again_with_different_gradients(results):
    for rank, found in enumerate(results):
        *same, refused = found["ledger"]
        assert same == ["released"] * 2
        assert ("process 0 refused" if rank else "different gradients") in refused


def test_mixing_is_refused_in_all_processes(results):
    for found in results:
        assert "mix" in found["mixing"]


def test_other_ways_of_sharding_are_refused(results):
    for found in results:
        assert "not divided by rows" in found["refused"]["some parameters"]
        assert "clipped_sum needs a whole model" in found["refused"]["clipped_sum"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("bypassed", "outside the layer that owns it"),
        ("counting", "changes when the model runs"),
        ("replaced", "was replaced"),
        ("late", "was replaced"),
        ("unfrozen", "was frozen or unfrozen"),
        ("checked before", "outside the layer that owns it"),
        ("generic alone", "a module around it"),
        ("generic inside", "released"),
        ("evaluated first", "released"),
    ],
)
def test_mistakes_are_refused_as_in_whole_models(mistakes, what, message):
    for found in mistakes:
        assert message in found[what]


@pytest.mark.slow
@pytest.mark.parametrize("whole_last", [False, True])
def test_a_run_continues_with_fewer_processes(tmp_path, whole_last):
    for count, steps in ((4, 7), (2, 14), (1, STEPS)):
        is_last = count == 1
        found = run_jobs(count, f"resume:{tmp_path / 'run.pt'}:{steps}", sharded=not (is_last and whole_last))
    (expected,) = run_jobs(1, f"resume:{tmp_path / 'whole.pt'}:{STEPS}")
    torch.testing.assert_close(found[0]["resume"], expected["resume"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_example_continues_with_a_different_number_of_processes(tmp_path):
    for count, steps in ((2, 10), (1, 30)):
        done = torchrun(str(ROOT / "examples/sharded_loop.py"), "--steps", str(steps), count=count, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"after step {steps}: accuracy 0." in done.stdout
