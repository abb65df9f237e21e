"""Keyed digests of records: everything that changes a record changes them, and nothing else does."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.data import digest_records
from dpoptim.data.record_fingerprint import digest_in_memory, digest_values
from dpoptim.noise import NoiseKey

KEY = NoiseKey.from_bytes(bytes(range(32)))


@dataclasses.dataclass
class Point:
    x: float
    y: float


class Slots:
    __slots__ = ("__dict__", "x")

    def __init__(self, x: int) -> None:
        self.x, self.y = x, 1


Pair = collections.namedtuple("Pair", "tokens label")

DIFFERENT: list[Any] = [
    "", "a", "ab", b"a", 1, 1.0, True, None, [], [1], [1, 2], [[1], 2], ["1"], {"a": 1}, {"a": 2}, {"b": 1}, {},
    np.zeros(2), np.zeros((2, 1)), np.zeros(2, dtype=np.float32), np.array([0.0, 1.0]), torch.zeros(2),
    torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.tensor(1), np.int64(7), Point(1.0, 2.0),
    Point(2.0, 1.0), ["a", "b"], ["ab", ""], {"a": ["b"]}, -1, 2**70, [2**70], ["é"], ["e\u0301"], {"ids": [1, 2, 3]},
    {"a": 1, "b": 2}, {"b": 2, "a": 1}, [1, True], [1, 1], np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
    np.array([(1, 2)], dtype=[("b", "i4"), ("a", "i4")]), np.ma.array([1, 2], mask=[False, True]),
    np.ma.array([1, 2], mask=[True, False]), torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(), Slots(1), Slots(2),
    torch.tensor([1.0, 0.0]).to_sparse(), torch.tensor([2.0, 0.0]).to_sparse(),
]  # fmt: skip


def test_different_records_have_different_digests():
    found = [digest_records([record], KEY).whole for record in DIFFERENT]
    for (one, first), (other, second) in itertools.combinations(enumerate(found), 2):
        assert first != second, (DIFFERENT[one], DIFFERENT[other])


def test_equal_records_have_equal_digests():
    rows = [{"input_ids": [1, 2, 3], "labels": 0}, {"input_ids": [4], "labels": 1}]
    again = [collections.UserDict(input_ids=list(row["input_ids"]), labels=row["labels"]) for row in rows]  # type: ignore[call-overload]
    assert digest_records(rows, KEY).whole == digest_records(again, KEY).whole
    assert (
        digest_records([torch.arange(6).view(2, 3).T], KEY).whole
        == digest_records([torch.arange(6).view(2, 3).T.contiguous()], KEY).whole
    )
    large = np.arange(1 << 19)
    assert digest_records([large], KEY).whole == digest_records([large.copy()], KEY).whole
    changed = large.copy()
    changed[-1] += 1
    assert digest_records([large], KEY).whole != digest_records([changed], KEY).whole


def test_order_and_key_matter():
    rows = ["one", "two", "three", "one"]
    one = digest_records(rows, KEY)
    assert one.whole != digest_records(rows[1:] + rows[:1], KEY).whole
    assert one.whole != digest_records(rows, NoiseKey.from_bytes(bytes(32))).whole
    assert digest_records(["two", "four", "two"], KEY).shared_with(one) == 2


def test_a_path_is_the_content_of_its_file(tmp_path):
    (tmp_path / "a.png").write_bytes(b"one")
    (tmp_path / "b.png").write_bytes(b"one")
    before = digest_records([(tmp_path / "a.png", 1)], KEY).whole
    assert before == digest_records([(tmp_path / "b.png", 1)], KEY).whole
    (tmp_path / "a.png").write_bytes(b"two")
    assert before != digest_records([(tmp_path / "a.png", 1)], KEY).whole


def test_images_are_read():
    pillow = pytest.importorskip("PIL.Image")
    black, white = pillow.new("L", (2, 2)), pillow.new("L", (2, 2), 255)
    assert digest_records([black], KEY).whole == digest_records([black.copy()], KEY).whole
    assert digest_records([black], KEY).whole != digest_records([white], KEY).whole


def test_an_image_is_its_colours():
    pillow = pytest.importorskip("PIL.Image")
    red, green = pillow.new("P", (2, 2)), pillow.new("P", (2, 2))
    red.putpalette([255, 0, 0] + [0] * 765)
    green.putpalette([0, 255, 0] + [0] * 765)
    assert red.tobytes() == green.tobytes()
    assert digest_records([red], KEY).whole != digest_records([green], KEY).whole


def test_lazy_views_are_their_values():
    """A conjugate, a negative and a strided view of one element are read, and are what their copies are."""
    number = torch.tensor([1 + 2j, 3 - 1j])
    for view in (number.conj(), number.conj().imag, torch.arange(6.0)[::5][1:]):
        copy = torch.tensor(view.tolist(), dtype=view.dtype)
        assert digest_records([view], KEY).whole == digest_records([copy], KEY).whole
    assert digest_in_memory([torch.eye(2).to_sparse_csr()], KEY) is None
    with pytest.warns(UserWarning, match="deprecated"), pytest.raises(ValueError, match="quantized tensor"):
        digest_records([torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.quint8)], KEY)


def test_a_dataset_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    rows = [{"ids": list(range(number % 5)), "label": number % 2} for number in range(2500)]
    dataset = datasets.Dataset.from_list(rows)
    whole = digest_records(dataset, KEY)
    assert whole.whole == digest_records([dataset[i] for i in range(len(rows))], KEY).whole
    assert whole.whole != digest_records(dataset.select([*range(1, 2500), 0]), KEY).whole
    rows[2499]["label"] = 5
    assert whole.whole != digest_records(datasets.Dataset.from_list(rows), KEY).whole


def test_what_is_random_or_cannot_be_read_is_told():
    class Random(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            return float(np.random.rand())

    with pytest.raises(ValueError, match=r"data: example 0 is another one each time it is read .* collator"):
        digest_records(Random([1, 2, 3]), KEY, what="data")
    with pytest.raises(ValueError, match="whose content cannot be read"):
        digest_records([len], KEY)
    assert digest_values([torch.ones(2), 3], KEY) == digest_values([torch.ones(2), 3], KEY)


def test_only_what_is_in_memory_is_read_unasked(tmp_path):
    class OnDisk(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, place: int) -> Any:
            raise AssertionError("was read")

    assert digest_in_memory(OnDisk(), KEY) is None
    assert digest_in_memory([Path("missing.png")], KEY) is not None
    assert digest_in_memory(TensorDataset(torch.ones(3)), KEY) != digest_in_memory(TensorDataset(torch.zeros(3)), KEY)


SIX: Any = range(6)
LETTERS: Any = list("abcdef")
PLAN = dpoptim.PrivacyPlan(num_examples=6, batch_size=2, steps=3)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda rows: TensorDataset(torch.tensor(rows))])
def test_a_loader_is_not_resumed_over_other_examples(make):
    rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    state = dpoptim.private_loader(make(rows), PLAN, key=KEY).state_dict()
    dpoptim.private_loader(make(rows), PLAN, key=KEY).load_state_dict(state)
    for other in ([*rows[1:], rows[0]], [9.0, *rows[1:]]):
        with pytest.raises(ValueError, match="saved over other examples"):
            dpoptim.private_loader(make(other), PLAN, key=KEY).load_state_dict(state)


def test_a_digest_that_is_given_is_compared():
    state = dpoptim.private_loader(SIX, PLAN, key=KEY, digest="version 1").state_dict()
    assert "version" not in str(state), "hidden by the key"
    dpoptim.private_loader(LETTERS, PLAN, key=KEY, digest="version 1").load_state_dict(state)
    with pytest.raises(ValueError, match="saved over other examples"):
        dpoptim.private_loader(SIX, PLAN, key=KEY, digest="version 2").load_state_dict(state)
    with pytest.raises(ValueError, match="digest must be a string"):
        dpoptim.private_loader(SIX, PLAN, digest=3)  # type: ignore[arg-type]
