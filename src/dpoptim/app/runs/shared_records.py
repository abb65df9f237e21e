"""Whether two sources of records are one, and how many records they share; by content, links and copies alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.app.data.records import RecordKind, Records
from dpoptim.data import RecordDigests, digest_records
from dpoptim.noise import NoiseKey


def same_source(one: str, other: str) -> bool:
    """Whether two names are of one file, folder or dataset; links are followed."""
    first, second = Path(one).expanduser(), Path(other).expanduser()
    return one == other or (first.exists() and second.exists() and first.samefile(second))


def one_holds_the_other(one: str, other: str) -> bool:
    """Whether one is a folder that the other lies in."""
    first, second = Path(one).expanduser().resolve(), Path(other).expanduser().resolve()
    return first in second.parents or second in first.parents


def shared_count(records: Records, *others: Records) -> int:
    """How many of the records occur in any of the others, whatever their labels."""
    key = NoiseKey.generate()
    together = np.concatenate([_digests(other, key).each for other in others])
    return _digests(records, key).shared_with(RecordDigests("", together))


def check_held_out_is_other(training: Records, held_out: Records, *, data: str, validation_data: str) -> int:
    """How many held-out records are training records too; ValueError where all are, or one source holds the other.

    Of a table whose rows are hardly distinct, all may be by chance, and that is no error.
    """
    key = NoiseKey.generate()
    one, other = _digests(training, key), _digests(held_out, key)
    shared = other.shared_with(one)
    distinct = training.kind is not RecordKind.TABULAR or one.tell_records_apart
    if (shared == len(held_out) and distinct) or (shared and one_holds_the_other(data, validation_data)):
        raise ValueError(
            f"validation_data={validation_data!r} has the training records in it ({shared} of {len(held_out)}), so "
            "scores on it are not outside of training; give other records, or validation_fraction"
        )
    return shared


def _digests(records: Records, key: NoiseKey) -> RecordDigests:
    content: Any = records.texts
    if records.kind is RecordKind.IMAGE:
        content = records.images
    elif records.kind is RecordKind.TABULAR:
        content = records.features
    return digest_records(content, key, what=records.source)
