"""Clipping by user against brute force: the mean gradient of a user's records, by separate backwards, clipped whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.kernels.user_rows import UserRows
from tests.clipping.models import CASES, EXAMPLES, Case, case
from tests.clipping.one_at_a_time import clip_and_sum, clipped_by_user, gradients_one_at_a_time, random_scale

KINDS = ("linear 2-D", "tied", "lstm", "embedding", "conv2d patches", "BertForMaskedLM")
COUNTS = ((2, 1, 2), (1, 3, 1), (5,), (2, 3), (1, 1, 1, 1, 1))


def user_gradients(made: Case, counts: Sequence[int]) -> list[dict[str, Tensor]]:
    """The mean gradient of each user's records, one backward per record."""
    rows = iter(gradients_one_at_a_time(made.model, made.loss_fn, made.batch, sum(counts)))
    of_users = [[next(rows) for _ in range(count)] for count in counts]
    return [{name: torch.stack([g[name] for g in own]).mean(0) for name in own[0]} for own in of_users]


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("place", "name"), list(enumerate(CASES)), ids=CASES)
def test_equals_one_user_at_a_time(place, name):
    """Every layer, with several ways to divide its rows among users, flat and scaled, and with memory to form."""
    made = case(name)
    for number, counts in enumerate((COUNTS[place % len(COUNTS)], COUNTS[(place + 1) % len(COUNTS)])):
        scale = random_scale(made.model) if (place + number) % 2 else None
        gradients = user_gradients(made, counts)
        _, norms = clip_and_sum(gradients, 1.0, scale)
        clip_norm = float(norms.median()) * 0.999
        expected, norms = clip_and_sum(gradients, clip_norm, scale)
        sums, found, *_ = clipped_by_user(made, counts, clip_norm, scale, memory=1 << 20 if place % 3 == 0 else 0)
        torch.testing.assert_close(found, norms, rtol=1e-10, atol=1e-12)
        assert_close(sums, expected)


@pytest.mark.parametrize("name", KINDS[1:])
def test_squares_of_users_are_squares_of_their_means(name):
    made, counts = case(name), (2, 1, 2)
    gradients = user_gradients(made, counts)
    _, norms = clip_and_sum(gradients, 1.0, None)
    clip_norm = float(norms.median()) * 0.999
    _, _, squares, _ = clipped_by_user(made, counts, clip_norm)
    for parameter in gradients[0]:
        weights = [min(1.0, clip_norm / float(norm)) for norm in norms]
        expected = sum((w * own[parameter]) ** 2 for w, own in zip(weights, gradients, strict=True))
        torch.testing.assert_close(squares[parameter], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("place", "name"), list(enumerate(KINDS)), ids=KINDS)
def test_all_records_of_a_user_move_the_sum_by_at_most_the_clip_norm(place, name):
    """Remove or replace everything of one user; records that were clipped one by one would move it further."""
    made, clip_norm = case(name), 1e-3
    scale = random_scale(made.model) if place % 2 else None

    def released(rows: list[int], counts: tuple[int, ...]) -> dict[str, Tensor]:
        own = Case(made.model, made.loss_fn, pytree.tree_map(lambda t: t[rows], made.batch))
        return clipped_by_user(own, counts, clip_norm, scale)[0]

    def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        differences = {n: one[n] - other[n] for n in one}
        return sum(float(((d if scale is None else d * scale[n]) ** 2).sum()) for n, d in differences.items()) ** 0.5

    whole = released([0, 1, 2, 3], (3, 1))
    without = released([3], (1,))
    replaced = released([4, 3], (1, 1))
    assert clip_norm * (1 - 1e-6) <= distance(whole, without) <= clip_norm * (1 + 1e-6)
    assert distance(whole, replaced) <= 2 * clip_norm * (1 + 1e-6)


def test_records_of_one_user_are_not_clipped_one_by_one():
    """Two opposite gradients cancel in the mean of one user; clipped one by one, the longer one would be cut first."""
    model = nn.Linear(1, 1, bias=False).double()
    made = Case(model, lambda m, x: m(x)[:, 0], torch.tensor([[100.0], [-98.0], [1.0]], dtype=torch.float64))
    sums, norms, *_ = clipped_by_user(made, (2, 1), 1.0)
    assert norms.tolist() == pytest.approx([1.0, 1.0])
    assert float(sums["weight"]) == pytest.approx(2.0)


def test_one_record_per_user_gives_the_bits_of_examples():
    for name in ("mlp with in-place activations", "tied", "lstm"):
        made = case(name, torch.float32)
        plain = ClippedSums(made.model, clip_norm=0.5)
        plain.engine.attach()
        made.loss_fn(made.model, made.batch).sum().backward()
        expected, _ = plain.take()
        plain.engine.detach()
        found, *_ = clipped_by_user(made, (1,) * EXAMPLES, 0.5)
        for parameter, total in expected.items():
            assert torch.equal(found[parameter], total)


def test_averaged_losses_are_undone():
    made = case("tied")
    expected, norms, *_ = clipped_by_user(made, (2, 3), 0.4)
    found, found_norms, *_ = clipped_by_user(made, (2, 3), 0.4, mean=True)
    torch.testing.assert_close(found_norms, norms)
    assert_close(found, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_user_with_one_broken_record_adds_nothing(bad):
    made = case("mlp with in-place activations")
    made.batch[1, 0] = bad
    good = Case(made.model, made.loss_fn, made.batch[2:])
    expected, *_ = clipped_by_user(good, (1, 2), 0.3)
    found, _, _, seen = clipped_by_user(made, (2, 1, 2), 0.3)
    assert_close(found, expected)
    assert seen.nonfinite == 1
    assert seen.examples == 3


def test_records_that_nearly_cancel_are_recomputed():
    """The norm of a user's sum is far below its parts', so it is taken from the gradient itself."""
    torch.manual_seed(0)
    model = nn.Linear(40, 50, bias=False)
    a, b = 1e4 * torch.randn(2, 1, 40)
    x = torch.stack([a, b, -(a + b), torch.randn(1, 40)])
    made = Case(model, lambda m, x: m(x).flatten(1).sum(1), x)
    sums, *_ = clipped_by_user(made, (3, 1), 1.0)
    assert float(sums["weight"].norm()) <= 2 + 1e-4


@pytest.mark.parametrize("counts", [None, (2, 2), (3, 3), (6,)])
def test_rows_that_the_loader_did_not_draw_are_refused(counts):
    made = case("linear 2-D")
    with pytest.raises(ValueError, match="it is unknown which user"):
        clipped_by_user(made, counts, 1.0)


def test_rows_of_16_bits_are_summed_in_float32():
    values = torch.tensor([[1.0], [2.0**-9], [2.0**-9]], dtype=torch.bfloat16)
    assert UserRows([3]).summed(values).tolist() == [[1.0 + 2.0**-8]]
