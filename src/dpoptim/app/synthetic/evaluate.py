"""Compare synthetic texts with the real ones they stand for: what they teach, what they are like, what they repeat."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.app.data.records import RecordKind, Records, read_records
from dpoptim.app.synthetic.classifiers import BAG_OF_WORDS, accuracy
from dpoptim.app.synthetic.copies import KnownTexts, words_of
from dpoptim.arguments import check_number
from dpoptim.integrations.chats import responses_of

_WORST = 3


@dataclass(frozen=True, kw_only=True)
class SyntheticScores:
    """What synthetic texts teach, are like and repeat.

    NOT PRIVATE: everything here is computed from real texts without noise. Do not publish it without accounting for it.
    """

    model: str
    accuracy: dict[str, float] | None  # on real test texts, by what the classifier was trained on; None without labels
    texts: dict[str, dict[str, float]]  # statistics of synthetic, training and test texts
    copies: dict[str, dict[str, float]]  # of training texts, in synthetic and in test texts
    worst: list[dict[str, Any]]  # the synthetic rows that repeat most, by number, without their content

    def to_dict(self) -> dict[str, Any]:
        """The scores as plain values."""
        return {"not_private": True, **dataclasses.asdict(self)}


def evaluate_synthetic(
    synthetic: str | Path,
    train: str | Path,
    test: str | Path,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    model: str = BAG_OF_WORDS,
    overlap: float = 0.5,
    seed: int = 0,
    device: str = "auto",
    stage: Callable[[str], None] = lambda text: None,
) -> SyntheticScores:
    """Compare synthetic texts with the real texts of a training run.

    Args:
        synthetic: The synthetic texts, such as a file of `generate`.
        train: The private training texts.
        test: Real texts that were not used in training.
        text_column: The column of texts; of chats, responses are compared.
        label_column: The column of labels. Defaults to "label" or "labels"; without one there is no classifier.
        model: The classifier: "bag-of-words", or a model of transformers to fine-tune.
        overlap: A near copy has at least this share of its runs of five words in one training text.
        seed: The seed of the classifiers.
        device: The device of a model of transformers.
        stage: Called with a short text when a stage begins.

    Raises:
        ValueError: A file or column is missing, or the files have different labels.

    Not private: every result.
    """
    check_number("overlap", overlap, above=0, high=1)
    stage("reading the texts")
    names = None
    found: dict[str, Records] = {}
    for name, source in (("training", train), ("test", test), ("synthetic", synthetic)):
        found[name] = _texts(source, text_column, label_column, names)
        names = found[name].label_names or None if name == "training" else names
    real, held_out, made = found["training"], found["test"], found["synthetic"]
    scores: dict[str, float] | None = None
    if all(records.labels is not None for records in found.values()):
        if len(real.label_names) < 2:
            raise ValueError(f"data {str(train)!r} has one label, {real.label_names[0]!r}; a classifier needs two")
        stage("training classifiers")
        scores = {
            name: accuracy(model, records, held_out, seed=seed, device=device)
            for name, records in (("synthetic", made), ("training", real))
        }
        scores["most common label"] = float(np.bincount(np.asarray(held_out.labels)).max() / len(held_out))
    stage("comparing with training texts")
    known = KnownTexts(real.texts)
    copies: dict[str, dict[str, float]] = {}
    worst: list[dict[str, Any]] = []
    for name, records in (("synthetic", made), ("test", held_out)):
        overlaps = [known.overlap(text) for text in records.texts]
        copies[name] = {
            "texts": len(overlaps),
            "exact": sum(one.is_exact for one in overlaps),
            "near": sum(one.share >= overlap for one in overlaps),
            "longest": max(one.longest for one in overlaps),
        }
        if name == "synthetic":
            numbered = sorted(enumerate(overlaps, start=1), key=lambda pair: -pair[1].longest)[:_WORST]
            worst = [
                {"row": row, "training_record": one.record + 1, "words": one.longest}
                for row, one in numbered
                if one.record is not None
            ]
    common = [word for text in held_out.texts for word in words_of(text)]
    texts = {name: _statistics(found[name].texts, common) for name in ("synthetic", "training", "test")}
    return SyntheticScores(model=model, accuracy=scores, texts=texts, copies=copies, worst=worst)


def _texts(source: str | Path, text: str | None, label: str | None, names: Sequence[str] | None) -> Records:
    found = read_records(
        source, text_column=text, label_column=label, label_names=names, kind=RecordKind.TEXT, may_be_chats=True
    )
    if found.chats is None:
        return found
    return dataclasses.replace(found, texts=["\n".join(responses_of(chat)) for chat in found.chats], chats=None)


def _statistics(texts: Sequence[str], common: Sequence[str]) -> dict[str, float]:
    """Counts of texts and words; `covered` is the share of the words of the test texts that occur."""
    words = [words_of(text) for text in texts]
    low, middle, high = np.quantile([len(own) for own in words], [0.05, 0.5, 0.95]).tolist()
    vocabulary = {word for own in words for word in own}
    return {
        "texts": len(texts),
        "distinct_texts": len({tuple(own) for own in words}),
        "words_low": low,
        "words_median": middle,
        "words_high": high,
        "distinct_words": len(vocabulary),
        "covered": sum(word in vocabulary for word in common) / max(1, len(common)),
    }
