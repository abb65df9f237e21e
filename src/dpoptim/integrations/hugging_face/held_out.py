"""Held-out examples of PrivateTrainer: which they are, and that they are not the training examples."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dpoptim.data import RecordFingerprint, fingerprint_records
from dpoptim.noise import NoiseKey

_LABELS = ("label", "labels", "label_ids")
_OF_TOKENS = ("attention_mask", "token_type_ids", "special_tokens_mask", "position_ids", "length")  # made of them
_ROWS = (list, tuple, np.ndarray, Tensor)


def named_held_out(eval_dataset: Any) -> dict[str, Any]:
    """The datasets in Trainer's `eval_dataset` (one, several by name, or none) that have a length."""
    if eval_dataset is None:
        return {}
    several = isinstance(eval_dataset, dict)
    named = {f"held-out {name}": part for name, part in eval_dataset.items()} if several else {"held-out": eval_dataset}
    return {name: part for name, part in named.items() if hasattr(part, "__len__") and len(part)}


class HeldOutCheck:
    """Whether examples that are to be evaluated on are training examples, whatever type they have.

    Each example is compared in a normal form: numbers, lists, arrays and tensors of the same values are the same, and
    of a dict those `columns` count that the model is given (None: all), without labels, padding, and what is made of
    the tokens. The training examples are read once for it, at the first dataset that is to be compared, and each
    dataset is compared once.
    """

    def __init__(self, train_dataset: Any, *, columns: list[str] | None, debugging: bool) -> None:
        self._train, self._columns, self._debugging = train_dataset, columns, debugging
        self._key = NoiseKey.generate()
        self._training: RecordFingerprint | None = None
        self._checked: list[Any] = []

    def check(self, eval_dataset: Any) -> None:
        """Refuse datasets whose examples are training examples, all of them; warn of single ones, and of rows of
        numbers that are hardly distinct.

        Edge cases: with `debugging` nothing is refused; random examples, and those of no length, are not compared.
        """
        for name, dataset in named_held_out(eval_dataset).items():
            if any(dataset is other for other in self._checked):
                continue
            if dataset is self._train and not self._debugging:
                raise ValueError(
                    "eval_dataset is train_dataset itself: scores on it are not private; give other examples, or, to "
                    "debug, PrivacyArguments(debug_loss=True)"
                )
            self._compare(name, dataset)
            self._checked.append(dataset)

    def _compare(self, name: str, dataset: Any) -> None:
        if self._train is None or not hasattr(self._train, "__len__") or self._debugging:
            return
        try:
            if self._training is None:
                self._training = self._digests(self._train)
            found = self._digests(dataset)
        except (ValueError, TypeError, RuntimeError):
            return
        shared = found.shared_with(self._training)
        if shared == len(found.each) and (_is_text_or_image(self._train[0]) or self._training.mostly_distinct):
            raise ValueError(
                f"eval_dataset ({name}) has the same examples as train_dataset, or some of them and no others: scores "
                "on them are not private, and no guarantee covers them; give other examples, or none"
            )
        if shared:
            warnings.warn(
                f"{shared} of the {len(found.each)} examples of eval_dataset ({name}) are training examples too: "
                "scores on them are not covered by the guarantee",
                stacklevel=5,
            )

    def _digests(self, dataset: Any) -> RecordFingerprint:
        return fingerprint_records(dataset, self._key, form=self._form)

    def _form(self, example: Any) -> Any:
        if isinstance(example, Mapping) and self._columns is not None:
            example = {name: example[name] for name in example if name in self._columns} or example
        return normal(_inputs(example))


def _is_text_or_image(example: Any) -> bool:
    return isinstance(example, Mapping) and bool({"input_ids", "pixel_values"} & example.keys())


def _inputs(example: Any) -> Any:
    """A text or an image without labels and padding: labelled, masked or padded otherwise, it is the same.

    >>> one = {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "labels": 1}
    >>> _inputs(one), _inputs({"input_ids": [5, 6], "label": 0})
    ({'input_ids': [5, 6]}, {'input_ids': [5, 6]})
    """
    if not _is_text_or_image(example):
        return example  # numbers, which others may have too
    left_out = (*_LABELS, *_OF_TOKENS) if "input_ids" in example else _LABELS
    inputs = {name: value for name, value in example.items() if name not in left_out}
    mask = example.get("attention_mask")
    if isinstance(mask, _ROWS) and len(mask) and np.ndim(mask[0]) == 0:
        inputs = at_places(inputs, np.flatnonzero(np.asarray(mask)).tolist(), of=len(mask))
    return inputs or example


def at_places(example: Mapping[str, Any], places: list[int], *, of: int) -> dict[str, Any]:
    """The example with its rows of length `of`, one entry a token, at these places alone.

    >>> at_places({"input_ids": [5, 6, 0], "labels": 1}, [0, 1], of=3)
    {'input_ids': [5, 6], 'labels': 1}
    """

    def at(value: Any) -> Any:
        if not isinstance(value, _ROWS) or getattr(value, "ndim", 1) == 0 or len(value) != of:
            return value
        return [value[place] for place in places] if isinstance(value, list | tuple) else value[places]

    return {name: at(value) for name, value in example.items()}


def normal(value: Any) -> Any:
    """The same for the same content: dicts sorted, numbers as int64 or float32 arrays, whatever held them.

    >>> one, other = normal({"x": [1, 2], "y": 0.5}), normal({"y": np.float64(0.5), "x": Tensor([1, 2])})
    >>> list(one) == list(other), one["x"].tolist() == other["x"].tolist(), one["y"].dtype == other["y"].dtype
    (True, True, True)
    """
    if isinstance(value, Mapping):
        return {str(name): normal(value[name]) for name in sorted(value, key=str)}
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if isinstance(value, list | tuple):
        if not value or not isinstance(value[0], bool | int | float | np.number | np.bool_):
            return [normal(part) for part in value]
        with contextlib.suppress(ValueError, OverflowError):
            value = np.asarray(value)
    if isinstance(value, bool | int | float):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biuf":
        return value
    if isinstance(value, np.ndarray) and value.ndim > 1:  # as a list of lists
        return [normal(part) for part in value]
    if value.dtype.kind == "f":
        value = value.astype(np.float32)
        whole = np.isfinite(value).all() and (np.abs(value) < 2**24).all() and (value == np.round(value)).all()
        return value.astype(np.int64) if whole else np.asarray(value)
    return np.asarray(value).astype(np.int64)
