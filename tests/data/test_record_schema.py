"""Records with different keys or types are refused; lengths, empty lists and classes of dicts may differ."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, default_collate

import dpoptim
from dpoptim.data import fingerprint_records
from dpoptim.data.record_schema import RecordSchema, check_records
from dpoptim.noise import NoiseKey

KEY = NoiseKey.from_bytes(bytes(range(32)))


def check(records: Any, **options: Any) -> None:
    schema = RecordSchema("data", **options)
    for place, record in enumerate(records):
        schema.check(place, record)


SAME: dict[str, list[Any]] = {
    "lists of any length": [{"ids": [1, 2]}, {"ids": [3]}, {"ids": []}, {"ids": [4, 5, 6]}],
    "empty lists first": [{"ids": []}, {"ids": [1.5]}, {"ids": []}],
    "tensors of any length": [{"ids": torch.arange(3)}, {"ids": torch.arange(5)}],
    "arrays of any length": [(np.zeros((2, 3)), 1), (np.zeros((1, 3)), 0)],
    "strings": ["one", "another", ""],
    "numpy strings": [np.array(["a"]), np.array(["longer"])],
    "keys in a different order": [{"a": 1, "b": 0.5}, {"b": 0.5, "a": 1}],
    "dicts of any class": [{"a": 1}, collections.UserDict(a=1)],
    "not a number": [0.5, float("nan")],
}


@pytest.mark.parametrize("name", SAME)
def test_records_with_one_schema_are_accepted(name):
    check(SAME[name])
    check(SAME[name][::-1])


OTHER: dict[str, tuple[Any, Any, str]] = {
    "an int": ({"label": 0.9}, {"label": 1}, "has int at 'label', but earlier records have float"),
    "a bool": ({"label": 1}, {"label": True}, "has bool at 'label', but earlier records have int"),
    "a gap": ({"label": 1}, {"label": None}, "has None at 'label', but earlier records have int"),
    "no key": ({"a": 1, "mask": [1]}, {"a": 1}, "has nothing at 'mask', but earlier records have list of int"),
    "no empty list": ({"a": 1, "mask": []}, {"a": 1}, "has nothing at 'mask', but earlier records have empty list"),
    "a key more": ({"a": 1}, {"a": 1, "mask": [1]}, "has list of int at 'mask', but earlier records have nothing"),
    "floats in a list": ({"y": [1, 0]}, {"y": [0.7, 0.3]}, "has list of float at 'y'"),
    "a float in a list": ({"y": [1, 0]}, {"y": [1, 0.3]}, "has list of float and int at 'y'"),
    "a longer tuple": (("a", 1), ("a", 1, 1), "has int at 2, but earlier records have nothing"),
    "dtype": ({"x": torch.zeros(2)}, {"x": torch.zeros(2).double()}, "tensor of torch.float64 with 1 axes at 'x'"),
    "a numpy float": ({"label": 0.5}, {"label": np.float32(1)}, "has float32 at 'label'"),
    "axes": ({"x": np.zeros(2)}, {"x": np.zeros((2, 1))}, "has ndarray of float64 with 2 axes at 'x'"),
    "not a dict": ({"y": 1}, 1, "has nothing at 'y', but earlier records have int"),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_different_schema_is_refused_in_either_order(name):
    one, other, line = OTHER[name]
    with pytest.raises(ValueError, match=r"data: record 2 .* Give all records the same keys and types\.") as error:
        check([one, one, other])
    assert line in str(error.value)
    assert "0.9" not in str(error.value), "no value is printed"
    with pytest.raises(ValueError, match="data: record 1 "):
        check([other, one])


def test_images_from_any_file_have_one_type():
    pillow = pytest.importorskip("PIL.Image")
    check([{"image": pillow.new("L", (2, 2))}, {"image": pillow.new("RGB", (3, 2))}])


def test_only_the_columns_in_use_are_compared():
    rows = [{"ids": [1], "note": None}, {"ids": [2], "note": "text"}, {"ids": [3]}]
    check(rows, columns=["ids", "labels"])
    with pytest.raises(ValueError, match="has str at 'note', but earlier records have None"):
        check(rows)


def test_records_are_compared_while_they_are_fingerprinted():
    datasets = pytest.importorskip("datasets")
    rows: list[Any] = [{"ids": list(range(number % 3)), "label": 1 if number == 7 else 0.5} for number in range(1200)]
    with pytest.raises(ValueError, match="data: record 7 has int"):
        fingerprint_records(rows, KEY, look=RecordSchema("data").check)
    for kind in (None, "numpy", "torch"):  # a column has one type, except for gaps
        dataset = datasets.Dataset.from_list(rows).with_format(kind)
        fingerprint_records(dataset, KEY, look=RecordSchema("data").check)
    rows[1100]["label"] = None
    with pytest.raises(ValueError, match="record 1100 has None at 'label', but earlier records have float"):
        fingerprint_records(datasets.Dataset.from_list(rows), KEY, look=RecordSchema("data").check)


# -- loaders -------------------------------------------------------------------------------------------------------

PLAN = dpoptim.PrivacyPlan(num_examples=6, batch_size=2, steps=3)
MIXED: Any = [{"x": 0.5, "mask": 1}] * 5 + [{"x": 0.5}]


def test_torchs_collator_takes_its_keys_from_the_first_record():
    """The reason for the check."""
    assert set(default_collate(MIXED[::-1])) == {"x"}, "the masks of the others are gone"


@pytest.mark.parametrize(
    "make", [list, tuple, lambda rows: Subset(rows, range(6)), lambda rows: ConcatDataset([rows, rows[:0]])]
)
def test_a_loader_checks_examples_in_memory_at_once(make):
    with pytest.raises(ValueError, match="dataset: record 5 has nothing at 'mask'"):
        dpoptim.private_loader(make(MIXED), PLAN)
    dpoptim.private_loader(make(MIXED[:5] + MIXED[:1]), PLAN)


class OnDisk(torch.utils.data.Dataset[Any]):
    """Records that are read one by one; `reads` lists their places."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.reads = rows, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        self.reads.append(place)
        return self.rows[place]


