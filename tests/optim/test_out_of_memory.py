"""Out of memory in `step()`: the error keeps its type, its note names a setting, and no part of a batch is released."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import dpoptim
from dpoptim.clipping import PrivateMechanism, clipped_sums
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.optim import fused
from dpoptim.optim.out_of_memory import is_out_of_memory
from tests.optim.test_training import RUN, dataset, losses, mlp, plan, train

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    MemoryError(),
]
PLACES: dict[str, tuple[Any, str]] = {
    "clipping": (clipped_sums, "_sum"),
    "taking": (clipped_sums._Accumulator, "taken"),
    "noise": (PrivateMechanism, "_add_noise"),
    "update": (fused, "adam_step_"),
}


def fail_at(monkeypatch: pytest.MonkeyPatch, place: str, call: int, error: Exception) -> None:
    """Make the given call of a function raise."""
    owner, name = PLACES[place]
    whole, calls = getattr(owner, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise error
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)


def run_until_error(the_plan: dpoptim.PrivacyPlan, *, run: Any = RUN, **options: Any) -> tuple[Any, Any, Any, Any]:
    model, memory = mlp(), options.pop("optimizer_options", {})
    loader = dpoptim.private_loader(dataset(), the_plan, **run, **options)
    optimizer = dpoptim.scale_then_privatize(model, the_plan, lr=1e-2, **run, **memory)
    batches = iter(loader)
    for batch in batches:
        losses(model, batch).sum().backward()
        try:
            optimizer.step()
        except (RuntimeError, MemoryError) as error:
            return model, optimizer, batches, error
    raise AssertionError("no step failed")


def continued(model: Any, optimizer: Any, the_plan: dpoptim.PrivacyPlan, **options: Any) -> torch.Tensor:
    for batch in dpoptim.private_loader(dataset(), the_plan, start_step=optimizer.mechanism.step, **RUN, **options):
        losses(model, batch).sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("place", ["clipping", "taking"])
def test_sums_of_a_failed_step_are_not_in_the_next_release(place, monkeypatch):
    """Taking the sums allocates those of parameters without gradients, so it may fail too."""
    the_plan, whole = plan(), train(plan())
    fail_at(monkeypatch, place, 2, torch.OutOfMemoryError("CUDA out of memory."))
    model, optimizer, _, _ = run_until_error(the_plan)
    assert optimizer.mechanism.step == 1
    torch.testing.assert_close(continued(model, optimizer, the_plan), whole)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failed_part_is_taken_again_in_smaller_parts(error, monkeypatch):
    """The second part of three fails: the first is dropped, the third is refused, and the step can be repeated."""
    the_plan = plan()
    whole = train(plan())
    fail_at(monkeypatch, "clipping", 5, error)
    model, optimizer, batches, found = run_until_error(the_plan, micro_batch_size=2)
    assert found is error
    assert optimizer.mechanism.step == 1
    assert found.__notes__[0].splitlines() == [
        "Out of memory while clipping. Known use: parameters 528 B, optimizer state 1.58 kB, clipped sums 528 B, "
        "gradient factors of 2 examples about 1.06 kB.",
        "What to change first: pass micro_batch_size=1 to private_loader (the guarantee and the expected batch of 6 "
        "stay the same).",
        "If that is not enough: create the optimizer with clipping_memory=0 (saves up to 67.1 MB, clips more slowly); "
        "train only LoRA factors.",
        "Step 2 has released nothing. Smaller batches round differently and cannot repeat a released step, so "
        "resume from a checkpoint of step 1.",
    ]
    losses(model, next(batches)).sum().backward()
    with pytest.raises(ValueError, match=r"an earlier part of this batch failed.*start_step=1"):
        optimizer.step()
    again = continued(model, optimizer, the_plan, micro_batch_size=1)
    assert float((whole - again).norm() / whole.norm()) <= 1e-12


def test_noise_that_does_not_fit_moves_to_the_host(monkeypatch):
    """Smaller batches would not help there. Nothing was released, so the step can be repeated."""
    the_plan = plan(noise=dpoptim.BandedToeplitz(bands=3))
    whole = train(the_plan.replace())
    fail_at(monkeypatch, "noise", 2, MemoryError())
    model, optimizer, _, error = run_until_error(the_plan)
    note = error.__notes__[-1]
    assert note.startswith("Out of memory while adding noise and updating parameters.")
    assert "What to change first: create the optimizer with noise_memory=NoiseMemory(on_host=True, bits=16)" in note
    assert "micro_batch_size" not in note
    again = continued(model, optimizer, the_plan)
    assert float((whole - again).norm() / whole.norm()) <= 1e-12


def test_a_failed_update_needs_a_checkpoint(monkeypatch):
    fail_at(monkeypatch, "update", 2, MemoryError())
    *_, error = run_until_error(plan())
    assert "What to change first: train only LoRA factors." in error.__notes__[-1]
    assert "The update is incomplete: resume from a checkpoint." in error.__notes__[-1]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, "pass micro_batch_size=3 to private_loader"),
        ({"micro_batch_size": 1}, "create the optimizer with clipping_memory=0"),
        ({"lengths": [3] * 60, "micro_batch_tokens": 256}, "pass micro_batch_tokens=128 to private_loader"),
        ({"lengths": [3] * 60, "micro_batch_tokens": 64}, "create the optimizer with clipping_memory=0"),
        ({"micro_batch_size": 1, "optimizer_options": {"clipping_memory": 0}}, "train only LoRA factors"),
    ],
)
def test_first_advice_depends_on_the_settings(options, first, monkeypatch):
    fail_at(monkeypatch, "clipping", 3, MemoryError())
    *_, error = run_until_error(plan(), **options)
    assert f"What to change first: {first}" in error.__notes__[-1]


def test_the_note_does_not_depend_on_the_secret_batch(monkeypatch):
    """Poisson batches of different sizes, the failed one and the one before it, give the same note."""
    notes, sizes = set(), set()
    for name in "abc":
        with monkeypatch.context() as patch:
            run = {**RUN, "run_id": name}
            fail_at(patch, "clipping", 2, MemoryError())
            the_plan = plan(sampling=dpoptim.Poisson(), batch_size=20)
            _, optimizer, _, error = run_until_error(the_plan, run=run)
            sizes.add(optimizer.mechanism.counts_not_private.examples)
            notes.add(error.__notes__[-1])
    assert len(sizes) > 1
    assert len(notes) == 1
    assert not {str(size) for size in sizes - {20, 10}} & set(re.findall(r"\d+", notes.pop()))


def test_other_errors_get_no_note(monkeypatch):
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    fail_at(monkeypatch, "clipping", 1, RuntimeError("shapes do not match"))
    *_, error = run_until_error(plan())
    assert not hasattr(error, "__notes__")


def test_a_batch_that_failed_before_the_step_is_refused(monkeypatch):
    """Otherwise the step would release an empty batch in its place."""
    model = torch.nn.Linear(3, 2)
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=2, noise_multiplier=1.0)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1)

    def fail(*args: object, **options: object) -> None:
        raise MemoryError

    for (batch,) in dpoptim.private_loader(torch.utils.data.TensorDataset(torch.randn(8, 3)), plan):
        model(batch).sum().backward()
        with monkeypatch.context() as patched:
            patched.setattr(ClippedSums, "clip_and_sum_rows", fail)
            with pytest.raises(MemoryError):
                optimizer.explain()
        with pytest.raises(ValueError, match="number of differentiated examples"):
            optimizer.step()
        break
