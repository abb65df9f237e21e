"""Batches that run as one graph add what they would add in the ordinary way; tapes take the place of graphs."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.gradients import captured
from dpoptim.optim import PrivateOptimizer
from tests.gradients.tape import tape_graphs

WIDTH = 6
VARIANTS: dict[str, Callable[..., PrivateOptimizer]] = {
    "flat": dpoptim.dp_sgd,
    "scaled": dpoptim.scale_then_privatize,
    "squares": functools.partial(dpoptim.independent_moments, squares="average_of"),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3, bias=False)
    return nn.Sequential(*layers)


def losses_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def losses(x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = model(x)
        return (outputs - y[:, None, None]).square().mean((1, 2))

    return losses


def batches_of(*sizes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    """One for each (examples, positions); an example is as long as a few clip norms, or much less."""
    torch.manual_seed(1)
    return [(torch.randn(n, t, WIDTH) * torch.rand(n, 1, 1) * 3, torch.randn(n)) for n, t in sizes]


def plan_of(steps: int = 12, **options: Any) -> dpoptim.PrivacyPlan:
    return dpoptim.PrivacyPlan(
        **{"num_examples": 64, "batch_size": 8, "steps": steps, "noise_multiplier": 0.1, **options}
    )


def trained(
    variant: str, batches: list[tuple[Tensor, Tensor]], *, is_captured: bool, **options: Any
) -> tuple[nn.Module, PrivateOptimizer]:
    """The model after a step on each batch, with its optimizer; key and run are always the same."""
    model = model_of()
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    optimizer = VARIANTS[variant](model, plan_of(), lr=0.1, key=key, run_id="run", own_batches=True, **options)
    losses = losses_of(model)
    run = optimizer.captured(losses, together=8)
    reduced = torch.mean if options.get("loss_reduction") == "mean" else torch.sum
    for x, y in batches:
        found = losses(x, y)
        if is_captured:
            torch.testing.assert_close(run(x, y), found.detach())
        else:
            reduced(found).backward()
        optimizer.step()
    return model, optimizer


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_add_what_the_ordinary_way_adds(monkeypatch, variant, reduction):
    replays = tape_graphs(monkeypatch)
    batches = batches_of((8, 4), (8, 4), (8, 2), (8, 4), (8, 2), (8, 4), (8, 2))
    expected, ordinary = trained(variant, batches, is_captured=False, loss_reduction=reduction)
    found, optimizer = trained(variant, batches, is_captured=True, loss_reduction=reduction)
    assert replays == [3, 2]
    assert_same(found, expected)
    assert optimizer.release.counts_not_private == ordinary.release.counts_not_private
    assert 0 < ordinary.release.counts_not_private.clipped < 56


def test_rows_that_fill_a_batch_up_add_nothing(monkeypatch):
    replays = tape_graphs(monkeypatch)
    batches = batches_of((8, 4), (8, 4), (3, 4), (8, 4), (7, 4), (1, 4), (1, 4), (8, 4))
    expected, ordinary = trained("flat", batches, is_captured=False)
    found, optimizer = trained("flat", batches, is_captured=True)
    assert replays == [7]
    assert_same(found, expected)
    assert optimizer.release.counts_not_private == ordinary.release.counts_not_private
    assert optimizer.release.counts_not_private.examples == sum(len(x) for x, _ in batches)


def test_norms_are_those_of_the_examples_alone(monkeypatch):
    tape_graphs(monkeypatch)
    model = model_of()
    optimizer = dpoptim.dp_sgd(model, plan_of(), lr=0.1, own_batches=True)
    run = optimizer.captured(losses_of(model), together=8)
    for x, y in batches_of((8, 4), (8, 4)):
        run(x, y)
        optimizer.step()
    ((x, y),) = batches_of((5, 4))
    run(x, y)
    optimizer.release._sums.engine.flush()
    (norms,) = optimizer.release._sums.norms
    for j in range(5):
        own = copy.deepcopy(model)
        losses_of(own)(x[j : j + 1], y[j : j + 1]).sum().backward()
        gradients = [p.grad for p in own.parameters() if p.grad is not None]
        alone = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        assert float(norms[j]) == pytest.approx(alone, rel=1e-5)
    assert norms.shape == (5,)


def test_two_batches_make_one_step(monkeypatch):
    """Each is taken in when the next one begins, before its rows are overwritten."""
    replays = tape_graphs(monkeypatch)
    models = []
    for is_captured in (False, True):
        model = model_of()
        optimizer = dpoptim.dp_sgd(
            model, plan_of(), lr=0.3, key=dpoptim.NoiseKey.from_bytes(bytes(32)), run_id="run", own_batches=True
        )
        run = optimizer.captured(losses_of(model), together=4)
        for number, (x, y) in enumerate(batches_of(*[(4, 2)] * 8)):
            if is_captured:
                run(x, y)
            else:
                losses_of(model)(x, y).sum().backward()
            if number % 2:
                optimizer.step()
        assert optimizer.release.counts_not_private.examples == 32
        models.append(model)
    assert replays == [7]
    assert_same(*models)


def test_an_ordinary_batch_may_follow(monkeypatch):
    tape_graphs(monkeypatch)
    models = []
    for is_captured in (False, True):
        model = model_of()
        optimizer = dpoptim.dp_sgd(
            model, plan_of(), lr=0.3, key=dpoptim.NoiseKey.from_bytes(bytes(32)), run_id="run", own_batches=True
        )
        run = optimizer.captured(losses_of(model), together=4)
        for x, y in batches_of(*[(4, 2)] * 4):
            if is_captured:
                run(x, y)
            else:
                losses_of(model)(x, y).sum().backward()
            losses_of(model)(x[:1], y[:1]).sum().backward()
            optimizer.step()
        assert optimizer.release.counts_not_private.examples == 20
        models.append(model)
    assert_same(*models)


def test_examples_apart_are_looked_at_once(monkeypatch):
    """A replay that tells of one does not count; its batch runs again, in the ordinary way."""
    replays = tape_graphs(monkeypatch)
    monkeypatch.setattr(captured, "told_later", lambda found: lambda: [0])
    batches = batches_of((8, 4), (8, 4), (5, 4), (8, 4))
    expected, ordinary = trained("scaled", batches, is_captured=False)
    found, optimizer = trained("scaled", batches, is_captured=True)
    assert sum(replays) == 3
    assert_same(found, expected)
    assert optimizer.release.counts_not_private == ordinary.release.counts_not_private


@pytest.mark.parametrize("sampling", [dpoptim.Poisson(), dpoptim.Shuffled()], ids=["poisson", "shuffled"])
def test_a_loader_is_followed(monkeypatch, sampling):
    """Empty samples, parts of a step, and a step that the loop breaks off in its middle and draws again."""
    replays = tape_graphs(monkeypatch)
    torch.manual_seed(2)
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, WIDTH), torch.randn(16))
    models = []
    for is_captured in (False, True):
        model = model_of()
        plan = plan_of(12, num_examples=16, batch_size=2 if sampling.is_random else 8, sampling=sampling)
        key = dpoptim.NoiseKey.from_bytes(bytes(32))
        optimizer = dpoptim.dp_sgd(model, plan, lr=0.3, key=key, run_id="run")
        loader = dpoptim.private_loader(data, plan, key=key, run_id="run", micro_batch_size=3)
        run = optimizer.captured(losses_of(model), together=3)
        broken_off = False
        while loader.next_step < plan.steps:
            for x, y in loader:
                if is_captured:
                    run(x, y)
                else:
                    losses_of(model)(x, y).sum().backward()
                optimizer.step()
                if not loader.step_ends and loader.next_step == 5 and not broken_off:
                    broken_off = True
                    break
        assert optimizer.release.step == 12
        models.append(model)
    assert sum(replays) > 3
    assert_same(*models)


def test_other_conditions_make_another_graph(monkeypatch):
    replays = tape_graphs(monkeypatch)
    layers, dropout = model_of(), nn.Dropout(0.5)
    model = nn.Sequential(layers, dropout)
    optimizer = dpoptim.dp_sgd(model, plan_of(30), lr=0.1, own_batches=True)
    run = optimizer.captured(losses_of(model), together=4)
    ((x, y),) = batches_of((4, 2))

    def three_times() -> None:
        for _ in range(3):
            run(x, y)
            optimizer.step()

    three_times()
    assert replays == [2]
    model.eval()
    three_times()
    assert replays == [2, 2]
    torch.testing.assert_close(run(x, y), losses_of(model)(x, y).detach())  # no dropout
    first = next(layers.parameters())
    first.data = first.data.clone() * 2
    three_times()
    assert replays == [2, 3, 2]
    model.train()
    three_times()
    model.eval()
    three_times()
    assert replays == [2, 3, 5, 2]
    torch.testing.assert_close(run(x, y), losses_of(model)(x, y).detach())


def test_what_cannot_be_captured_runs_as_it_is(monkeypatch):
    tape_graphs(monkeypatch)

    def refuse(run, room):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured, "_graph_of", refuse)
    batches = batches_of(*[(8, 4)] * 5)
    expected, ordinary = trained("scaled", batches, is_captured=False)
    with pytest.warns(RuntimeWarning, match=r"could not be captured as a graph \(RuntimeError\)") as warned:
        found, optimizer = trained("scaled", batches, is_captured=True)
    assert len([w for w in warned if "captured" in str(w.message)]) == 1
    assert_same(found, expected)
    assert optimizer.release.counts_not_private == ordinary.release.counts_not_private


def test_more_shapes_than_graphs_run_as_they_are(monkeypatch):
    replays = tape_graphs(monkeypatch)
    monkeypatch.setattr(captured, "MOST_GRAPHS", 2)
    batches = batches_of((8, 1), (8, 2), (8, 3), (8, 3), (8, 1), (8, 3))
    expected, _ = trained("flat", batches, is_captured=False)
    with pytest.warns(RuntimeWarning, match="more than 2 shapes"):
        found, _ = trained("flat", batches, is_captured=True)
    assert replays == [1]
    assert_same(found, expected)


def test_a_cpu_runs_without_graphs():
    batches = batches_of((8, 4), (3, 4), (8, 4), (8, 4))
    expected, _ = trained("scaled", batches, is_captured=False)
    found, _ = trained("scaled", batches, is_captured=True)
    assert_same(found, expected)


def test_mistakes_are_told():
    model = model_of()
    optimizer = dpoptim.dp_sgd(model, plan_of(), lr=0.1, own_batches=True)
    ((x, y),) = batches_of((4, 2))
    with pytest.raises(ValueError, match="losses must be a function"):
        optimizer.captured(model(x))
    with pytest.raises(ValueError, match="together=0 must be a whole number"):
        optimizer.captured(losses_of(model), together=0)
    run = optimizer.captured(losses_of(model))
    with pytest.raises(ValueError, match=r"examples as their first axis.*\(4, 2, 6\), \(3,\)"):
        run(x, y[:3])
    with pytest.raises(ValueError, match="examples as their first axis"):
        run(x, torch.tensor(1.0))
    with torch.no_grad(), pytest.raises(ValueError, match=r"inside no_grad\(\) or public_data\(\)"):
        run(x, y)
    with pytest.raises(ValueError, match=r"one loss an example, of shape \(4,\), got \(\)"):
        optimizer.captured(lambda x: model(x).sum())(x)
    optimizer.detach()
    with pytest.raises(ValueError, match="capture anew"):
        run(x, y)
