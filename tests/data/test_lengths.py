"""Batches cut by length: the cheapest cut, the parts that the loader yields, and padding to few widths."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpoptim
from dpoptim.data import private_loader
from dpoptim.data.batch_handshake import take
from dpoptim.data.lengths import cut_by_length, pad_to_bucket
from dpoptim.noise import NoiseKey
from dpoptim.privacy import Adjacency, Poisson, PrivacyPlan, Shuffled

KEY = NoiseKey.from_bytes(bytes(range(32)))
RUN: Any = {"key": KEY, "run_id": "the run"}
LENGTHS = np.random.default_rng(0).integers(1, 40, 60)
DATA: Any = range(60)
SAMPLINGS = [Shuffled(), Poisson()]


def width(lengths, bucket):
    return -(-int(max(lengths)) // bucket) * bucket


def cost(parts, bucket, price):
    return sum(len(part) * width(part, bucket) + price for part in parts)


def least_cost(lengths, *, max_tokens, max_examples, bucket, price):
    """The cheapest of all ways to cut the sorted row."""
    row = sorted(lengths)
    costs = []
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(1, len(row)), count) for count in range(len(row))
    ):
        parts = [row[a:b] for a, b in itertools.pairwise((0, *cuts, len(row)))]
        if all(len(p) <= max_examples and (len(p) == 1 or len(p) * width(p, bucket) <= max_tokens) for p in parts):
            costs.append(cost(parts, bucket, price))
    return min(costs)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_cut_is_cheaper(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, rng.integers(5, 60), rng.integers(1, 11))
    bounds = {
        "max_tokens": int(rng.integers(20, 400)),
        "max_examples": int(rng.integers(1, 12)),
        "bucket": int(rng.choice([1, 4, 16])),
        "price": int(rng.choice([0, 1, 10, 40, 200])),
    }
    found = [lengths[part] for part in cut_by_length(lengths, **bounds)]
    assert cost(found, bounds["bucket"], bounds["price"]) == least_cost(lengths, **bounds)


@pytest.mark.parametrize("max_examples", [None, 50])
def test_parts_keep_both_bounds_and_every_example_once(max_examples):
    lengths = np.random.default_rng(1).integers(1, 513, 2048)
    parts = cut_by_length(lengths, max_tokens=30_000, max_examples=max_examples)
    assert sorted(np.concatenate(parts).tolist()) == list(range(2048))
    order = np.concatenate(parts)
    assert order.tolist() == sorted(range(2048), key=lambda j: (lengths[j], j))
    for part in parts:
        assert len(part) * width(lengths[part], 64) <= 30_000
        assert len(part) <= (max_examples or 2048)


def test_the_price_trades_padding_for_parts():
    lengths = np.random.default_rng(2).integers(1, 513, 2048)
    count = {price: len(cut_by_length(lengths, max_tokens=1 << 21, price=price)) for price in (0, 50_000, 1 << 30)}
    assert count[0] == 8  # each width alone
    assert 1 < count[50_000] < 8
    assert count[1 << 30] == 1


def test_an_example_above_the_bound_is_alone():
    parts = cut_by_length(np.array([10, 900, 10, 800]), max_tokens=256)
    assert [part.tolist() for part in parts] == [[0, 2], [3], [1]]
    assert cut_by_length(np.array([], dtype=np.int64), max_tokens=256) == []


def test_very_large_bounds():
    (part,) = cut_by_length(np.array([10, 900]), max_tokens=10**20, max_examples=10**20)
    assert part.tolist() == [0, 1]


def tokens_plan(sampling, **changes):
    return PrivacyPlan(**{"num_examples": 60, "batch_size": 12, "steps": 9, "sampling": sampling, **changes})


def drawn(plan, step):
    return plan.sampling.indices(
        KEY.for_run("loader the run"), step, num_examples=60, batch_size=plan.batch_size, dataset_size=60
    ).tolist()


@pytest.mark.parametrize(("sampling", "workers", "size"), [(Shuffled(), 0, 3), (Poisson(), 2, None), (Poisson(), 0, 3)])
def test_parts_of_a_step_are_its_examples_with_the_right_tickets(sampling, workers, size):
    plan = tokens_plan(sampling)
    loader = private_loader(
        DATA, plan, **RUN, lengths=LENGTHS, micro_batch_tokens=128, bucket=8, micro_batch_size=size,
        num_workers=workers,
    )  # fmt: skip
    parts: dict[int, list[list[int]]] = {step: [] for step in range(9)}
    fresh = True
    for batch in loader:
        ticket = take(plan, None)
        assert ticket is not None
        assert ticket.opens_batch == fresh
        assert not ticket.is_placeholder
        assert ticket.physical_examples == len(batch)
        assert ticket.closes_batch == loader.step_ends
        fresh = ticket.closes_batch
        assert len(batch) * width(LENGTHS[batch.tolist()], 8) <= 128
        assert len(batch) <= (size or 60)
        parts[ticket.step].append(batch.tolist())
    assert fresh
    for step, found in parts.items():
        flat = list(itertools.chain.from_iterable(found))
        assert len(found) > 1
        assert sorted(flat) == sorted(drawn(plan, step))
        assert LENGTHS[flat].tolist() == sorted(LENGTHS[flat])


def test_resuming_gives_the_same_parts():
    def parts(**changes):
        plan = tokens_plan(Poisson())
        loader = private_loader(DATA, plan, **RUN, lengths=LENGTHS, micro_batch_tokens=128, bucket=8, **changes)
        found = []
        for batch in loader:
            ticket = take(plan, None)
            assert ticket is not None
            found.append((ticket.step, batch.tolist()))
        return found

    whole = parts()
    assert parts(start_step=4) == [(step, part) for step, part in whole if step >= 4]


class Bag(nn.Module):
    """A small model of texts: the mean of its words' rows, without the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.leave = nn.Embedding(30, 6), nn.Linear(6, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        real = (ids != 0)[..., None]
        return self.leave((self.table(ids) * real).sum(1) / real.sum(1))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_cutting_a_step_into_parts_does_not_change_the_release(sampling):
    generator = torch.Generator().manual_seed(0)
    texts: Any = [torch.randint(1, 30, (int(n),), generator=generator) for n in LENGTHS]
    trained = []
    cuts: list[Any] = [{}, {"lengths": LENGTHS, "micro_batch_tokens": 64, "bucket": 8}]
    for cut in cuts:
        torch.manual_seed(0)
        model = Bag().double()
        plan = tokens_plan(sampling, noise_multiplier=0.5)
        loader = private_loader(texts, plan, **RUN, **cut, collate_fn=lambda rows: pad_to_bucket(rows, value=0))
        optimizer = dpoptim.dp_sgd(model, plan, lr=0.5, key=KEY, run_id="noise")
        for ids in loader:
            model(ids).square().sum().backward()
            optimizer.step()
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-11, atol=1e-12)


