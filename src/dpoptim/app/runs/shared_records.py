"""Comparing records by content: the digest of the training records, and how many records two sources share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.app.data.records import RecordKind, Records
from dpoptim.app.models.prepared import Prepared
from dpoptim.data import RecordFingerprint, fingerprint_records
from dpoptim.noise import NoiseKey


def training_digest(prepared: Prepared, key: NoiseKey) -> str:
    """A keyed digest of the training examples as the model sees them: tokens, numbers, or the bytes of image files.

    It reads every record once: 10 s for a million short texts, and every file of an image folder.
    """
    records = prepared.records
    if records.kind is not RecordKind.IMAGE:
        return fingerprint_records(prepared.dataset, key, name="data").digest
    labels = [] if records.labels is None else records.labels.tolist()
    parts = [fingerprint_records(part, key, name="data").digest for part in (records.images, labels)]
    return " ".join(parts)


def same_source(one: str, other: str) -> bool:
    """Whether two names are the same file, folder or dataset; links are followed."""
    first, second = Path(one).expanduser(), Path(other).expanduser()
    return one == other or (first.exists() and second.exists() and first.samefile(second))


def shared_count(records: Records, *others: Records) -> int:
    """How many of the records occur in any of the others, ignoring labels."""
    key = NoiseKey.generate()
    found = np.concatenate([_fingerprint(other, key).each for other in others])
    return _fingerprint(records, key).shared_with(RecordFingerprint("", found))


def check_held_out_is_other(training: Records, held_out: Records, *, validation_data: str) -> int:
    """Return how many held-out records are also training records; refuse the held-out data if all are.

    A table with few distinct rows is not refused: different people may have equal rows.
    """
    key = NoiseKey.generate()
    one, other = _fingerprint(training, key), _fingerprint(held_out, key)
    shared = other.shared_with(one)
    if shared == len(held_out) and (training.kind is not RecordKind.TABULAR or one.mostly_distinct):
        raise ValueError(
            f"all {shared} records of validation_data={validation_data!r} are training records. Use different records, "
            "or validation_fraction."
        )
    return shared


def _fingerprint(records: Records, key: NoiseKey) -> RecordFingerprint:
    content: Any = records.texts
    if records.kind is RecordKind.IMAGE:
        content = records.images
    elif records.kind is RecordKind.TABULAR:
        content = records.features
    return fingerprint_records(content, key, name=records.source)
