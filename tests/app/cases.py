"""Every task with a tiny model and a few records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn

from dpoptim.app import Prepared, RecordKind, Records, prepare
from dpoptim.integrations.losses import Task
from tests.app import tiny

WORDS, PIECES = tiny.wordpiece(), tiny.bytepair()
HEADS = ["BERT", "RoBERTa", "DistilBERT", "ALBERT", "ELECTRA"]
NAMES = ("animal", "privacy")


def text_records(labelled: bool = False) -> Records:
    labels = np.array([NAMES.index(name) for name in tiny.LABELS]) if labelled else None
    return Records(
        kind=RecordKind.TEXT, source="memory", texts=tiny.TEXTS, labels=labels,
        label_names=NAMES if labelled else (),
    )  # fmt: skip


def masked_lm(head: str = "BERT", **options: Any) -> Prepared:
    model = tiny.masked_models(len(WORDS))[head]
    return prepare(task=Task.MASKED_LM, model=model, tokenizer=WORDS, records=text_records(), bucket=8, **options)


def causal_lm(kind: str = "GPT-2") -> Prepared:
    model = tiny.causal_models(len(PIECES))[kind]
    return prepare(task=Task.CAUSAL_LM, model=model, tokenizer=PIECES, records=text_records(), bucket=8)


def text_classification(decoder: bool = False) -> Prepared:
    torch.manual_seed(2)
    model = (
        transformers.GPT2ForSequenceClassification(tiny.gpt2_config(len(PIECES)))
        if decoder
        else transformers.BertForSequenceClassification(tiny.bert_config(len(WORDS)))
    )
    tokenizer = PIECES if decoder else WORDS
    task = Task.TEXT_CLASSIFICATION
    return prepare(task=task, model=model, tokenizer=tokenizer, records=text_records(labelled=True), bucket=8)


def image_records(folder: Path) -> Records:
    generator = np.random.default_rng(0)
    paths: list[Path] = []
    for number in range(6):
        paths.append(folder / f"{number}.png")
        Image.fromarray(generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(paths[-1])
    labels = np.array([0, 1, 2, 0, 1, 2])
    return Records(kind=RecordKind.IMAGE, source="memory", images=paths, labels=labels, label_names=("a", "b", "c"))


def rows() -> Records:
    features = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    labels = np.array([0, 1, 1, 0, 1, 0, 0, 1])
    return Records(
        kind=RecordKind.TABULAR, source="memory", features=features, feature_names=("x", "y", "z"), labels=labels,
        label_names=("no", "yes"),
    )  # fmt: skip


def vit() -> nn.Module:
    torch.manual_seed(3)
    config = tiny.vit_config()
    config.num_labels = 3
    return transformers.ViTForImageClassification(config)


TASKS = ["masked-lm", "causal-lm", "text-classification", "decoder", "image-classification", "small-cnn", "tabular"]


def prepared_for(name: str, images: Records) -> Prepared:
    if name == "masked-lm":
        return masked_lm()
    if name == "causal-lm":
        return causal_lm()
    if name in ("text-classification", "decoder"):
        return text_classification(decoder=name == "decoder")
    if name == "tabular":
        return prepare(task=Task.TABULAR_CLASSIFICATION, model="mlp", records=rows())
    model: Any = "small-cnn" if name == "small-cnn" else vit()
    return prepare(task=Task.IMAGE_CLASSIFICATION, model=model, records=images, image_size=16)


def whole_batch(prepared: Prepared) -> Any:
    return prepared.collate([prepared.dataset[i] for i in range(len(prepared.records))])