def test_lengths_of_any_type_are_copied_to_an_array():
    kinds: list[Any] = [LENGTHS.tolist(), LENGTHS.astype(np.uint16), torch.tensor(LENGTHS)]
    for given in kinds:
        loader = private_loader(DATA, tokens_plan(Shuffled()), lengths=given, micro_batch_tokens=128)
        assert loader.lengths is not None
        assert loader.lengths.dtype == np.int64
        given[0] = 10**4
        assert loader.lengths.tolist() == LENGTHS.tolist()
        with pytest.raises(TypeError, match="steps"):
            len(loader)


def test_lengths_match_the_dataset_if_its_size_is_private():
    plan = tokens_plan(Poisson(), adjacency=Adjacency.ADD_REMOVE, num_examples=50)
    assert private_loader(DATA, plan, lengths=LENGTHS, micro_batch_tokens=64).lengths is not None
    with pytest.raises(ValueError, match="50 lengths for 60"):
        private_loader(DATA, plan, lengths=LENGTHS[:50], micro_batch_tokens=64)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"lengths": LENGTHS}, "both lengths and micro_batch_tokens, or neither"),
        ({"micro_batch_tokens": 64}, "both lengths and micro_batch_tokens, or neither"),
        ({"lengths": LENGTHS[1:], "micro_batch_tokens": 64}, "59 lengths for 60 examples"),
        ({"lengths": [3, -1, *LENGTHS[2:]], "micro_batch_tokens": 64}, "lengths >= 1, got -1"),
        ({"lengths": LENGTHS / 2, "micro_batch_tokens": 64}, "float64"),
        ({"lengths": LENGTHS[None], "micro_batch_tokens": 64}, "shape"),
        ({"lengths": LENGTHS > 3, "micro_batch_tokens": 64}, "bool"),
        ({"lengths": LENGTHS, "micro_batch_tokens": 0}, "micro_batch_tokens to be a whole number >= 1"),
        ({"lengths": LENGTHS, "micro_batch_tokens": True}, "micro_batch_tokens to be a whole number >= 1"),
        ({"lengths": LENGTHS, "micro_batch_tokens": 64, "bucket": 0}, "bucket"),
    ],
)
def test_bad_arguments_are_named(changes, match):
    with pytest.raises(ValueError, match=match):
        private_loader(DATA, tokens_plan(Shuffled()), **changes)


