"""Captured batches add the same sums as ordinary ones; tapes replace CUDA graphs."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.clipping import captured, check_example_independence
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.engine import PhysicalBatch
from dpoptim.data.batch_arguments import padded_rows
from dpoptim.kernels.clip_weights import ClipResult
from dpoptim.kernels.flat import FlatTensors
from dpoptim.optim import PrivateOptimizer
from dpoptim.validation.temporary_changes import no_masks_from_values
from tests.clipping.captured_loops import (
    VARIANTS,
    WIDTH,
    batches_of,
    both_ways,
    captured_run,
    losses_of,
    model_of,
    plan_of,
    seen_by,
    warm,
    with_a_graph,
)
from tests.clipping.tape import never_capture, tape_graphs


def trained(
    variant: str, batches: list[tuple[Tensor, Tensor]], *, is_captured: bool, **options: Any
) -> tuple[nn.Module, PrivateOptimizer]:
    """Take a step on each batch, always with the same key and run; return model and optimizer."""
    model = model_of()
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    optimizer = VARIANTS[variant](model, plan_of(), lr=0.1, key=key, run_id="run", external_batches=True, **options)
    losses = losses_of(model)
    run = optimizer.captured(losses, pad_to_multiple=8)
    reduced = torch.mean if options.get("loss_reduction") == "mean" else torch.sum
    for x, y in batches:
        if is_captured:
            with torch.no_grad():
                found = losses(x, y)
            torch.testing.assert_close(run(x, y), found)
        else:
            reduced(losses(x, y)).backward()
        optimizer.step()
    return model, optimizer


def force_recompute(monkeypatch: pytest.MonkeyPatch, is_left_out: Callable[[Tensor], Tensor]) -> None:
    """Let graphs leave out rows, chosen by their norms, as if they needed recomputing."""
    clip_and_sum = ClippedSums.clip_and_sum_into

    def without_rows(self: ClippedSums, into: FlatTensors, batch: PhysicalBatch, *bounds: Any) -> ClipResult:
        found = clip_and_sum(self, into, batch, *bounds)
        found.needs_recompute.copy_(is_left_out(found.norms) & (found.weights > 0))
        shares = torch.where(found.needs_recompute, found.weights, 0.0)
        for name, own in batch.gradients.items():
            for j, share in enumerate(shares):
                into[name].sub_(share * own.example(j))
        found.weights.sub_(shares)
        found.counts[2] += found.needs_recompute.sum()
        return found

    monkeypatch.setattr(ClippedSums, "clip_and_sum_into", without_rows)


RECOMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda norms: norms > math.inf,
    "some": lambda norms: norms > 0.4,
    "all": lambda norms: norms > -1,
    "first": lambda norms: torch.arange(len(norms)) == 0,
}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_add_the_same_sums_as_ordinary_batches(monkeypatch, variant, reduction):
    replays = tape_graphs(monkeypatch)
    batches = batches_of((8, 4), (8, 4), (8, 2), (8, 4), (8, 2), (8, 4), (8, 2))
    expected, ordinary = trained(variant, batches, is_captured=False, loss_reduction=reduction)
    found, optimizer = trained(variant, batches, is_captured=True, loss_reduction=reduction)
    # Sums of squares are not captured; two alternating variants capture each shape separately.
    assert replays == {"squares": [], "in turns": [2, 1]}.get(variant, [3, 2])
    assert_same(found, expected)
    assert optimizer.mechanism.counts_not_private == ordinary.mechanism.counts_not_private
    assert 0 < ordinary.mechanism.counts_not_private.clipped < 56


def test_exact_noise_runs_without_graphs(monkeypatch):
    """Kernels are for float32, and plain functions wait for the device."""
    replays = tape_graphs(monkeypatch)
    _, optimizer, run, (x, y) = with_a_graph(exact_noise=True)
    run(x, y)
    optimizer.step()
    assert run.graphs == 0
    assert not replays
    assert {vector.dtype for vector in optimizer.mechanism._sums._empty.vectors} == {torch.float64}


def test_padding_adds_at_most_an_eighth_of_the_rows():
    assert [padded_rows(examples, None) for examples in (1, 8, 100, 2048)] == [1, 8, 104, 2048]
    assert padded_rows(100, 64) == 128
    assert padded_rows(1, 64) == 1


def test_padding_rows_add_nothing(monkeypatch):
    replays = tape_graphs(monkeypatch)
    batches = batches_of((8, 4), (8, 4), (3, 4), (8, 4), (7, 4), (2, 4), (2, 4), (8, 4))
    expected, ordinary = trained("flat", batches, is_captured=False)
    found, optimizer = trained("flat", batches, is_captured=True)
    assert replays == [7]
    assert_same(found, expected)
    assert optimizer.mechanism.counts_not_private == ordinary.mechanism.counts_not_private
    assert optimizer.mechanism.counts_not_private.examples == sum(len(x) for x, _ in batches)


def test_a_first_row_that_is_not_finite_is_counted_once(monkeypatch):
    """Its copies in the padding rows do not count."""
    tape_graphs(monkeypatch)
    model = model_of()
    optimizer, run = captured_run(model)
    first, last = batches_of((4, 2), (2, 2))
    warm(run, *first, optimizer)
    last[0][0] = math.nan
    run(*last)
    assert optimizer.mechanism._sums.engine.batch.add_ready is not None
    optimizer.mechanism._sums.engine.flush()
    counts = optimizer.mechanism.counts_not_private
    assert (counts.examples, counts.nonfinite) == (10, 1)


def test_norms_equal_those_of_single_examples(monkeypatch):
    tape_graphs(monkeypatch)
    model = model_of()
    optimizer = dpoptim.dp_sgd(model, plan_of(), lr=0.1, external_batches=True)
    run = optimizer.captured(losses_of(model), pad_to_multiple=8)
    for x, y in batches_of((8, 4), (8, 4)):
        run(x, y)
        optimizer.step()
    ((x, y),) = batches_of((5, 4))
    run(x, y)
    optimizer.mechanism._sums.engine.flush()
    (norms,) = optimizer.mechanism._sums.norms
    for j in range(5):
        own = copy.deepcopy(model)
        losses_of(own)(x[j : j + 1], y[j : j + 1]).sum().backward()
        gradients = [p.grad for p in own.parameters() if p.grad is not None]
        alone = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        assert float(norms[j]) == pytest.approx(alone, rel=1e-5)
    assert norms.shape == (5,)


def test_two_batches_make_one_step(monkeypatch):
    """Each batch is added when the next one begins, before its rows are overwritten."""
    replays = tape_graphs(monkeypatch)

    def loop(differentiate: Any, ordinary: Any, optimizer: PrivateOptimizer) -> None:
        for number, (x, y) in enumerate(batches_of(*[(4, 2)] * 8)):
            differentiate(x, y)
            if number % 2:
                optimizer.step()
        assert optimizer.mechanism.counts_not_private.examples == 32

    assert_same(*both_ways(loop))
    assert replays == [7]


@pytest.mark.parametrize("recomputed", ["none", "some", "all"])
def test_an_ordinary_batch_after_a_captured_one(monkeypatch, recomputed):
    tape_graphs(monkeypatch)
    force_recompute(monkeypatch, RECOMPUTED[recomputed])

    def loop(differentiate: Any, ordinary: Any, optimizer: PrivateOptimizer) -> None:
        for x, y in batches_of(*[(4, 2)] * 4):
            differentiate(x, y)
            ordinary(x[:2], y[:2])
            optimizer.step()
        assert optimizer.mechanism.counts_not_private.examples == 24

    assert_same(*both_ways(loop))


def test_left_out_examples_are_recomputed_once(monkeypatch):
    """Only they run again, without a graph."""
    replays = tape_graphs(monkeypatch)
    force_recompute(monkeypatch, RECOMPUTED["all"])
    batches = batches_of((8, 4), (8, 4), (5, 4), (8, 4))
    expected, ordinary = trained("scaled", batches, is_captured=False)
    found, optimizer = trained("scaled", batches, is_captured=True)
    assert sum(replays) == 3
    assert_same(found, expected)
    assert optimizer.mechanism.counts_not_private == ordinary.mechanism.counts_not_private


@pytest.mark.parametrize("recomputed", ["none", "some", "all"])
@pytest.mark.parametrize("sampling", [dpoptim.Poisson(), dpoptim.Shuffled()], ids=["poisson", "shuffled"])
def test_captured_batches_of_a_loader(monkeypatch, sampling, recomputed):
    """Empty samples, micro-batches, and a step that the loop abandons half-way and draws again."""
    replays = tape_graphs(monkeypatch)
    force_recompute(monkeypatch, RECOMPUTED[recomputed])
    torch.manual_seed(2)
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, WIDTH), torch.randn(16))
    plan = plan_of(12, num_examples=16, batch_size=2 if sampling.is_random else 8, sampling=sampling)

    def loop(differentiate: Any, ordinary: Any, optimizer: PrivateOptimizer) -> None:
        loader = dpoptim.private_loader(data, plan, key=optimizer.key, run_id="run", micro_batch_size=3)
        abandoned = False
        while loader.next_step < plan.steps:
            for x, y in loader:
                differentiate(x, y)
                optimizer.step()
                if not loader.step_ends and loader.next_step == 5 and not abandoned:
                    abandoned = True
                    break
        assert optimizer.mechanism.step == 12

    assert_same(*both_ways(loop, pad_to_multiple=3, plan=plan, external_batches=False))
    assert sum(replays) > 3


def test_new_conditions_make_a_new_graph(monkeypatch):
    replays = tape_graphs(monkeypatch)
    layers, dropout = model_of(), nn.Dropout(0.5)
    model = nn.Sequential(layers, dropout)
    optimizer = dpoptim.dp_sgd(model, plan_of(30), lr=0.1, external_batches=True)
    run = optimizer.captured(losses_of(model), pad_to_multiple=4)
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


def test_a_failed_capture_runs_without_a_graph(monkeypatch):
    tape_graphs(monkeypatch)

    def refuse(run, memory):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured, "graph_of", refuse)
    batches = batches_of(*[(8, 4)] * 5)
    expected, ordinary = trained("scaled", batches, is_captured=False)
    with pytest.warns(RuntimeWarning, match=r"could not be captured \(RuntimeError\)") as warned:
        found, optimizer = trained("scaled", batches, is_captured=True)
    assert len([w for w in warned if "captured" in str(w.message)]) == 1
    assert_same(found, expected)
    assert optimizer.mechanism.counts_not_private == ordinary.mechanism.counts_not_private


def test_shapes_above_the_limit_run_without_graphs(monkeypatch):
    replays = tape_graphs(monkeypatch)
    monkeypatch.setattr(captured, "MAX_GRAPHS", 2)
    batches = batches_of((8, 1), (8, 2), (8, 3), (8, 3), (8, 1), (8, 3))
    expected, _ = trained("flat", batches, is_captured=False)
    with pytest.warns(RuntimeWarning, match="more than 2 shapes"):
        found, _ = trained("flat", batches, is_captured=True)
    assert replays == [1]
    assert_same(found, expected)


def test_a_cpu_runs_without_graphs(monkeypatch):
    monkeypatch.setattr(captured, "graph_of", lambda *args: pytest.fail("it was captured"))
    batches = batches_of((8, 4), (3, 4), (8, 4), (8, 4))
    expected, _ = trained("scaled", batches, is_captured=False)
    found, _ = trained("scaled", batches, is_captured=True)
    assert_same(found, expected)


def test_invalid_arguments_are_named():
    model = model_of()
    optimizer = dpoptim.dp_sgd(model, plan_of(), lr=0.1, external_batches=True)
    ((x, y),) = batches_of((4, 2))
    with pytest.raises(ValueError, match="Expected pad_to_multiple to be a whole number"):
        optimizer.captured(losses_of(model), pad_to_multiple=0)
    run = optimizer.captured(losses_of(model))
    with pytest.raises(ValueError, match="first axes of the 2 tensors differ"):
        run(x, y[:3])
    with pytest.raises(ValueError, match="each must hold the examples"):
        run(x, torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"got no tensor.*\*\*batch"):
        run({"texts": ["a", "b"]})
    with torch.no_grad(), pytest.raises(ValueError, match=r"inside no_grad\(\) or public_data\(\)"):
        run(x, y)
    with pytest.raises(ValueError, match="a vector with one loss per example, got a tensor of 0 axes"):
        optimizer.captured(lambda x: model(x).sum())(x)
    with pytest.raises(ValueError, match=r"got a tensor of 2 axes\. Use reduction='none'"):
        optimizer.captured(lambda x: model(x).sum((1, 2))[:, None])(x)
    optimizer.detach()
    with pytest.raises(ValueError, match=r"call optimizer\.captured again"):
        run(x, y)


def test_losses_may_reorder_their_rows(monkeypatch):
    replays = tape_graphs(monkeypatch)
    model = model_of()

    def reordered(x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model)(x.flip(0), y.flip(0)).flip(0)

    optimizer, run = captured_run(model, reordered)
    seen = seen_by(optimizer)
    first, last = batches_of((4, 2), (2, 2))
    warm(run, *first, optimizer)
    for differentiate in (run, lambda x, y: reordered(x, y).sum().backward()):
        differentiate(*last)
        optimizer.step()
    assert replays == [2]
    torch.testing.assert_close(seen[2], seen[3], rtol=1e-5, atol=1e-8)
    assert float(seen[3].norm()) > 0.01


@pytest.mark.parametrize("where", ["between", "warm-up", "sums"])
def test_an_interrupt_drops_a_padded_batch(monkeypatch, where):
    tape_graphs(monkeypatch)
    model = model_of()
    optimizer, run = captured_run(model)
    ((x, y),) = batches_of((2, 2))
    run(x, y)
    optimizer.step()
    engine = optimizer.mechanism._sums.engine

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if where == "sums":
            patched.setattr(optimizer.mechanism._sums, "clip_and_sum_into", interrupt)
        else:
            # There are three flushes: when the call begins, and in each of two runs. Interrupt the second or third.
            passed = [engine.flush] * (1 if where == "warm-up" else 2)
            patched.setattr(engine, "flush", lambda: passed.pop()() if passed else interrupt())
        with pytest.raises(KeyboardInterrupt):
            run(x, y)
    seen = seen_by(optimizer)
    optimizer.step()
    assert float(seen[0].norm()) < 1e-6
    assert optimizer.mechanism.counts_not_private.examples == 2


def test_a_failed_call_does_not_count(monkeypatch):
    tape_graphs(monkeypatch)
    _, optimizer, run, (x, y) = with_a_graph()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(optimizer.mechanism._sums.engine.buffers, "begin", fail)
        with pytest.raises(MemoryError):
            run(x, y)
    run(x[:2], y[:2])
    run(x[2:], y[2:])
    optimizer.step()
    assert optimizer.mechanism.counts_not_private.examples == 12


def test_sums_are_dropped_if_adding_them_fails(monkeypatch):
    tape_graphs(monkeypatch)
    _, optimizer, run, (x, y) = with_a_graph()
    seen = seen_by(optimizer)
    sums = optimizer.mechanism._sums

    def fail(*args: Any) -> None:
        sums._sums.add_all(args[0], keep=False)
        raise MemoryError

    run(x, y)
    with monkeypatch.context() as patched:
        patched.setattr(sums, "add_sums", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.step()
    assert float(seen[0].norm()) < 1e-6


@pytest.mark.parametrize("recomputed", ["none", "some", "all"])
@pytest.mark.parametrize("variant", ["flat", "scaled"])
def test_recomputed_rows_use_their_own_inputs(monkeypatch, variant, recomputed):
    """The host learns which examples to recompute after the loop has overwritten its buffers."""
    replays = tape_graphs(monkeypatch)
    force_recompute(monkeypatch, RECOMPUTED[recomputed])
    parts, norms = batches_of(*[(4, 3)] * 15), {}
    found = []
    for is_captured in (False, True):
        model, key = model_of(), dpoptim.NoiseKey.from_bytes(bytes(32))
        optimizer = VARIANTS[variant](
            model, plan_of(batch_size=12), lr=0.1, key=key, run_id="run", external_batches=True
        )
        losses = losses_of(model)
        run, sums = optimizer.captured(losses, pad_to_multiple=4), optimizer.mechanism._sums
        x, y = (torch.empty_like(tensor) for tensor in parts[0])
        for number, part in enumerate(parts):
            x.copy_(part[0])
            y.copy_(part[1])
            if is_captured:
                run(x, y)
            else:
                losses(x, y).sum().backward()
                sums.engine.flush()
            if number % 3 == 2:
                sums.engine.flush()
                sums._settle()
                norms[number, is_captured] = torch.cat(sums.norms).sort().values
                assert sums.examples == 4 * (number + 1)
                optimizer.step()
        found.append((model, optimizer.mechanism.counts_not_private))
    for number in range(2, 15, 3):
        torch.testing.assert_close(norms[number, True], norms[number, False], rtol=1e-4, atol=1e-6)
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert sum(replays) == 14


def assert_dropped(
    monkeypatch: pytest.MonkeyPatch,
    run: Any,
    failing: Callable[..., None],
    step: Callable[[], None],
    seen: list[Tensor],
) -> None:
    """Check that a step whose recomputation fails leaves nothing behind."""
    with monkeypatch.context() as patched:
        patched.setattr(run._sums, "clip_and_sum_rows", failing)
        with pytest.raises((MemoryError, KeyboardInterrupt)):
            step()
    for _ in range(2):
        step()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-8)
    assert float(seen[1].norm()) > 1e-3


def test_sums_are_dropped_if_recomputing_fails(monkeypatch):
    tape_graphs(monkeypatch)
    force_recompute(monkeypatch, RECOMPUTED["all"])
    model, optimizer, run, (x, y) = with_a_graph()
    seen = seen_by(optimizer)

    def fail(gradients: Any, rows: list[int], *bounds: Any) -> None:
        if rows:
            raise MemoryError

    def step() -> None:  # as large as the plan allows
        losses_of(model)(x, y).sum().backward()
        run(x, y)
        optimizer.step()

    assert_dropped(monkeypatch, run, fail, step, seen)
    optimizer.step()
    assert float(seen[2].norm()) < 1e-6
    assert optimizer.mechanism.counts_not_private.examples == 32


@pytest.mark.parametrize("by", ["the step", "the next batch"])
def test_an_interrupt_while_recomputing_drops_the_sums(monkeypatch, by):
    tape_graphs(monkeypatch)
    force_recompute(monkeypatch, RECOMPUTED["all"])
    _, optimizer, run, (x, y) = with_a_graph(sampling=dpoptim.Poisson())
    seen, ordinary = seen_by(optimizer), run._sums.clip_and_sum_rows

    def interrupted(*args: Any, **options: Any) -> None:
        ordinary(*args, **options)
        raise KeyboardInterrupt

    def step() -> None:
        run(x, y)
        if by == "the next batch":
            run(x[:3], y[:3])
        optimizer.step()

    assert_dropped(monkeypatch, run, interrupted, step, seen)


def test_a_loss_that_shuffles_its_rows_counts_every_example_once(monkeypatch):
    """It draws from numpy, so it runs without a graph; the recomputed rows see the same order."""
    never_capture(monkeypatch)
    force_recompute(monkeypatch, RECOMPUTED["first"])
    model, (batch,) = model_of(), batches_of((4, 2))

    def losses(x: Tensor, y: Tensor) -> Tensor:
        order = torch.from_numpy(np.random.permutation(len(x)))
        return losses_of(model)(x[order], y[order])[order.argsort()]

    optimizer, run = captured_run(model, losses)
    seen = seen_by(optimizer)
    for number in range(8):
        np.random.seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(*batch)
        np.random.seed(99)
        optimizer.step()
    losses_of(model)(*batch).sum().backward()
    optimizer.step()
    for found in seen:
        torch.testing.assert_close(found, seen[-1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("examples", [3, 4])
@pytest.mark.parametrize("recomputed", ["some", "all", "first"])
def test_a_loss_that_reorders_its_rows_counts_every_example_once(monkeypatch, recomputed, examples):
    tape_graphs(monkeypatch)
    force_recompute(monkeypatch, RECOMPUTED[recomputed])
    batches, found = batches_of(*[(examples, 2)] * 4), []
    for is_captured in (False, True):
        model = model_of()

        def losses(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return losses_of(model)(x.flip(0), y.flip(0)).flip(0)

        optimizer, run = captured_run(model, losses)
        seen = seen_by(optimizer)
        for batch in batches:
            if is_captured:
                run(*batch)
            else:
                losses(*batch).sum().backward()
            optimizer.step()
        found.append(torch.stack(seen))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_recomputed_rows_repeat_the_random_draws_of_their_batch(monkeypatch):
    """Even if the loop reseeds the generators in between."""
    tape_graphs(monkeypatch)
    found = []
    for recomputed in ("none", "all"):
        with monkeypatch.context() as patched:
            force_recompute(patched, RECOMPUTED[recomputed])
            optimizer, run = captured_run(nn.Sequential(model_of(), nn.Dropout(0.5)))
            seen = seen_by(optimizer)
            for number, batch in enumerate(batches_of(*[(4, 2)] * 4)):
                torch.manual_seed(number)
                run(*batch)
                torch.manual_seed(99)
                optimizer.step()
            found.append(torch.stack(seen))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_a_recomputed_example_does_not_change_other_examples(monkeypatch):
    """Its own gradient is 0; the model has dropout, and the loop changes a value before the example runs again."""
    tape_graphs(monkeypatch)
    released, explained = [], []
    for recomputed in ("none", "first"):
        with monkeypatch.context() as patched:
            force_recompute(patched, RECOMPUTED[recomputed])
            model, factor = nn.Sequential(model_of(), nn.Dropout(0.5)), torch.ones(())

            def losses(
                x: Tensor, y: Tensor, counts: Tensor, model: nn.Module = model, factor: Tensor = factor
            ) -> Tensor:
                assert len(x) in (3, 4)  # the loop's size or the padded one: recomputing shows no other size
                return losses_of(model)(x, y) * counts * factor

            optimizer, run = captured_run(model, losses, batch_size=12)
            seen = seen_by(optimizer)
            torch.manual_seed(3)
            parts = batches_of(*[(3, 2)] * 9)
            for number, (x, y) in enumerate(parts):
                factor.fill_(1.0 + number % 3)
                run(x, y, torch.tensor([0.0, 1.0, 1.0]))
                if number % 3 == 2:
                    optimizer.step()
            released.append(torch.stack(seen))
            explained.append(str(optimizer.explain()))
    torch.testing.assert_close(released[0], released[1], rtol=1e-5, atol=1e-8)
    assert float(released[0][0].norm()) > 1e-3
    assert explained[0] == explained[1]


def test_a_scale_stays_alive_until_its_batch_is_added(monkeypatch):
    """A new scale at the same address would look unchanged."""
    tape_graphs(monkeypatch)
    model, optimizer, run, (x, y) = with_a_graph()
    for _ in range(2):  # without a graph, then with one
        scale = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
        lives = [weakref.ref(value) for value in scale.values()]
        optimizer.mechanism.scale = scale
        run(x, y)
        del scale
        optimizer.mechanism.scale = None
        assert all(value() is not None for value in lives)
        optimizer.step()
        assert all(value() is None for value in lives)


def test_a_batch_of_a_replaced_optimizer_is_not_recomputed(monkeypatch):
    tape_graphs(monkeypatch)
    force_recompute(monkeypatch, RECOMPUTED["all"])
    model, optimizer, run, (x, y) = with_a_graph()
    sums = optimizer.mechanism._sums
    run(x, y)
    sums.engine.flush()
    captured_run(model)
    with pytest.raises(ValueError, match="a captured batch is still open"):
        sums._settle()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("how", ["replaced", "written to"])
def test_a_scale_that_changes_before_the_step_clips_the_batch_again(monkeypatch, how):
    """It is clipped by the scale that the noise will be divided by."""
    tape_graphs(monkeypatch)
    model = model_of()
    optimizer, run = captured_run(model)
    seen = seen_by(optimizer)
    ((x, y),) = batches_of((4, 2))
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for number, differentiate in enumerate([run, run, run, lambda x, y: losses_of(model)(x, y).sum().backward()]):
        optimizer.mechanism.scale = {name: one.clone() for name, one in ones.items()}
        differentiate(x, y)
        if number >= 2:
            if how == "replaced":
                optimizer.mechanism.scale = {name: 3 * one for name, one in ones.items()}
            else:
                for value in optimizer.mechanism.scale.values():
                    value.mul_(3)
        optimizer.step()
    torch.testing.assert_close(seen[2], seen[3], rtol=1e-5, atol=1e-8)
    assert float(seen[2].norm()) < 0.9 * float(seen[1].norm())


def test_a_new_clip_norm_or_precision_makes_a_new_graph(monkeypatch):
    replays = tape_graphs(monkeypatch)
    model = model_of()
    optimizer, run = captured_run(model)
    seen = seen_by(optimizer)
    ((x, y),) = batches_of((4, 2))
    warm(run, x, y, optimizer)
    optimizer.mechanism._sums.clip_norm = 0.01
    warm(run, x, y, optimizer)
    assert replays == [1, 1]
    assert float(seen[3].norm()) < 0.1 * float(seen[1].norm())
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        warm(run, x, y, optimizer)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert replays == [1, 1, 1]


class Heads(nn.Module):
    """One head for single positions, and a second one for several."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.several = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.one(x) if x.shape[1] == 1 else self.several(x)
        return outputs


