"""Records of another form than those before them are refused; lengths, empty lists and classes of dicts may differ."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, default_collate

import dpoptim
from dpoptim.data import digest_records
from dpoptim.data.record_schema import RecordSchema, check_all_forms
from dpoptim.noise import NoiseKey

KEY = NoiseKey.from_bytes(bytes(range(32)))
Pair = collections.namedtuple("Pair", "tokens label")


@dataclasses.dataclass
class Features:
    input_ids: list[int]
    label: Any


def compared(records: Any, **options: Any) -> None:
    same = RecordSchema("data", **options)
    for place, record in enumerate(records):
        same(place, record)


SAME: dict[str, list[Any]] = {
    "lists of any length": [{"ids": [1, 2]}, {"ids": [3]}, {"ids": []}, {"ids": [4, 5, 6]}],
    "empty ones first": [{"ids": []}, {"ids": [1.5]}, {"ids": []}],
    "nested lists": [[[1], []], [], [[]], [[2, 3]]],
    "numbers of numpy": [{"label": 1}, {"label": np.int64(1)}, {"label": np.int32(2)}],
    "numbers of numpy inside": [[1, 2], [1, np.int64(2)], [np.int64(2)]],
    "floats of numpy": [{"label": 0.5}, {"label": np.float64(1)}],
    "tensors of any length": [{"ids": torch.arange(3)}, {"ids": torch.arange(5)}],
    "arrays of any length": [(np.zeros((2, 3)), 1), (np.zeros((1, 3)), 0)],
    "texts": ["one", "another", ""],
    "texts of numpy": [np.array(["a"]), np.array(["longer"])],
    "keys in another order": [{"a": 1, "b": 0.5}, {"b": 0.5, "a": 1}],
    "dicts of any class": [{"a": 1}, collections.UserDict(a=1), collections.OrderedDict(a=1)],
    "none in all": [{"a": None}, {"a": None}],
    "objects": [Features([1], 0.5), Features([1, 2], 0.25)],
    "objects inside": [{"f": Features([1], 1)}, {"f": Features([1, 2], None)}],
    "mixed by place": [[1, 0.5], [2, 0.25]],
    "named tuples": [Pair([1], 0), Pair([], 1)],
    "not a number": [0.5, float("nan")],
}


@pytest.mark.parametrize("name", SAME)
def test_one_form(name):
    compared(SAME[name])
    compared(SAME[name][::-1])


OTHER: dict[str, tuple[Any, Any, str]] = {
    "an int": ({"label": 0.9}, {"label": 1}, r"record 2 has int at ['label'], where the records before it have float"),
    "a bool": ({"label": 1}, {"label": True}, "has bool at ['label'], where the records before it have int"),
    "a bool of numpy": ({"label": True}, {"label": np.bool_(True)}, "has numpy bool at ['label']"),
    "a gap": ({"label": 1}, {"label": None}, "has None at ['label'], where the records before it have int"),
    "a text": ({"label": 1}, {"label": "1"}, "has str at ['label']"),
    "no key": ({"a": 1, "mask": [1]}, {"a": 1}, "has no ['mask'], which the records before it have"),
    "a key more": ({"a": 1}, {"a": 1, "mask": [1]}, "has ['mask'], which the records before it have not"),
    "floats in a list": ({"y": [1, 0]}, {"y": [0.7, 0.3]}, "has list of float at ['y'], where the records before it"),
    "a float in a list": ({"y": [1, 0]}, {"y": [1, 0.3]}, "has list of int and float at ['y']"),
    "floats further in": ([[1, 2], []], [[], [0.5]], "is list of list of float, where the records"),
    "mixed otherwise": ({"y": [1, 0.5]}, {"y": [0.5, 1]}, "has float at ['y'][0], where the records"),
    "a tuple": ({"ids": [1]}, {"ids": (1,)}, "has tuple of int at ['ids'], where the records"),
    "a longer record": (("a", 1), ("a", 1, 1), "has [2], which the records before it have not"),
    "a part": (("a", 1), ("a", 1.5), "has float at [1], where the records before it have int"),
    "dtype": ({"x": torch.zeros(2)}, {"x": torch.zeros(2).double()}, "tensor of torch.float64 with 1 axes at ['x']"),
    "a narrow float of numpy": ({"label": 0.5}, {"label": np.float32(1)}, "numpy float32 at ['label']"),
    "an empty tensor": ({"x": torch.arange(2)}, {"x": torch.tensor([])}, "tensor of torch.float32 with 1 axes"),
    "axes": ({"x": np.zeros(2)}, {"x": np.zeros((2, 1))}, "has array of float64 with 2 axes at ['x']"),
    "a number as tensor": ({"y": 1}, {"y": torch.tensor(1)}, "has tensor of torch.int64 with 0 axes at ['y']"),
    "an attribute": (Features([1], 0.5), Features([1], 1), "has int at ['label'], where the records"),
    "inside a dict": ({"a": {"b": 1}}, {"a": {"b": 1.0}}, "has float at ['a']['b'], where the records"),
    "another class": ({"a": Features([1], 1)}, {"a": [1]}, "has list of int at ['a'], where the records before"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_another_form_is_refused_in_either_order(name):
    one, other, line = OTHER[name]
    with pytest.raises(ValueError, match="collators take the form of a whole batch from its first record") as no:
        compared([one, one, other])
    assert line in str(no.value)
    assert "\n" not in str(no.value)
    assert "0.9" not in str(no.value), "no value is told"
    with pytest.raises(ValueError, match="data: record 1 "):
        compared([other, one])


def test_images_of_any_file_are_of_one_kind():
    pillow = pytest.importorskip("PIL.Image")
    compared([{"image": pillow.new("L", (2, 2))}, {"image": pillow.new("RGB", (3, 2))}])
    with pytest.raises(ValueError, match=r"has list of int at .'image'., where the records before it have image"):
        compared([{"image": pillow.new("L", (2, 2))}, {"image": [1]}])


def test_only_columns_that_count_are_compared():
    rows = [{"ids": [1], "note": None}, {"ids": [2], "note": "text"}, {"ids": [3]}]
    compared(rows, columns=["ids", "labels"])
    with pytest.raises(ValueError, match=r"has str at .'note'., where the records before it have None"):
        compared(rows)
    with pytest.raises(ValueError, match=r"has no .'ids'."):
        compared([*rows, {"note": None}], columns=["ids"])


def test_records_are_compared_while_they_are_read():
    rows = [{"label": 0.5}] * 6 + [{"label": 1}] + [{"label": 0.5}] * 6
    digest_records(rows, KEY)
    with pytest.raises(ValueError, match="data: record 6 has int"):
        digest_records(rows, KEY, look=RecordSchema("data"))


def test_a_column_of_hugging_face_has_one_form_but_for_gaps():
    datasets = pytest.importorskip("datasets")
    rows = [{"ids": list(range(number % 3)), "label": 1 if number == 7 else 0.5} for number in range(1200)]
    for kind in (None, "numpy", "torch"):
        digest_records(datasets.Dataset.from_list(rows).with_format(kind), KEY, look=RecordSchema("data"))
    rows[1100]["label"] = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"record 1100 has None at .'label'., where the records before it have float"):
        digest_records(datasets.Dataset.from_list(rows), KEY, look=RecordSchema("data"))


# -- loaders -------------------------------------------------------------------------------------------------------

PLAN = dpoptim.PrivacyPlan(num_examples=6, batch_size=2, steps=3)
MIXED: Any = [{"x": 0.5, "mask": 1}] * 5 + [{"x": 0.5}]


def test_torchs_collator_takes_the_form_of_the_first():
    assert set(default_collate(MIXED[::-1])) == {"x"}, "the masks of the others are gone"


@pytest.mark.parametrize(
    "make", [list, tuple, lambda rows: Subset(rows, range(6)), lambda rows: ConcatDataset([rows, rows[:0]])]
)
def test_a_loader_refuses_examples_in_memory_of_several_forms(make):
    with pytest.raises(ValueError, match=r"dataset: record 5 has no \['mask'\]"):
        dpoptim.private_loader(make(MIXED), PLAN)
    dpoptim.private_loader(make(MIXED[:5] + MIXED[:1]), PLAN)


def test_a_collate_function_that_takes_each_by_itself_may_have_them():
    loader = dpoptim.private_loader(MIXED, PLAN, collate_fn=lambda rows: [len(row) for row in rows], check_schema=False)
    assert sorted(number for batch in loader for number in batch) == [1, 2, 2, 2, 2, 2]
    dpoptim.private_loader(MIXED, PLAN, micro_batch_size=1)  # no two meet


class OnDisk(torch.utils.data.Dataset[Any]):
    """Records that are read one by one; `reads` are their places."""

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


@pytest.mark.parametrize(
    ("make", "rows", "workers"), [(OnDisk, MIXED, 0), (OnDisk, GAP, 0), (hugging_face, GAP, 0), (OnDisk, GAP, 1)]
)
def test_examples_on_the_disk_are_compared_batch_by_batch(make, rows, workers):
    def collate(rows: list[Any]) -> int:
        assert rows == rows[:1] * len(rows), "of one form, and here of one content"
        return len(rows)

    loader = dpoptim.private_loader(make(rows), PLAN, collate_fn=collate, num_workers=workers)
    for _ in range(2):  # a new iteration does not leave the step out
        with pytest.raises(ValueError, match=r"a batch of dataset: record 1 .* the records before it have"):
            list(loader)
    assert loader.next_step < 3
    whole = dpoptim.private_loader(make(rows[:5] + rows[:1]), PLAN, collate_fn=collate, num_workers=workers)
    assert list(whole) == [2, 2, 2]


def test_nothing_is_read_ahead_of_the_batches():
    data = OnDisk([{"x": 0.5}] * 6)
    loader = dpoptim.private_loader(data, PLAN)
    assert data.reads == []
    batch = next(iter(loader))
    assert len(data.reads) == 2
    assert batch["x"].tolist() == [0.5, 0.5]


def test_examples_on_the_disk_may_differ_where_no_two_meet_or_they_are_taken_by_themselves():
    own: dict[str, Any] = {"collate_fn": lambda rows: [len(row) for row in rows]}
    for options in ({"check_schema": False, **own}, {"micro_batch_size": 1, **own}):
        found = [number for batch in dpoptim.private_loader(OnDisk(MIXED), PLAN, **options) for number in batch]
        assert sorted(found) == [1, 2, 2, 2, 2, 2]


def test_all_of_a_dataset_can_be_compared_beforehand():
    check_all_forms(OnDisk(MIXED[:5]))
    with pytest.raises(ValueError, match="dataset: record 5 has no"):
        check_all_forms(OnDisk(MIXED))
