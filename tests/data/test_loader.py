"""The loader: what it yields, the tickets it issues, and how a run resumes."""

from __future__ import annotations

import gc
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from dpoptim.data import batch_handshake as tickets
from dpoptim.data import private_loader
from dpoptim.data.batch_handshake import bind, take
from dpoptim.noise import NoiseKey
from dpoptim.privacy import Adjacency, Poisson, PrivacyPlan, Shuffled

KEY = NoiseKey.from_bytes(bytes(range(32)))
RUN: Any = {"key": KEY, "run_id": "the run"}
DRAWS = KEY.for_run("loader the run")


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def make_plan(count=20, size=5, steps=8, **changes):
    return PrivacyPlan(num_examples=count, batch_size=size, steps=steps, **changes)


def drawn(plan, step, count=None):
    return plan.sampling.indices(
        DRAWS, step, num_examples=plan.num_examples, batch_size=plan.batch_size, dataset_size=count
    ).tolist()


@pytest.mark.parametrize(("sampling", "workers"), [(Shuffled(), 0), (Poisson(), 2)])
def test_yields_the_planned_examples_with_a_ticket_each(sampling, workers):
    plan = make_plan(sampling=sampling)
    loader = private_loader(Numbers(20), plan, **RUN, num_workers=workers)
    assert len(loader) == loader.steps == 8
    for step, batch in enumerate(loader):
        ticket = take(plan, None)
        assert ticket is not None
        assert take(plan, None) is None
        assert (ticket.step, ticket.opens_batch, ticket.closes_batch) == (step, True, True)
        expected = drawn(plan, step)
        assert ticket.is_placeholder == (not expected)
        assert batch.tolist() == (expected or [0])
        assert ticket.physical_examples == len(batch)
    assert step == 7


def test_collates_tuples_and_takes_a_collate_function():
    data = TensorDataset(torch.arange(20).float().unsqueeze(1), torch.arange(20))
    plan = make_plan()
    features, labels = next(iter(private_loader(data, plan, **RUN)))
    assert features.shape == (5, 1)
    assert labels.tolist() == drawn(plan, 0)
    doubled = next(iter(private_loader(Numbers(20), plan, **RUN, collate_fn=lambda rows: [2 * i for i in rows])))
    assert doubled == [2 * i for i in drawn(plan, 0)]


@pytest.mark.parametrize("loading", [{}, {"lengths": range(1, 51), "micro_batch_tokens": 64}])
def test_empty_samples_yield_a_marked_placeholder(loading):
    plan = make_plan(count=50, size=1, steps=60, sampling=Poisson())
    empty = 0
    for batch in private_loader(Numbers(50), plan, **RUN, **loading):
        ticket = take(plan, None)
        assert ticket is not None
        assert ticket.is_placeholder == (not drawn(plan, ticket.step))
        if ticket.is_placeholder:
            empty += 1
            assert batch.tolist() == [0]
            assert ticket.opens_batch
            assert ticket.closes_batch
    assert empty > 5


@pytest.mark.parametrize(("sampling", "workers"), [(Shuffled(), 0), (Poisson(), 2)])
def test_micro_batches_make_up_the_logical_batch(sampling, workers):
    """As few as possible, of equal size or one apart, so that few shapes occur."""
    plan = make_plan(count=30, size=7, steps=6, sampling=sampling)
    loader = private_loader(Numbers(30), plan, **RUN, micro_batch_size=3, num_workers=workers)
    parts: dict[int, list[int]] = {}
    sizes: dict[int, list[int]] = {}
    closed, fresh = [], True
    for batch in loader:
        ticket = take(plan, None)
        assert ticket is not None
        assert ticket.opens_batch == fresh
        fresh = ticket.closes_batch
        assert 1 <= len(batch) == ticket.physical_examples <= 3
        if not ticket.is_placeholder:
            parts.setdefault(ticket.step, []).extend(batch.tolist())
            sizes.setdefault(ticket.step, []).append(len(batch))
        if ticket.closes_batch:
            closed.append(ticket.step)
    assert closed == list(range(6))
    assert all(parts.get(step, []) == drawn(plan, step) for step in range(6))
    for step, found in sizes.items():
        assert len(found) == math.ceil(len(parts[step]) / 3)
        assert max(found) - min(found) <= 1