def test_unused_parameters_get_no_gradient(monkeypatch):
    """Also if other batches of the same step use them, in a graph or without."""
    replays = tape_graphs(monkeypatch)
    steps: list[list[tuple[int, bool]]] = [[(1, True)], [(2, True)]] * 3 + [[(1, True), (2, True)], [(2, True)]]
    steps += [[(2, False), (1, True)], [(1, False), (2, True)], [(1, True)]]
    found = []
    for captures in (True, False):
        model = Heads()
        for positions in (1, 2):  # each length has its own layer
            ((x, y),) = batches_of((4, positions))
            check_example_independence(model, lambda model, batch: losses_of(model)(*batch), (x, y))
        optimizer, run = captured_run(model)
        seen = seen_by(optimizer)
        for step in steps:
            for positions, in_graph in step:
                ((x, y),) = batches_of((4, positions))
                if captures and in_graph:
                    run(x, y)
                else:
                    losses_of(model)(x, y).sum().backward()
            optimizer.step()
        found.append(torch.stack(seen))
    assert replays == [5, 5]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)


def test_a_captured_batch_is_not_added_in_a_different_context(monkeypatch):
    tape_graphs(monkeypatch)
    model, optimizer, run, (x, y) = with_a_graph()
    run(x, y)
    with dpoptim.public_data(), pytest.raises(ValueError, match=r"still open inside public_data\(\)"):
        optimizer.step()
    earlier = losses_of(model)(x, y).sum()
    run(x, y)
    with pytest.raises(ValueError, match="or another batch's backward"):
        earlier.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_and_buffers_must_not_change_before_the_step(monkeypatch):
    tape_graphs(monkeypatch)
    model, optimizer, run, (x, y) = with_a_graph()
    run(x, y)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' changes when the model runs"):
        optimizer.step()


