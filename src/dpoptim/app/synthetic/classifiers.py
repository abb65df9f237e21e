"""Classifiers that are trained without privacy, to measure what texts teach."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dpoptim.app.data.records import Records
from dpoptim.app.models.prepared import Prepared, prepare
from dpoptim.app.recipes.defaults import chosen_device
from dpoptim.app.runs.metrics import evaluate
from dpoptim.app.synthetic.copies import words_of
from dpoptim.integrations.losses import Task

BAG_OF_WORDS = "bag-of-words"
_SLOTS = 2**17
_EPOCHS = {"words": 10, "model": 3}
_PENALTY = 0.05


def accuracy(model: str, train: Records, test: Records, *, seed: int, device: str) -> float:
    """Train a classifier on some texts and return its accuracy on others."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if model == BAG_OF_WORDS:
            return _of_words(train, test, seed)
        prepared = prepare(task=Task.TEXT_CLASSIFICATION, model=model, records=train, seed=seed)
        prepared.model.to(chosen_device(device))
        _fit(prepared, seed)
        return float(evaluate(prepared.on(test)).accuracy or 0.0)


def _of_words(train: Records, test: Records, seed: int) -> float:
    """Logistic regression, with a quadratic penalty, on which words and pairs of words a text has."""
    bag = nn.EmbeddingBag(_SLOTS, len(train.label_names), mode="sum")
    nn.init.zeros_(bag.weight)
    optimizer = torch.optim.Adam(bag.parameters(), lr=0.1)
    bags, labels = [_slots(text) for text in train.texts], torch.as_tensor(train.labels)
    size = min(256, max(1, len(bags) // 10))  # ten steps or more per epoch
    parts = _parts(len(bags), _EPOCHS["words"], size, seed)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(parts))
    for part in parts:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(_logits(bag, [bags[i] for i in part]), labels[part])
        (loss + _PENALTY / len(bags) * bag.weight.square().sum()).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        found = _logits(bag, [_slots(text) for text in test.texts]).argmax(1)
    return float((found == torch.as_tensor(test.labels)).double().mean())


def _slots(text: str) -> list[int]:
    words = words_of(text)
    pairs = [f"{one} {other}" for one, other in itertools.pairwise(words)]
    return sorted({zlib.crc32(word.encode()) % _SLOTS for word in [*words, *pairs]})


def _logits(bag: nn.EmbeddingBag, bags: Sequence[list[int]]) -> Tensor:
    sizes = torch.tensor([len(one) for one in bags])
    weights = (1 / sizes.clamp(min=1).sqrt()).repeat_interleave(sizes)  # every text has length 1
    ids = torch.tensor([slot for one in bags for slot in one], dtype=torch.int64)
    return bag(ids, sizes.cumsum(0) - sizes, per_sample_weights=weights)


def _fit(prepared: Prepared, seed: int) -> None:
    """Fine-tune a model: three epochs of AdamW, with a learning rate that falls from 5e-5 to 0."""
    prepared.model.train()
    parts = _parts(len(prepared.records), _EPOCHS["model"], 32, seed)
    optimizer = torch.optim.AdamW(prepared.model.parameters(), lr=5e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(parts))
    for part in parts:
        batch = prepared.collated([prepared.dataset[i] for i in part])
        optimizer.zero_grad()
        prepared.loss_per_example(prepared.model, batch).mean().backward()
        optimizer.step()
        schedule.step()


def _parts(count: int, epochs: int, size: int, seed: int) -> list[list[int]]:
    """Batches in a new order in each epoch."""
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(count).tolist() for _ in range(epochs)]
    return [order[start : start + size] for order in orders for start in range(0, count, size)]
