"""How good a model is on records that are not private, or, for debugging, on private ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import nn

from dpoptim.app.models.prepared import Prepared
from dpoptim.data.lengths import cut_by_length
from dpoptim.integrations.modes import in_eval_mode


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Averages over records: of their losses, of their targets' losses, of right answers.

    NOT PRIVATE when taken on private records: publish those of public or held-out records alone.

    >>> Scores(examples=10, targets=40, loss=2.1, target_loss=2.0).perplexity
    7.38905609893065
    """

    examples: int
    targets: int
    loss: float  # mean over examples with targets of the mean over theirs: what training minimises
    target_loss: float  # mean over all targets
    accuracy: float | None = None  # classification only

    @property
    def perplexity(self) -> float:
        """exp(target_loss); infinite where that overflows."""
        return math.exp(self.target_loss) if self.target_loss < 700 else math.inf


def evaluate(
    prepared: Prepared,
    model: nn.Module | None = None,
    *,
    batch_size: int = 64,
    batch_tokens: int = 2**16,
) -> Scores:
    """The scores of `model` (by default the prepared one) on the prepared records.

    In eval mode and without gradients; both are put back. Masked-lm uses each record's one evaluation mask, so scores
    of different runs compare. At most `batch_size` examples and about `batch_tokens` tokens run together.
    Edge cases: an example without targets counts in neither loss; where none has any, both are 0.
    """
    model = prepared.model if model is None else model
    device = next(model.parameters()).device
    losses = total = right = 0.0
    targets = with_targets = 0
    has_answers = prepared.task.is_classification
    with in_eval_mode(model):
        for part in _parts(prepared, batch_size, batch_tokens):
            batch = prepared.collate([prepared.dataset[int(i)] for i in part])
            found = prepared.evaluate(model, {name: values.to(device) for name, values in batch.items()})
            losses += float(found.losses.double().sum())
            total += float(found.total.double().sum())
            targets += int(found.targets.sum())
            with_targets += int((found.targets > 0).sum())
            right += float(found.correct.sum()) if found.correct is not None else 0.0
    examples = len(prepared.records)
    return Scores(
        examples=examples,
        targets=targets,
        loss=losses / max(with_targets, 1),
        target_loss=total / max(targets, 1),
        accuracy=right / examples if has_answers else None,
    )


def _parts(prepared: Prepared, batch_size: int, batch_tokens: int) -> Iterator[np.ndarray]:
    lengths = prepared.lengths
    if lengths is None:
        places = np.arange(len(prepared.records))
        yield from (places[start : start + batch_size] for start in range(0, len(places), batch_size))
        return
    order = np.argsort(lengths, kind="stable")
    block = 64 * batch_size  # the best cut takes time that grows with the square of what is cut
    for start in range(0, len(order), block):
        own = order[start : start + block]
        cuts = cut_by_length(
            lengths[own], max_tokens=batch_tokens, max_examples=batch_size, bucket=prepared.bucket, price=1024
        )
        yield from (own[cut] for cut in cuts)
