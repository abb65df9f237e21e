"""Users in the loader: ids, which records are drawn, parts that split no user, several processes, refusals."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import dpoptim
from dpoptim.data.processes import Processes
from dpoptim.data.users import OrderedCollate, UserRecords, cut_by_user, read_user_ids

KEY = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
RUN: Any = {"key": KEY, "run_id": "the run"}
IDS = [(place * place) % 23 - 5 for place in range(200)]  # negative, unordered, not contiguous
USERS = len(set(IDS))


def plan(**changes: Any) -> dpoptim.PrivacyPlan:
    own: dict[str, Any] = {"num_examples": USERS, "batch_size": 4, "steps": 30, "unit": "user", "records_per_user": 5}
    return dpoptim.PrivacyPlan(**{**own, **changes})


def loader(the_plan: dpoptim.PrivacyPlan, **options: Any) -> Any:
    data: Any = list(range(len(IDS)))
    return dpoptim.private_loader(data, the_plan, **{"users": IDS, **RUN, **options})


@pytest.mark.parametrize("sampling", [dpoptim.Shuffled(), dpoptim.Poisson(), dpoptim.CyclicPoisson(bands=2)])
@pytest.mark.parametrize("limit", [None, 1, 7])
def test_batches_hold_the_users_that_the_plan_draws(sampling, limit):
    the_plan = plan(sampling=sampling)
    whose = UserRecords(IDS)
    found = loader(the_plan, micro_batch_size=limit)
    for step in range(the_plan.steps):
        users = sampling.indices(KEY.for_run("loader the run"), step, num_examples=USERS, batch_size=4)
        taken: Counter[int] = Counter()
        for rows, ticket in found.physical_batches(step):
            if ticket.is_placeholder:
                continue
            assert sum(ticket.rows_of_users) == len(rows) == len(set(rows))
            assert ticket.physical_examples == len(ticket.rows_of_users)
            assert limit is None or len(rows) <= limit or len(ticket.rows_of_users) == 1
            owners = [IDS[row] for row in rows]
            start = 0
            for count in ticket.rows_of_users:  # a user's rows are next to each other
                assert len(set(owners[start : start + count])) == 1
                start += count
            assert not set(owners) & set(taken), "a user is split"
            taken.update(owners)
        expected = {IDS[whose.of_user(int(user))[0]]: min(5, len(whose.of_user(int(user)))) for user in users}
        assert taken == expected


def test_records_of_a_user_are_drawn_uniformly_anew_in_each_step():
    whose = UserRecords([0] * 9 + [1] * 3)
    drawn = [whose.drawn(KEY, step, 0, most=3).tolist() for step in range(6000)]
    assert all(len(set(own)) == 3 for own in drawn)
    often = np.bincount(np.concatenate(drawn), minlength=9)
    assert abs(often - 2000).max() < 5 * (6000 * (1 / 3) * (2 / 3)) ** 0.5
    assert len({tuple(own) for own in drawn}) == 84  # all subsets
    assert whose.drawn(KEY, 0, 1, most=3).tolist() == [9, 10, 11]


def test_a_draw_depends_on_key_step_and_own_records_only():
    few, many = UserRecords([7] * 9), UserRecords([7] * 9 + [8] * 100)
    assert few.drawn(KEY, 4, 0, most=3).tolist() == many.drawn(KEY, 4, 0, most=3).tolist()
    other = dpoptim.NoiseKey.from_bytes(bytes(32))
    assert few.drawn(KEY, 4, 0, most=3).tolist() != few.drawn(other, 4, 0, most=3).tolist()


def test_an_empty_sample_is_a_placeholder():
    sparse = loader(plan(sampling=dpoptim.Poisson(), batch_size=1, steps=60))
    tickets = [ticket for step in range(60) for _, ticket in sparse.physical_batches(step)]
    empty = [ticket for ticket in tickets if ticket.is_placeholder]
    assert empty
    assert all(ticket.rows_of_users == (1,) for ticket in empty)


def test_parts_keep_to_tokens_and_put_similar_users_together():
    lengths = np.array([5, 90, 6, 7, 60, 5, 8, 300])
    chosen = [np.array(own) for own in ([0, 2], [1], [3, 5, 6], [4], [7])]
    parts = cut_by_user(chosen, lengths=lengths, max_tokens=320, max_records=4, bucket=64)
    assert [[own.tolist() for own in part] for part in parts] == [[[4], [0, 2]], [[3, 5, 6]], [[1]], [[7]]]
    assert cut_by_user([]) == []


def test_processes_share_out_whole_users():
    the_plan = plan(sampling=dpoptim.Poisson(), batch_size=9)
    alone = loader(the_plan)
    each = [dataclasses.replace(alone, processes=Processes(rank, 3)) for rank in range(3)]
    for step in range(10):
        whole = sorted(row for part, _ in alone.physical_batches(step) for row in part)
        shares = [[(part, t) for part, t in one.physical_batches(step) if not t.is_placeholder] for one in each]
        assert sorted(row for share in shares for part, _ in share for row in part) == whole
        owners = [{IDS[row] for part, _ in share for row in part} for share in shares]
        assert sum(map(len, owners)) == len(set().union(*owners))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "record 3 has a NoneType in place"),
        (float("nan"), "record 3 has a float in place"),
        ("", "record 3 has an empty string"),
        ("  ", "record 3 has an empty string"),
        (True, "record 3 has a bool"),
        (1.5, "record 3 has a float"),
        (b"x", "record 3 has a bytes"),
        (4, "record 3 has a user id of type int, and earlier ones are of type str"),
    ],
)
def test_ids_that_name_nobody_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        UserRecords(["a", "b", "a", bad, "c"])


def test_ids_may_be_arrays_tensors_and_columns():
    expected = [0, 1, 0]
    columns = [{"who": "x", "n": 1}, {"who": "y", "n": 2}, {"who": "x", "n": 3}]
    cases: list[Any] = [
        (range(3), np.array(["x", "y", "x"])),
        (range(3), torch.tensor([-1, 9, -1])),
        (range(3), (np.int32(5), np.int64(6), 5)),
        (columns, "who"),
    ]
    for dataset, users in cases:
        assert UserRecords(read_user_ids(dataset, users)).user_of.tolist() == expected
    datasets = pytest.importorskip("datasets")
    assert UserRecords(read_user_ids(datasets.Dataset.from_list(columns), "who")).user_of.tolist() == expected
    wrong: list[Any] = [columns, datasets.Dataset.from_list(columns), [1, 2]]
    for dataset in wrong:
        with pytest.raises(ValueError, match="users='name'"):
            read_user_ids(dataset, "name")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"users": None}, "users is None, but the plan has unit='user'"),
        ({"unit": "example", "records_per_user": None, "num_examples": 200}, {}, "users is given, but the plan"),
        ({"num_examples": 200}, {}, rf"dataset has {USERS} users, but the plan has num_examples=200"),
        ({}, {"users": IDS[1:]}, "199 ids for 200 records"),
    ],
)
def test_plan_and_ids_must_agree(changes, options, message):
    with pytest.raises(ValueError, match=message):
        loader(plan(**changes), **options)


@pytest.mark.parametrize("changes", [{"records_per_user": None}, {"unit": "example"}, {"unit": "person"}])
def test_unit_and_records_per_user_belong_together(changes):
    with pytest.raises(ValueError, match="does not go with records_per_user"):
        plan(**changes)


def test_plans_of_examples_are_saved_as_before():
    assert not {"unit", "records_per_user"} & plan(unit="example", records_per_user=None).to_dict().keys()
    assert dpoptim.PrivacyPlan.from_dict(plan().to_dict()) == plan()


def test_a_state_with_other_ids_is_refused():
    state = loader(plan()).state_dict()
    loader(plan()).load_state_dict(state)
    swapped = [*IDS[:-2], IDS[-1], IDS[-2]]
    with pytest.raises(ValueError, match="different examples or user ids"):
        loader(plan(), users=swapped).load_state_dict(state)


def test_the_length_of_a_loader():
    assert len(loader(plan())) == 30
    with pytest.raises(TypeError, match="unknown before a batch is drawn"):
        len(loader(plan(), micro_batch_size=3))


ROWS = [torch.full((4,), float(value)) for value in (3, 1, 2, 5)]


class TestOrderOfRows:
    def collate(self, move):
        def run(records):
            order = move(records)
            noisy = torch.stack([records[i] for i in order]) + torch.randn(len(records), 4)
            return {"x": noisy, "first": torch.stack([records[i][0] for i in order])}

        return OrderedCollate(run)

    @pytest.mark.parametrize(
        "move",
        [
            lambda records: sorted(range(len(records)), key=lambda i: float(records[i][0])),
            lambda records: random.Random(3).sample(range(len(records)), len(records)),
            lambda records: [1, 0, *range(2, len(records))],
            lambda records: range(len(records))[::-1],
        ],
        ids=["sorts", "shuffles", "swaps", "reverses"],
    )
    def test_a_collator_that_moves_records_is_refused(self, move):
        with pytest.raises(ValueError, match="changes the order of the records"):
            self.collate(move)(ROWS)

    def test_batches_are_checked_until_one_shows_the_order(self):
        reverses = OrderedCollate(lambda records: torch.stack(records[::-1]))
        for _ in range(3):
            reverses([torch.ones(2)] * 4)
        with pytest.raises(ValueError, match="changes the order of the records"):
            reverses(ROWS)

    def test_a_sorting_collator_that_also_draws_is_refused(self):
        def sorts(records):
            return torch.stack(sorted(records, key=lambda row: float(row[0]))) + torch.randn(len(records), 4)

        with pytest.raises(ValueError, match="changes the order of the records"):
            OrderedCollate(sorts)(ROWS)

    def test_others_are_not(self):
        keep = self.collate(lambda records: range(len(records)))
        torch.manual_seed(1)
        found = keep(ROWS)
        assert found["first"].tolist() == [3, 1, 2, 5]
        torch.manual_seed(1)
        assert torch.equal(found["x"], torch.stack(ROWS) + torch.randn(4, 4))
        for equal in ([torch.ones(2)] * 3, ["a", "b", "a"]):
            OrderedCollate(torch.utils.data.default_collate)(equal)

    def test_the_loader_checks(self):
        def sorts(records):
            return torch.tensor(sorted(records))

        with pytest.raises(ValueError, match="changes the order of the records"):
            next(iter(loader(plan(), collate_fn=sorts)))


def test_numbers_of_users_do_not_depend_on_where_their_records_are():
    """Otherwise moving one user's records would change who is drawn, and who is held out."""
    before = UserRecords(["c", "a", "b", "a"])
    moved = UserRecords(["a", "b", "a", "a", "c"])  # c's record is now last, and a has one more
    assert [before.user_of.tolist(), moved.user_of.tolist()] == [[2, 0, 1, 0], [0, 1, 0, 0, 2]]
