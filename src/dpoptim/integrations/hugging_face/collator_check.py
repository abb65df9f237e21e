"""A collator and its examples: they have one form, and batches of them are the same under the same seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from transformers.trainer_utils import RemoveColumnsCollator

from dpoptim.data.record_fingerprint import digest_values
from dpoptim.data.record_schema import RecordSchema
from dpoptim.data.rng_check import MEND, check_generators, noted_generators, refuse_noted
from dpoptim.data.secret_randomness import generator_states, save_rng_states, seed_generators
from dpoptim.noise import NoiseKey

_TRIED = 32  # examples: so many that masks of a generator of one's own do not agree by chance


def same_form(collate: Callable[[list[Any]], Any], args: Any) -> RecordSchema | None:
    """What holds training examples to one form, at the columns that the collator is given.

    Edge cases: None with per_device_train_batch_size=1, where no two records are collated together. Columns that
    Trainer takes out of dicts (remove_unused_columns) may differ.
    """
    if args.per_device_train_batch_size == 1:
        return None
    columns = collate.signature_columns if isinstance(collate, RemoveColumnsCollator) else None
    return RecordSchema("train_dataset", columns=columns)


def check_repeats(collate: Callable[[list[Any]], Any], dataset: Any, key: NoiseKey) -> None:
    """Refuse a collator that makes another batch of the same examples under the same seeds, or that sets seeds.

    The first examples are collated three times under one seed and once under another, and the results thrown away; the
    generators are left as they were. A collator that makes a generator, seeds torch, numpy or `random`, or leaves one
    of them in the same state whatever it was seeded with, draws from a public seed.
    Edge cases: batches of objects that cannot be compared are taken as they are.
    """
    check_generators(data_collator=collate)
    put_back = save_rng_states()
    found, after = [], []
    try:
        for seed in (0, 0, 0, 1):
            seed_generators(seed)
            examples = [dataset[place] for place in range(min(_TRIED, len(dataset)))]
            with noted_generators() as noted:
                batch = collate(copy.deepcopy(examples))  # it may change them
            after.append(generator_states())
            refuse_noted("data_collator", noted)
            if seed == 0:
                found.append(_digest(batch, key))
    finally:
        put_back()
    refuse_noted("data_collator", [name for name in after[0] if after[0][name] == after[-1][name]])
    if len(set(found)) != 1:
        raise ValueError(
            "data_collator makes another batch of the same examples each time, though torch, numpy and random are "
            f"seeded alike: it has random numbers or a count of its own; {MEND}, from torch, numpy or random"
        )


def _digest(batch: Any, key: NoiseKey) -> str | None:
    try:
        return digest_values(batch, key)
    except ValueError as error:
        if "whose content cannot be read" in str(error) or "not compared" in str(error):
            return None
        raise