@pytest.mark.parametrize("change", ["frozen", "buffer", "dtype"])
def test_moved_or_converted_tensors_make_a_new_graph(monkeypatch, change):
    replays = tape_graphs(monkeypatch)
    model = model_of()
    model.register_buffer("shift", torch.zeros(()))

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model)(x.to(next(model.parameters()).dtype), y) + model.get_buffer("shift")

    optimizer, run = captured_run(model, losses)
    ((x, y),) = batches_of((4, 2))
    warm(run, x, y, optimizer)
    before = run(x, y)
    optimizer.step()
    if change == "frozen":
        next(model.parameters()).requires_grad_(False)
        with pytest.raises(ValueError, match="was frozen"):
            run(x, y)
        return
    if change == "buffer":
        model.register_buffer("shift", torch.ones(()))
    else:
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    warm(run, x, y, optimizer)
    assert replays == [2, 1]
    (total,) = run._workspace.new_sums().vectors
    assert total.dtype == (torch.float64 if change == "dtype" else torch.float32)
    expected = before + 1 if change == "buffer" else before.double()
    torch.testing.assert_close(run(x, y), expected, rtol=1e-5, atol=1e-6)


def test_arguments_other_than_tensors_select_the_graph(monkeypatch):
    replays = tape_graphs(monkeypatch)
    model = model_of()

    def losses(x: Tensor, y: Tensor, *, twice: Any = None) -> Tensor:
        return losses_of(model)(x, y) * (2.0 if twice is True else twice or 1.0)

    optimizer, run = captured_run(model, losses, batch_size=16)
    ((x, y),) = batches_of((4, 2))
    once = losses(x, y).detach()
    for twice, times in ((True, 2.0), (False, 1.0), (None, 1.0)):
        for _ in range(3):
            torch.testing.assert_close(run(x, y, twice=twice), times * once)
            optimizer.step()
    assert replays == [2] * 3
    for _ in range(2):
        run(x, y.long(), twice=None)
    torch.testing.assert_close(run(x, y, twice=None), once)  # y is not an integer here
    optimizer.step()
    before = list(replays)
    with pytest.warns(RuntimeWarning, match="without graphs: pass only tensors, True, False and None"):
        run(x, y, twice=3.0)
    for times in (4.0, 3.0, 3.0):  # numbers may differ in each batch
        torch.testing.assert_close(run(x, y, twice=times), times * once)
        optimizer.step()
    assert replays == before


