"""Record fingerprints: everything that changes a record changes them, and nothing else does."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.data import fingerprint_records
from dpoptim.data.record_fingerprint import fingerprint_in_memory
from dpoptim.noise import NoiseKey

KEY = NoiseKey.from_bytes(bytes(range(32)))


def digest(*records: Any, key: NoiseKey = KEY) -> str:
    return fingerprint_records(records, key).digest


DIFFERENT: list[Any] = [
    "", "a", "ab", b"a", 1, 1.0, True, None, [], [1], [1, 2], [[1], 2], ["1"], {"a": 1}, {"a": 2}, {"b": 1}, {},
    np.zeros(2), np.zeros((2, 1)), np.zeros(2, dtype=np.float32), np.array([0.0, 1.0]), torch.zeros(2),
    torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bfloat16), torch.tensor(1),
    torch.zeros(0), np.int64(7), ["a", "b"], ["ab", ""], {"a": ["b"]}, -1, 2**70, [2**70], ["é"], ["e\u0301"],
    {"ids": [1, 2, 3]}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, [1, True], [1, 1], torch.tensor([1 + 2j]),
    torch.tensor([1 + 2j]).conj(), np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
    np.array([(1, 2)], dtype=[("b", "i4"), ("a", "i4")]),
]  # fmt: skip


def test_different_records_have_different_digests():
    found = [digest(record) for record in DIFFERENT]
    for (one, first), (other, second) in itertools.combinations(enumerate(found), 2):
        assert first != second, (DIFFERENT[one], DIFFERENT[other])


def test_equal_records_have_equal_digests():
    row: dict[str, Any] = {"input_ids": [1, 2, 3], "labels": 0}
    assert digest(row) == digest(collections.UserDict(row))
    transposed, number = torch.arange(6).view(2, 3).T, torch.tensor([1 + 2j, 3 - 1j])
    for view in (transposed, number.conj(), number.conj().imag, torch.arange(6.0)[::5][1:]):
        assert digest(view) == digest(torch.tensor(view.tolist(), dtype=view.dtype))
    large = np.arange(1 << 19)
    changed = large.copy()
    changed[-1] += 1
    assert digest(large) == digest(large.copy()) != digest(changed)


def test_order_and_key_matter():
    rows = ["one", "two", "three", "one"]
    assert len({digest(*rows), digest(*rows[1:], rows[0]), digest(*rows, key=NoiseKey.from_bytes(bytes(32)))}) == 3
    assert fingerprint_records(["two", "four", "two"], KEY).shared_with(fingerprint_records(rows, KEY)) == 2


def test_a_path_stands_for_the_content_of_its_file(tmp_path):
    (tmp_path / "a.png").write_bytes(b"one")
    (tmp_path / "b.png").write_bytes(b"one")
    before = digest((tmp_path / "a.png", 1))
    assert before == digest((tmp_path / "b.png", 1))
    (tmp_path / "a.png").write_bytes(b"two")
    assert before != digest((tmp_path / "a.png", 1))


def test_images_are_compared_by_their_colours():
    pillow = pytest.importorskip("PIL.Image")
    black, white = pillow.new("L", (2, 2)), pillow.new("L", (2, 2), 255)
    red, green = pillow.new("P", (2, 2)), pillow.new("P", (2, 2))
    red.putpalette([255, 0, 0] + [0] * 765)
    green.putpalette([0, 255, 0] + [0] * 765)
    assert digest(black) == digest(black.copy())
    assert len({digest(image) for image in (black, white, red, green)}) == 4


def test_a_dataset_of_hugging_face_is_read_in_blocks():
    datasets = pytest.importorskip("datasets")
    rows = [{"ids": list(range(number % 5)), "label": number % 2} for number in range(2500)]
    dataset = datasets.Dataset.from_list(rows)
    whole = fingerprint_records(dataset, KEY).digest
    assert whole == digest(*rows)
    assert whole != fingerprint_records(dataset.select([*range(1, 2500), 0]), KEY).digest
    rows[2499]["label"] = 5
    assert whole != fingerprint_records(datasets.Dataset.from_list(rows), KEY).digest


@pytest.mark.parametrize(
    "record",
    [len, {1}, np.ma.array([1, 2], mask=[False, True]), np.array([{}]), torch.eye(2).to_sparse(), KEY],
    ids=lambda record: type(record).__name__,
)
def test_unusual_types_are_refused(record):
    with pytest.raises(ValueError, match=f"cannot fingerprint a {type(record).__name__} in a record"):
        digest(record)
    assert fingerprint_in_memory([record], KEY) is None


def test_random_records_are_refused():
    class Random(list[Any]):
        def __getitem__(self, place: Any) -> Any:
            return float(np.random.rand())

    with pytest.raises(ValueError, match=r"data: record 0 differs each time it is read\. .* collator"):
        fingerprint_records(Random([1, 2, 3]), KEY, name="data")


def test_only_datasets_in_memory_are_fingerprinted_by_default():
    class OnDisk(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, place: int) -> Any:
            raise AssertionError("was read")

    assert fingerprint_in_memory(OnDisk(), KEY) is None
    assert fingerprint_in_memory([Path("missing.png")], KEY) is not None


PLAN = dpoptim.PrivacyPlan(num_examples=6, batch_size=2, steps=3)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda rows: TensorDataset(torch.tensor(rows))])
def test_a_loader_does_not_resume_with_different_examples(make):
    rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    state = dpoptim.private_loader(make(rows), PLAN, key=KEY).state_dict()
    dpoptim.private_loader(make(rows), PLAN, key=KEY).load_state_dict(state)
    for other in ([*rows[1:], rows[0]], [9.0, *rows[1:]]):
        with pytest.raises(ValueError, match="saved with different examples"):
            dpoptim.private_loader(make(other), PLAN, key=KEY).load_state_dict(state)


def test_a_given_digest_is_compared():
    rows: Any = list("abcdef")
    state = dpoptim.private_loader(rows, PLAN, key=KEY, digest="version 1").state_dict()
    assert "version" not in str(state), "hidden by the key"
    dpoptim.private_loader(rows[::-1], PLAN, key=KEY, digest="version 1").load_state_dict(state)
    with pytest.raises(ValueError, match="saved with different examples"):
        dpoptim.private_loader(rows, PLAN, key=KEY, digest="version 2").load_state_dict(state)
    with pytest.raises(ValueError, match="Expected a string digest"):
        dpoptim.private_loader(rows, PLAN, digest=3)  # type: ignore[arg-type]
