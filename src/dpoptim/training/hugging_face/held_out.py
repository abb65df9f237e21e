"""Held-out examples of PrivateTrainer: which they are, and that they are not the training examples."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

from dpoptim.noise import NoiseKey
from dpoptim.privacy import RecordDigests, digest_records


def named_held_out(eval_dataset: Any) -> dict[str, Any]:
    """The datasets in Trainer's `eval_dataset` (one, several by name, or none) that have a length."""
    if eval_dataset is None:
        return {}
    several = isinstance(eval_dataset, dict)
    named = {f"held-out {name}": part for name, part in eval_dataset.items()} if several else {"held-out": eval_dataset}
    return {name: part for name, part in named.items() if hasattr(part, "__len__") and len(part)}


def check_not_training(dataset: Any, train_dataset: Any, *, debugging: bool) -> None:
    """Refuse to evaluate on the very training examples, unless one is debugging."""
    if dataset is not None and dataset is train_dataset and not debugging:
        raise ValueError(
            "eval_dataset is train_dataset itself: scores on it are not private; give other examples, or, to debug, "
            "PrivacyArguments(debug_loss=True)"
        )


def digests_of(train: Any, held_out: Mapping[str, Any], key: NoiseKey) -> dict[str, RecordDigests]:
    """Keyed digests of the training and held-out examples; each is read once.

    Edge cases: held-out examples that are random, or that cannot be read, have none.
    """
    found = {"training": digest_records(train, key, what="train_dataset")}
    for name, dataset in held_out.items():
        with contextlib.suppress(ValueError, TypeError):
            found[name] = digest_records(dataset, key, what="eval_dataset")
    return found


def check_overlap(records: Mapping[str, RecordDigests]) -> None:
    """Refuse held-out examples that are a copy of the training examples; warn where some are among them."""
    for name, found in records.items():
        if name == "training":
            continue
        shared = found.shared_with(records["training"])
        if found.same_records(records["training"]):
            raise ValueError(
                f"eval_dataset ({name}) has the same examples as train_dataset: scores on them are not private, and no "
                "guarantee covers them; give other examples, or none"
            )
        if shared:
            warnings.warn(
                f"{shared} of the {len(found.each)} examples of eval_dataset ({name}) are training examples too: "
                "scores on them are not covered by the guarantee",
                stacklevel=4,
            )