def test_each_batch_has_its_own_norms_and_explanation(monkeypatch):
    tape_graphs(monkeypatch)
    model = model_of()
    optimizer, run = captured_run(model)
    one, other, many = batches_of((4, 2), (4, 2), (8, 1))
    warm(run, *one, optimizer)
    warm(run, *many, optimizer)
    expected = []
    for x, y in (one, other, many):
        losses_of(model)(x, y).sum().backward()
        optimizer.mechanism._sums.engine.flush()
        expected.append(optimizer.mechanism._sums.norms[-1])
        optimizer.step()
    explained = optimizer.explain()
    losses = [run(x, y) for x, y in (many, one, other)]
    torch.testing.assert_close(losses, [losses_of(model)(x, y).detach() for x, y in (many, one, other)])
    optimizer.mechanism._sums.engine.flush()
    first, second, third = optimizer.mechanism._sums.norms
    torch.testing.assert_close([second, third, first], expected)
    assert optimizer.explain() != explained
    run(*many)
    assert optimizer.explain() == explained


def test_a_function_that_skips_rows_is_not_captured(monkeypatch):
    tape_graphs(monkeypatch)
    model = model_of()

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return losses_of(model)(x[:2], y[:2]).repeat(2)

    optimizer, run = captured_run(model, losses)
    ((x, y),) = batches_of((4, 2))
    with pytest.warns(RuntimeWarning, match=r"could not be captured \(the model ran more than once"):
        warm(run, x, y, optimizer)


def test_an_outer_autocast_is_not_captured(monkeypatch):
    monkeypatch.setattr(captured, "choose", SimpleNamespace(available=lambda device: True))
    monkeypatch.setattr(captured, "graph_of", lambda *args: pytest.fail("it was captured"))
    model = model_of()
    optimizer, run = captured_run(model)
    ((x, y),) = batches_of((4, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        warm(run, x, y, optimizer)
    here, there = torch.device("cpu"), torch.device("meta")
    assert captured._can_capture([here])
    assert not captured._can_capture([here, there])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not captured._can_capture([here])


def test_transformers_reads_no_mask():
    """A mask is built if and only if one was given, with and without a graph."""
    for name in ("masking_utils", "modeling_attn_mask_utils"):
        masking = pytest.importorskip(f"transformers.{name}")
        before = masking.is_tracing
        with no_masks_from_values():
            assert not masking.is_tracing(None)
            assert masking.is_tracing(torch.ones(1, 1))
        assert masking.is_tracing is before