ROWS = [[5, 6, 7], [], [8], [1] * 9]


@pytest.mark.parametrize(
    "kind",
    [
        list,
        lambda row: np.array(row, dtype=np.uint16),
        lambda row: torch.tensor(row, dtype=torch.int32),
        lambda row: np.array(row) if len(row) != 1 else torch.tensor(row),
    ],
    ids=["lists", "arrays", "tensors", "mixed"],
)
def test_padding_stacks_rows(kind):
    found = pad_to_bucket([kind(row) for row in ROWS], value=-100, bucket=4)
    assert found.dtype == torch.int64
    assert found.tolist() == [row + [-100] * (12 - len(row)) for row in ROWS]
    assert pad_to_bucket([kind(row) for row in ROWS], value=0).shape == (4, 64)


def test_padding_at_the_edges():
    assert pad_to_bucket([[1] * 64, [2]], value=0).shape == (2, 64)
    assert pad_to_bucket([[], []], value=7, bucket=2).tolist() == [[7, 7], [7, 7]]
    assert pad_to_bucket([[1, 2, 3]], value=0, bucket=1).tolist() == [[1, 2, 3]]
    for sequences, match in [
        ([], "empty"),
        ([[1.5]], "float64"),
        ([torch.ones(2), torch.ones(2).long()], "float32"),
        ([[[1, 2], [3, 4]]], "2 axes"),
        ([torch.ones(3, dtype=torch.bool)], "bool"),
    ]:
        with pytest.raises(ValueError, match=match):
            pad_to_bucket(sequences, value=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket"):
        pad_to_bucket([[1]], value=0, bucket=0)


def test_parts_come_in_few_shapes():
    """Parts have a multiple of 64 examples, and a run of many batches has few shapes."""
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(50):
        lengths = np.clip(rng.normal(200, 80, 512), 10, 512).astype(np.int64)
        parts = cut_by_length(lengths, max_tokens=1 << 17, multiple=64, price=2_000)
        assert sorted(np.concatenate(parts).tolist()) == list(range(512))
        assert all(len(part) % 64 == 0 for part in parts)
        shapes |= {(len(part), int(-(-lengths[part].max() // 64) * 64)) for part in parts}
    assert len(shapes) <= 30
    alone = {
        (len(part), int(-(-lengths[part].max() // 64) * 64))
        for part in cut_by_length(lengths, max_tokens=1 << 17, multiple=1, price=2_000)
    }
    assert any(examples % 64 for examples, _ in alone)
    tight = cut_by_length(np.array([500, 500, 500]), max_tokens=512, multiple=64)
    assert [len(part) for part in tight] == [1, 1, 1]