def test_length_where_it_is_known():
    shuffled = private_loader(Numbers(20), make_plan(), micro_batch_size=2)
    assert len(shuffled) == 8 * 3 == len(list(shuffled))
    with pytest.raises(TypeError, match="steps"):
        len(private_loader(Numbers(20), make_plan(sampling=Poisson()), micro_batch_size=2))


def test_tickets_belong_to_the_plan_object_and_not_to_equal_plans():
    plan, twin = make_plan(), make_plan()
    assert plan == twin
    loader = private_loader(Numbers(20), plan, **RUN)
    iterator = iter(loader)
    next(iterator)
    assert take(twin, None) is None
    next(iterator)
    optimizer = Numbers(1)
    bind(plan, optimizer)
    assert take(plan, None) is None
    next(iterator)
    (channel,) = [channel for channel in tickets._channels if channel.plan() is plan]
    del plan, loader, iterator
    gc.collect()
    take(make_plan(), None)
    assert channel not in tickets._channels, "a new plan removes plans that no longer exist"


def test_tickets_of_dead_loaders_and_abandoned_iterations_are_void():
    plan = make_plan()
    loader = private_loader(Numbers(20), plan, **RUN)
    iterator = iter(loader)
    next(iterator)
    del iterator, loader
    gc.collect()
    assert take(plan, None) is None

    loader = private_loader(Numbers(20), plan, **RUN, micro_batch_size=2)
    old = iter(loader)
    next(old)  # the first third of step 0, then given up
    batch = next(iter(loader))
    ticket = take(plan, None)
    assert ticket is not None
    assert (ticket.step, ticket.opens_batch) == (0, True)
    assert batch.tolist() == drawn(plan, 0)[:2]
    assert take(plan, None) is None
    with pytest.raises(RuntimeError, match="abandoned"):
        next(old)


def test_loop_left_early_resumes_without_drawing_a_step_twice():
    plan = make_plan()
    loader = private_loader(Numbers(20), plan, **RUN)
    for step, _ in enumerate(loader):
        if step == 2:
            break
    assert loader.next_step == 3
    assert len(loader) == 5
    rest = [batch.tolist() for batch in loader]
    assert rest == [drawn(plan, step) for step in range(3, 8)]
    with pytest.raises(ValueError, match="all 8 steps"):
        iter(loader)


def test_resuming_from_a_state_gives_the_rest_of_the_run():
    plan = make_plan(sampling=Poisson())
    whole = [batch.tolist() for batch in private_loader(Numbers(20), plan, **RUN)]
    loader = private_loader(Numbers(20), plan, **RUN)
    iterator = iter(loader)
    begun = [next(iterator).tolist() for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert KEY.fingerprint() in state.values()

    resumed = private_loader(Numbers(20), plan, **RUN)
    resumed.load_state_dict(state)
    assert begun + [batch.tolist() for batch in resumed] == whole
    later = private_loader(Numbers(20), plan, **RUN, start_step=6)
    assert [batch.tolist() for batch in later] == whole[6:]

    sibling = private_loader(Numbers(20), plan, key=KEY)  # an independent run
    assert [batch.tolist() for batch in sibling] != whole
    sibling = private_loader(Numbers(20), plan, key=KEY)
    sibling.load_state_dict(state)
    assert [batch.tolist() for batch in sibling] == whole[3:]
    with pytest.raises(ValueError, match="needs the run's own key and run_id"):
        private_loader(Numbers(20), plan, key=KEY, start_step=6)

    other = private_loader(Numbers(20), plan)
    assert other.key != KEY
    with pytest.raises(ValueError, match="key"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="next_step"):
        resumed.load_state_dict({**state, "next_step": 9})
    with pytest.raises(ValueError, match="saved with different examples"):
        resumed.load_state_dict({**state, "dataset": "0" * 16})


def test_state_saved_between_micro_batches_redraws_the_whole_step():
    plan = make_plan()
    loader = private_loader(Numbers(20), plan, **RUN, micro_batch_size=2)
    iterator = iter(loader)
    for _ in range(4):  # three parts of step 0, one of step 1
        next(iterator)
    assert loader.state_dict()["next_step"] == 1


def test_number_of_examples_is_checked_where_it_is_public():
    for adjacency in (Adjacency.ZERO_OUT, Adjacency.REPLACE):
        with pytest.raises(ValueError, match="num_examples=20"):
            private_loader(Numbers(19), make_plan(adjacency=adjacency, sampling=Poisson()))
    plan = make_plan(adjacency=Adjacency.ADD_REMOVE, sampling=Poisson(), steps=40)
    loader = private_loader(Numbers(60), plan, **RUN)
    batches = [batch.tolist() for batch in loader]
    expected = [drawn(plan, step, 60) or [0] for step in range(40)]
    assert batches == expected
    assert np.mean([len(b) for b in batches]) == pytest.approx(15, rel=0.15)  # the plan's rate on 60 examples


def divided(rows: dict[str, list[int]]) -> dict[str, list[float]]:
    return {"x": [number / max(rows["x"]) for number in rows["x"]]}


def arrow(count: int) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"x": list(range(1, count + 1))})


