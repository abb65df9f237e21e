"""Large models leave their sums in the memory of a graph, where the next replay overwrites them."""

from __future__ import annotations

import pytest
import torch

import dpoptim
from dpoptim.kernels.inverse_root import ComputedScale
from dpoptim.optim import PrivateOptimizer
from tests.clipping.captured_loops import VARIANTS, batches_of, losses_of, model_of, plan_of
from tests.clipping.tape import lend_memory_of_tapes, tape_graphs


@pytest.fixture(autouse=True)
def _several_vectors(monkeypatch):
    lend_memory_of_tapes(monkeypatch)


def begun(variant):
    model = model_of()
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    optimizer = VARIANTS[variant](model, plan_of(batch_size=24), lr=0.1, key=key, run_id="run", external_batches=True)
    return model, optimizer, optimizer.captured(losses_of(model), pad_to_multiple=8)


def trained(variant, batches, *, is_captured, parts):
    """Take steps of one or several batches, and return the parameters after each step."""
    model, optimizer, run = begun(variant)
    losses, path = losses_of(model), []
    assert optimizer.mechanism._sums.saves_memory
    for number, (x, y) in enumerate(batches, start=1):
        if is_captured:
            run(x, y)
        else:
            losses(x, y).sum().backward()
        if number % parts == 0:
            optimizer.step()
            path.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
    return torch.stack(path)


@pytest.mark.parametrize("computes_scale", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("variant", ["flat", "scaled", "in turns"])
def test_replays_add_the_same_sums_as_ordinary_batches(monkeypatch, variant, parts, computes_scale):
    if computes_scale:
        monkeypatch.setattr(PrivateOptimizer, "_computes_scale", lambda self: True)
        assert isinstance(begun("scaled")[1].mechanism.scale, ComputedScale)
    replays = tape_graphs(monkeypatch)
    batches = batches_of(*[(8, 4), (8, 4), (8, 2), (5, 4), (8, 2), (8, 4)] * 2)
    expected = trained(variant, batches, is_captured=False, parts=parts)
    found = trained(variant, batches, is_captured=True, parts=parts)
    assert variant == "in turns" or replays == [7, 3]
    assert sum(replays) >= 4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_still_held_is_not_overwritten(monkeypatch):
    replays = tape_graphs(monkeypatch)
    batches = batches_of(*[(8, 4)] * 8)
    expected = trained("flat", batches, is_captured=False, parts=1)
    model, optimizer, run = begun("flat")
    losses, held, copies = losses_of(model), [], []

    def hold(released):
        held.append(released.gradient)
        copies.append(released.gradient.mapped(torch.clone))

    for number, (x, y) in enumerate(batches):
        if number == 2:
            optimizer.observers.append(hold)
        if number == 5:
            optimizer.observers.clear()
            for name in copies[0]:
                assert torch.equal(held[0][name], copies[0][name])
            held.clear()
        with torch.no_grad():
            found = losses(x, y)
        torch.testing.assert_close(run(x, y), found)
        optimizer.step()
        now = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(now, expected[number], rtol=1e-5, atol=1e-6)
    assert replays == [5]  # of the second and third batch, and of those after the gradient was let go


def test_a_batch_that_is_dropped_frees_the_memory_of_its_graph(monkeypatch):
    replays = tape_graphs(monkeypatch)
    _, optimizer, run = begun("flat")
    long, short = batches_of((8, 4), (8, 2))
    for batch in (long, long, short, short):
        run(*batch)
        optimizer.step()
    run(*long)
    optimizer.mechanism._drop(everything=True)
    run(*short)
    assert replays == [2, 2]
