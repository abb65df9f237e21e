"""Random examples in the shape of a task's own: to try a model, and to time it, without touching a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dpoptim.app.data.inputs import Batch, TensorExample, TextExample
from dpoptim.app.models.prepared import Prepared
from dpoptim.integrations.masking import IGNORED


def random_batch(prepared: Prepared, lengths: Sequence[int], *, seed: int = 0) -> Batch:
    """A batch of as many examples as there are `lengths` (of texts; else their values do not matter), on the model's
    device and, for masked-lm, masked.

    Guarantee: nothing of a record is in it but the size that all images or rows have.
    """
    generator = np.random.default_rng(seed)
    examples: list[Any] = []
    classes = max(1, len(prepared.records.label_names))
    dataset: Any = prepared.dataset
    shape = None if prepared.lengths is not None else dataset[0].values.shape
    for length in lengths:
        label = int(generator.integers(classes)) if prepared.task.is_classification else IGNORED
        if shape is not None:
            values = torch.from_numpy(generator.normal(size=tuple(shape)).astype(np.float32))
            examples.append(TensorExample(values, label))
            continue
        words = np.setdiff1d(np.arange(len(prepared.tokenizer)), prepared.tokenizer.all_special_ids)
        examples.append(TextExample(generator.choice(words, int(length)).astype(np.int32), label, False))
    device = next(prepared.model.parameters()).device
    batch = {name: values.to(device) for name, values in prepared.collate(examples).items()}
    return prepared.at_step(batch, 0)