@pytest.mark.parametrize(("is_part", "workers"), [(False, 2), (True, 0)])
def test_a_transform_cannot_mix_examples(is_part, workers):
    data: Any = arrow(20).with_transform(divided)
    assert data.__getitems__([1, 3]) != [data[1], data[3]], "it would mix them"
    loader = private_loader(Subset(data, range(20)) if is_part else data, make_plan(), **RUN, num_workers=workers)
    for batch in loader:
        assert batch["x"].tolist() == [1.0] * 5


def test_rows_without_a_transform_are_read_together(monkeypatch):
    data, plan, reads = arrow(20), make_plan(), []
    read_many = type(data).__getitems__

    def noted(self: Any, places: list[int]) -> Any:
        reads.append(places)
        return read_many(self, places)

    monkeypatch.setattr(type(data), "__getitems__", noted)
    for kind in (None, "torch"):
        loader = private_loader(data.with_format(kind), plan, **RUN)
        assert [number - 1 for number in next(iter(loader))["x"].tolist()] == drawn(plan, 0) == reads[-1]


class Collator:
    """A collator with its own generator or seed."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __call__(self, rows: Any) -> Any:
        return torch.stack(rows)


@pytest.mark.parametrize(
    "held",
    [
        {"seed": 42},
        {"rng": np.random.default_rng(0)},
        {"rng": np.random.RandomState(0)},
        {"rng": random.Random(0)},
        {"rng": torch.Generator()},
    ],
)
def test_a_collator_with_its_own_seed_or_generator_is_refused(held):
    with pytest.raises(ValueError, match=rf"collate_fn\.{next(iter(held))}.* secret key"):
        private_loader(Numbers(20), make_plan(), collate_fn=Collator(**held))


def test_collators_that_draw_from_the_seeded_generators_are_accepted():
    for collate in (Collator(seed=None, draw=random.random, rng=torch.default_generator), lambda rows: rows):
        private_loader(Numbers(20), make_plan(), collate_fn=collate)


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(20))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dataset": Stream()}, "map-style"),
        ({"dataset": []}, "empty"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"micro_batch_size": True}, "micro_batch_size"),
        ({"start_step": 9}, "start_step"),
        ({"start_step": -1}, "start_step"),
        ({"key": b"secret"}, "key"),
    ],
)
def test_bad_arguments_are_named(changes, match):
    arguments = {"dataset": Numbers(20), "plan": make_plan(), **changes}
    with pytest.raises(ValueError, match=match):
        private_loader(**arguments)


def no_private_optimizer(caught):
    return [str(one.message) for one in caught if "no private optimizer" in str(one.message)]


def test_training_without_a_private_optimizer_is_warned_about_once(recwarn):
    plan = make_plan()
    for _ in private_loader(Numbers(20), plan, micro_batch_size=2):
        pass
    assert len(no_private_optimizer(recwarn)) == 1


def test_loops_that_do_not_train_alone_draw_no_warning(recwarn):
    for _ in private_loader(Numbers(20), plan := make_plan(sampling=Poisson(), size=1), micro_batch_size=1):
        take(plan, None)
    for _ in private_loader(Numbers(20), make_plan(steps=1), micro_batch_size=2):  # one step
        pass
    plan = make_plan()
    for _ in range(2):  # each looks at a first batch
        loader = private_loader(Numbers(20), plan)
        next(iter(loader)), next(iter(loader))
    assert no_private_optimizer(recwarn) == []