def hugging_face(rows: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


GAP: Any = [{"x": 0.5, "label": 1}] * 5 + [{"x": 0.5, "label": None}]


@pytest.mark.parametrize(("make", "rows", "workers"), [(OnDisk, MIXED, 0), (hugging_face, GAP, 0), (OnDisk, GAP, 1)])
def test_examples_on_disk_are_checked_batch_by_batch(make, rows, workers):
    def collate(rows: list[Any]) -> int:
        assert rows == rows[:1] * len(rows), "the collator never sees two schemas"
        return len(rows)

    loader = dpoptim.private_loader(make(rows), PLAN, collate_fn=collate, num_workers=workers)
    for _ in range(2):  # a new iteration does not skip the step
        with pytest.raises(ValueError, match=r"a batch of dataset: record 1 .* earlier records have"):
            list(loader)
    assert loader.next_step < 3
    whole = dpoptim.private_loader(make(rows[:5] + rows[:1]), PLAN, collate_fn=collate, num_workers=workers)
    assert list(whole) == [2, 2, 2]


def test_no_example_is_read_before_its_batch():
    data = OnDisk([{"x": 0.5}] * 6)
    loader = dpoptim.private_loader(data, PLAN)
    assert data.reads == []
    assert next(iter(loader))["x"].tolist() == [0.5, 0.5]
    assert len(data.reads) == 2


@pytest.mark.parametrize("make", [list, OnDisk])
@pytest.mark.parametrize("options", [{"check_schema": False}, {"micro_batch_size": 1}])
def test_schemas_may_differ_where_examples_are_collated_alone(make, options):
    loader = dpoptim.private_loader(make(MIXED), PLAN, collate_fn=lambda rows: [len(row) for row in rows], **options)
    assert sorted(number for batch in loader for number in batch) == [1, 2, 2, 2, 2, 2]


def test_a_whole_dataset_can_be_checked_beforehand():
    check_records("dataset", OnDisk(MIXED[:5]))
    with pytest.raises(ValueError, match="dataset: record 5 has nothing"):
        check_records("dataset", OnDisk(MIXED))
