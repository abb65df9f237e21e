"""The batches on which a model, loss and collator are tried: few examples of unequal lengths, and single rows of them.

Padding shows where a short example lies beside a long one, and a row's own loss where it lies alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpoptim.data.secret_randomness import generator_states, seed_generators
from dpoptim.integrations.masking import IGNORED

_TRIES = 32  # seeds, until masks have targets in each row; one or two, but for very short texts

_SEQUENCES = (list, tuple, np.ndarray, Tensor)

Evaluated = Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class TrialBatches:
    """What a trainer's collator makes of examples that are copied first, under seeds that are set first."""

    trainer: Any
    collate: Callable[[list[Any]], Any]

    def batch(self, examples: list[Any], seed: int) -> tuple[Any, bool]:
        """The batch, on the trainer's device, and whether anything was drawn for it."""
        seed_generators(seed)
        before = generator_states()
        batch = self.collate(copy.deepcopy(examples))
        drawn = generator_states() != before
        return self.trainer._prepare_inputs(batch), drawn

    @property
    def decodes(self) -> bool:
        """Whether the model makes a text of a text, by its configuration."""
        return bool(getattr(getattr(self.trainer.model, "config", None), "is_encoder_decoder", False))

    def chosen(self, examples: list[Any], size: int, evaluated: Evaluated) -> list[Any]:
        """The longest example and the shortest ones; where all are of one length, with a copy that was cut.

        Where no label text of two tokens or more lies beside a longer one, two copies have such: padding before a
        single token may be unseen, since a decoder begins with it anyway. Copies of which the collator or the loss
        makes nothing are left out.
        """
        mask = mask_of(self.batch(examples, 0)[0], len(examples))
        chosen = examples[:size]
        if mask is not None:
            order = mask.sum(1).argsort(stable=True).tolist()
            chosen = [examples[place] for place in [order[-1], *order[: size - 1]]]
        if mask is not None and _all_of_one({length_of(example) for example in chosen}):
            chosen = self._beside(chosen, [_shorter(chosen[-1])])
        decodes = self.decodes or any(len_of_target(example) for example in chosen)
        targets = [len_of_target(example, decodes=decodes) or 0 for example in chosen]
        if all(targets) and not any(1 < length < max(targets) for length in targets):
            short = max(2, targets[-1] // 2)
            copies = [_with_target_of(chosen[-2], 2 * short), _with_target_of(chosen[-1], short)]
            chosen = self._beside(chosen, copies, evaluated)
        return chosen

    def _beside(self, chosen: list[Any], copies: list[Any], evaluated: Evaluated | None = None) -> list[Any]:
        """With copies in place of the last, unless the collator or the loss does not take examples of other lengths:
        then there is no padding to be looked at."""
        beside_copies = [*chosen[: -len(copies)], *copies]
        try:
            batch, _ = self.batch(beside_copies, 0)
            if evaluated is not None:
                evaluated(batch)
                evaluated(self.batch(copies[-1:], 0)[0])
        except Exception:  # whatever is said of them
            return chosen
        return beside_copies

    def seed_with_targets(self, examples: list[Any], evaluated: Evaluated) -> int:
        """The seed under which masks leave the fewest examples without a target, of a few that are tried."""
        best, most = 0, -1
        for seed in range(_TRIES):
            batch, draws = self.batch(examples, seed)
            found = int((evaluated(batch) != 0).sum())
            if found > most:
                best, most = seed, found
            if not draws or found == len(examples):
                break
        return best


def mask_of(batch: Any, rows: int) -> Tensor | None:
    """The attention mask, [rows, width]."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) == rows else None


def width_of(batch: Any) -> int:
    """How wide the attention mask of a batch of one row is; 0 where there is none."""
    mask = mask_of(batch, 1)
    return 0 if mask is None else mask.shape[1]


def rows_of(batch: Any, places: list[int], rows: int) -> Any:
    """These rows of a batch of so many as a batch; None where they cannot be told.

    >>> rows_of({"x": torch.tensor([5, 6, 7]), "name": 1}, [2, 2], 3)
    {'x': tensor([7, 7]), 'name': 1}
    """
    named = isinstance(batch, Mapping)
    parts = dict(batch) if named else batch
    leaves = pytree.tree_leaves(parts)
    if any(isinstance(leaf, str) or (isinstance(leaf, Tensor) and leaf.shape[:1] != (rows,)) for leaf in leaves):
        return None
    parts = pytree.tree_map(lambda leaf: leaf[places] if isinstance(leaf, Tensor) else leaf, parts)
    return type(batch)(parts) if named else parts


def row_of(batch: Any, row: int, rows: int, *, columns: Tensor | None = None, decodes: bool = False) -> Any:
    """One row of a batch as a batch, at these columns of what is as wide as the attention mask; None where it cannot.

    `decodes`: labels are another text, which stays whole even where it happens to be as wide.

    >>> import torch
    >>> batch = {"input_ids": torch.tensor([[1, 2], [3, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]]),
    ...          "labels": torch.tensor([0, 1])}
    >>> row_of(batch, 1, 2, columns=torch.tensor([0]))
    {'input_ids': tensor([[3]]), 'attention_mask': tensor([[1]]), 'labels': tensor([1])}
    """
    alone = rows_of(batch, [row], rows)
    if alone is None or columns is None:
        return alone
    parts, shape = dict(alone), alone["attention_mask"].shape
    for name, value in parts.items():
        if not isinstance(value, Tensor) or value.shape[:2] != shape or name.startswith("decoder_"):
            continue
        targets = name in ("label", "labels", "label_ids")
        if not (targets and (decodes or value.is_floating_point())):
            parts[name] = value[:, columns]
    return type(batch)(parts)


def length_of(example: Any) -> int | None:
    """How many tokens an example has; None where it is not of tokens yet."""
    tokens: Any = example.get("input_ids") if isinstance(example, Mapping) else None
    return len(tokens) if hasattr(tokens, "__len__") else None


def len_of_target(example: Any, *, decodes: bool = False) -> int | None:
    """How many tokens the text has that is to be made of an example; None where labels are classes, numbers or tags.

    >>> len_of_target({"input_ids": [5, 6, 7], "labels": [8, 9]}), len_of_target({"input_ids": [5], "labels": [0.5, 1]})
    (2, None)
    """
    labels: Any = example.get("labels") if isinstance(example, Mapping) else None
    if not isinstance(labels, list | tuple | np.ndarray | Tensor) or getattr(labels, "ndim", 1) != 1 or not len(labels):
        return None
    token = np.asarray(labels[0])
    is_text = token.ndim == 0 and token.dtype.kind in "iu" and (decodes or len(labels) != length_of(example))
    return len(labels) if is_text else None


def target_without_padding(batch: Any, example: Any, row: int, rows: int) -> tuple[Any, bool] | None:
    """One row of a batch as a batch without the padding of its target, and whether that was on the left.

    None where none can be told: the row's labels are not the example's between columns of −100.
    """
    alone, target = row_of(batch, row, rows), example["labels"]
    if not isinstance(alone, Mapping) or not isinstance(labels := alone.get("labels"), Tensor) or labels.ndim != 2:
        return None
    width, own = labels.shape[1], torch.as_tensor(target).to(labels.device)
    for start in (0, width - len(own)) if width > len(own) else ():
        columns = slice(start, start + len(own))
        is_padding = torch.ones(width, dtype=torch.bool, device=labels.device)
        is_padding[columns] = False
        if torch.equal(labels[0, columns], own) and bool((labels[0, is_padding] == IGNORED).all()):
            cut = {
                name: value[:, columns]
                for name, value in alone.items()
                if isinstance(value, Tensor)
                and value.shape[:2] == labels.shape
                and name.startswith(("decoder_", "labels"))
            }
            return type(batch)({**alone, **cut}), start > 0
    return None


def _all_of_one(lengths: set[int | None]) -> bool:
    return len(lengths) == 1 and None not in lengths


def _with_target_of(example: Mapping[str, Any], length: int) -> dict[str, Any]:
    """A copy with so many labels: the first ones, again and again where there are fewer."""
    own = len(example["labels"])
    target = {name: value for name, value in example.items() if name == "labels" or name.startswith("decoder_")}
    return {**example, **at_places(target, [place % own for place in range(length)], of=own)}


def _shorter(example: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without its padding, or, where it has none, the first half of it."""
    length = len(example["input_ids"])
    mask = example.get("attention_mask")
    real = [] if mask is None else [place for place in range(length) if mask[place]]
    places = real if 0 < len(real) < length else list(range(max(1, length // 2)))
    return at_places(example, places, of=length)


def at_places(example: Mapping[str, Any], places: list[int], *, of: int) -> dict[str, Any]:
    """The example with its rows of length `of`, one entry a token, at these places alone.

    >>> at_places({"input_ids": [5, 6, 0], "labels": 1}, [0, 1], of=3)
    {'input_ids': [5, 6], 'labels': 1}
    """

    def at(value: Any) -> Any:
        if not isinstance(value, _SEQUENCES) or getattr(value, "ndim", 1) == 0 or len(value) != of:
            return value
        return [value[place] for place in places] if isinstance(value, list | tuple) else value[places]

    return {name: at(value) for name, value in example.items()}
