"""Does the loss of an example stay as it is where others of its batch are replaced by copies of one of them?

Shapes stay too, and so do the random numbers that are drawn by them: dropout and noise are no hindrance, and the model
is looked at in training mode, as the steps will run it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpoptim.data.secret_randomness import generator_states
from dpoptim.integrations.hugging_face.trial_batches import TrialBatches, rows_of
from dpoptim.integrations.padding_check import same_losses

NOTHING_BOUNDS = "one record would change the losses of others and clipping would bound nothing"

Places = list[int]  # of each row the place of the one that it becomes; a row that stays has its own
_Found = tuple[Any, dict[str, bytes]]  # what was found, and the states of the generators behind it


def all_of_one(rows: int) -> list[Places]:
    """Each row in turn stays, and the others become copies of it.

    >>> all_of_one(2)
    [[0, 0], [1, 1]]
    """
    return [[row] * rows for row in range(rows)]


def half_of_them(rows: int) -> list[Places]:
    """One half stays, the first, second, even or odd rows, and the other one becomes copies of one row of it.

    >>> half_of_them(4)
    [[0, 1, 0, 0], [2, 2, 2, 3], [0, 0, 2, 0], [1, 1, 1, 3]]
    """
    every = range(rows)
    halves = every[: rows // 2], every[rows // 2 :], every[::2], every[1::2]
    return [[row if row in half else half[0] for row in every] for half in halves]


def check_replaced(
    trial: TrialBatches,
    examples: list[Any],
    seed: int,
    replaced: list[Places],
    losses: Callable[[Any], Tensor],
    dtype: torch.dtype,
) -> None:
    """Refuse a model, loss or collator by which the loss of an example is another where others are replaced.

    `losses` are those of a batch under one seed, rounded in `dtype`. Replaced are the rows of a batch, where they can
    be told, and then the examples before they are collated, where the batch is of the same shapes then.

    Edge cases: where more or fewer numbers are drawn for other content (masks of whole words), an example may get other
    ones, and nothing is compared. On a GPU the count is not seen exactly, and such a model may be refused.
    """

    def run(batch: Any) -> _Found:
        return losses(batch).detach(), generator_states()

    def collated(places: Places) -> _Found:
        return trial.batch([copy.deepcopy(examples[place]) for place in places], seed)[0], generator_states()

    whole = collated(list(range(len(examples))))
    together = run(whole[0])
    others = [rows_of(whole[0], places, len(examples)) for places in replaced]
    can_tell = all(other is not None for other in others)
    if can_tell and not _same(together, replaced, [run(other) for other in others], dtype):
        raise ValueError(
            f"an example has another loss in training where the others of its batch are replaced: {NOTHING_BOUNDS}; "
            "look for sums or means over the first axis in the model or loss_per_example"
        )
    found = [(places, collated(places)) for places in replaced]
    found = [(places, other) for places, other in found if _shapes(other[0]) == _shapes(whole[0])]
    if not _draw_alike(whole, [other for _, other in found]):
        return
    if not _same(together, [places for places, _ in found], [run(other) for _, (other, _) in found], dtype):
        raise ValueError(
            f"an example has another loss where it is collated with copies of one: {NOTHING_BOUNDS}; look for what "
            "data_collator makes of several examples (mixup), and for sums or means over the first axis in the model "
            "or loss_per_example"
        )


def _draw_alike(one: _Found, others: list[_Found]) -> bool:
    return all(states == one[1] for _, states in others)


def _same(together: _Found, replaced: list[Places], others: list[_Found], dtype: torch.dtype) -> bool:
    """Whether the rows that stayed have the same losses in each, or other numbers were drawn in one."""
    if not _draw_alike(together, others):
        return True
    stayed = [[row for row, place in enumerate(places) if row == place] for places in replaced]
    pairs = zip(stayed, others, strict=True)
    return all(same_losses(together[0][rows], losses[rows], dtype) for rows, (losses, _) in pairs)


def _shapes(batch: Any) -> Any:
    leaves, structure = pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    return structure, [leaf.shape if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
