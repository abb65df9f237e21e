"""Compare synthetic texts with the real ones: accuracy of classifiers, lengths, vocabulary and copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from dpoptim.app.data.records import RecordKind, Records, read_records
from dpoptim.app.runs.setup import same_source
from dpoptim.app.synthetic.classifiers import BAG_OF_WORDS, accuracy
from dpoptim.app.synthetic.copies import find_copies, words_of
from dpoptim.arguments import check_whole
from dpoptim.integrations.chats import responses_of

NEAR = 0.5  # the share of a text's runs of words that makes it a near copy
_WORST = 3


@dataclass(frozen=True, kw_only=True)
class SyntheticScores:
    """Accuracy of classifiers, lengths, vocabulary and copies of synthetic and real texts.

    NOT PRIVATE: everything here is computed from real texts without noise. Do not publish it without accounting for it.
    """

    model: str
    accuracy: dict[str, float] | None  # on real test texts, by what the classifier was trained on; None without labels
    intervals: dict[str, tuple[float, ...]]  # of these accuracies, at 95 %, from the number of test texts
    learned_from: int  # texts that each classifier was trained on
    texts: dict[str, dict[str, float]]  # statistics of synthetic, training and test texts
    copies: dict[str, dict[str, float]]  # of training texts, in synthetic and in test texts; see `NEAR`
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
        seed: The seed of the classifiers, and of the texts that they are trained on: both get the same number.
        device: The device of a model of transformers.
        stage: Called with a short text when a stage begins.

    Raises:
        ValueError: A file or column is missing, two files are the same, or they have different labels.

    Not private: every result.
    """
    check_whole("seed", seed, low=0)
    stage("reading the texts")
    found: dict[str, Records] = {}
    sources = {"training": train, "test": test, "synthetic": synthetic}
    for name, source in sources.items():
        same = next((other for other in found if same_source(str(sources[other]), str(source))), None)
        if same is not None:
            raise ValueError(f"{same} and {name} texts are both {str(source)!r}; give different ones")
        names = found["training"].label_names or None if found else None
        try:
            found[name] = _texts(source, text_column, label_column, names)
        except ValueError as error:
            raise ValueError(f"{name} texts: {error}") from error
    test_labels, tests = found["test"].labels, len(found["test"])
    scores: dict[str, float] | None = None
    intervals, size = {}, min(len(found["synthetic"]), len(found["training"]))
    if test_labels is not None and all(records.labels is not None for records in found.values()):
        if len(found["training"].label_names) < 2:
            raise ValueError(f"data {str(train)!r} has one label, and a classifier needs two")
        scores = {}
        for name in ("synthetic", "training"):
            stage(f"training a classifier on {size:,} {name} texts")
            chosen = np.random.default_rng(seed).permutation(len(found[name]))[:size]
            scores[name] = accuracy(model, found[name].take(chosen), found["test"], seed=seed, device=device)
            right = binomtest(round(scores[name] * tests), tests)
            intervals[name] = tuple(map(float, right.proportion_ci(method="wilson")))
        scores["most common label"] = float(np.bincount(test_labels).max() / tests)
    stage("comparing with training texts")
    words = {name: [words_of(text) for text in records.texts] for name, records in found.items()}
    repeats = {name: find_copies(words[name], words["training"]) for name in ("synthetic", "test")}
    copies: dict[str, dict[str, float]] = {}
    for name, one in repeats.items():
        counts = {"exact": int(one.is_exact.sum()), "near": int((one.share >= NEAR).sum())}
        copies[name] = {"texts": len(words[name]), **counts, "longest": int(one.longest.max())}
    most = repeats["synthetic"]
    common = [word for text in words["test"] for word in text]
    return SyntheticScores(
        model=model,
        accuracy=scores,
        intervals=intervals,
        learned_from=size,
        texts={name: _statistics(words[name], common) for name in ("synthetic", "training", "test")},
        copies=copies,
        worst=[
            {"row": row + 1, "training_record": int(most.record[row]) + 1, "words": int(most.longest[row])}
            for row in np.argsort(-most.longest, kind="stable")[:_WORST].tolist()
            if most.longest[row]
        ],
    )


def _texts(source: str | Path, text: str | None, label: str | None, names: Sequence[str] | None) -> Records:
    found = read_records(
        source, text_column=text, label_column=label, label_names=names, kind=RecordKind.TEXT, may_be_chats=True
    )
    if found.chats is None:
        return found
    return dataclasses.replace(found, texts=["\n".join(responses_of(chat)) for chat in found.chats], chats=None)


def _statistics(words: Sequence[Sequence[str]], common: Sequence[str]) -> dict[str, float]:
    """Counts of texts and words; `covered` is the share of the words of the test texts that occur."""
    low, middle, high = np.quantile([len(own) for own in words], [0.05, 0.5, 0.95]).tolist()
    vocabulary = {word for own in words for word in own}
    return {
        "texts": len(words),
        "distinct_texts": len({tuple(own) for own in words}),
        "words_low": low,
        "words_median": middle,
        "words_high": high,
        "distinct_words": len(vocabulary),
        "covered": sum(word in vocabulary for word in common) / max(1, len(common)),
    }
