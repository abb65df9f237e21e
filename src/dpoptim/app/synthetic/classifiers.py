"""Classifiers that are trained without privacy, to measure what texts teach."""

from __future__ import annotations

import numpy as np
import torch

from dpoptim.app.data.records import Records
from dpoptim.app.models.prepared import Prepared, prepare
from dpoptim.app.recipes.defaults import chosen_device
from dpoptim.app.runs.metrics import evaluate
from dpoptim.app.synthetic.copies import words_of
from dpoptim.integrations.losses import Task
from dpoptim.integrations.optional import require

BAG_OF_WORDS = "bag-of-words"
_SLOTS = 2**17  # of words and pairs of words, by their hashes
_EPOCHS = 3


def accuracy(model: str, train: Records, test: Records, *, seed: int, device: str) -> float:
    """Train a classifier on some texts and return its accuracy on others."""
    if model == BAG_OF_WORDS:
        return _of_words(train, test)
    where = chosen_device(device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        prepared = prepare(task=Task.TEXT_CLASSIFICATION, model=model, records=train, seed=seed)
        prepared.model.to(where)
        _fit(prepared, seed)
        return float(evaluate(prepared.on(test)).accuracy or 0.0)


def _of_words(train: Records, test: Records) -> float:
    """Logistic regression on the words and pairs of words that a text has."""
    purpose = f"the classifier {BAG_OF_WORDS!r}"
    text = require("sklearn.feature_extraction.text", purpose)
    linear = require("sklearn.linear_model", purpose)
    labels, expected = np.asarray(train.labels), np.asarray(test.labels)
    if len(set(labels.tolist())) == 1:
        return float((expected == labels[0]).mean())
    counts = text.HashingVectorizer(n_features=_SLOTS, ngram_range=(1, 2), tokenizer=words_of, token_pattern=None)
    fitted = linear.LogisticRegression(C=10.0, max_iter=1000).fit(counts.transform(train.texts), labels)
    return float(fitted.score(counts.transform(test.texts), expected))


def _fit(prepared: Prepared, seed: int) -> None:
    """Fine-tune a model: three epochs of AdamW, with a learning rate that falls from 5e-5 to 0."""
    generator, count = np.random.default_rng(seed), len(prepared.records)
    orders = [generator.permutation(count).tolist() for _ in range(_EPOCHS)]
    parts = [order[start : start + 32] for order in orders for start in range(0, count, 32)]
    optimizer = torch.optim.AdamW(prepared.model.parameters(), lr=5e-5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(parts))
    prepared.model.train()
    for part in parts:
        batch = prepared.collated([prepared.dataset[i] for i in part])
        optimizer.zero_grad()
        prepared.loss_per_example(prepared.model, batch).mean().backward()
        optimizer.step()
        schedule.step()
