"""What is measured of a run: scores on held-out records, and diagnostics of released values."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpoptim.app.models.prepared import Prepared
from dpoptim.clipping import Released
from dpoptim.data.lengths import cut_by_length
from dpoptim.integrations.released_norms import norm_of, released_norms
from dpoptim.optim import Adam, NoiseCorrected, OfNoisyGradient, OfReleasedSquare, PrivateOptimizer
from dpoptim.privacy import AdaptiveClipNorm
from dpoptim.theory import second_moment_bias
from dpoptim.validation.temporary_changes import in_eval_mode

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_MOST_SORTED = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Mean losses over records, and accuracy or error.

    NOT PRIVATE on private records: publish scores of public or held-out records only.

    >>> Scores(examples=10, targets=40, loss=2.1, target_loss=2.0).perplexity
    7.38905609893065
    """

    examples: int
    targets: int
    loss: float  # mean over examples of the mean over their targets: what training minimizes
    target_loss: float  # mean over all targets
    accuracy: float | None = None  # classification only
    rmse: float | None = None  # regression only: the root of the mean squared error, in the label's own unit

    @property
    def perplexity(self) -> float:
        """exp(target_loss), or infinity if that overflows."""
        return math.exp(self.target_loss) if self.target_loss < 700 else math.inf


def evaluate(
    prepared: Prepared, model: nn.Module | None = None, *, batch_size: int = 64, batch_tokens: int = 2**16
) -> Scores:
    """Score a model on the prepared records, in eval mode and without gradients.

    Masked-lm uses each record's fixed evaluation mask, so scores of different runs are comparable. An example without
    targets counts in neither loss.

    Args:
        prepared: The records, and how to compute their losses.
        model: The model to score. Defaults to the prepared one.
        batch_size: The most examples to run at once.
        batch_tokens: About the most tokens to run at once.
    """
    prepared = prepared if model is None else dataclasses.replace(prepared, model=model)
    losses = total = right = 0.0
    targets = with_targets = 0
    with in_eval_mode(prepared.model):
        for part in _parts(prepared, batch_size, batch_tokens):
            found = prepared.evaluate(prepared.model, prepared.collated([prepared.dataset[int(i)] for i in part]))
            losses += float(found.losses.double().sum())
            total += float(found.total.double().sum())
            targets += int(found.targets.sum())
            with_targets += int((found.targets > 0).sum())
            right += float(found.correct.sum()) if found.correct is not None else 0.0
    examples, unit = len(prepared.records), prepared.records.label_scale
    return Scores(
        examples=examples,
        targets=targets,
        loss=losses / max(with_targets, 1),
        target_loss=total / max(targets, 1),
        accuracy=right / examples if prepared.task.is_classification else None,
        rmse=None if unit is None else math.sqrt(losses / max(with_targets, 1)) * unit.scale,
    )


def _parts(prepared: Prepared, batch_size: int, batch_tokens: int) -> Iterator[np.ndarray]:
    lengths, limits = prepared.lengths, {"max_tokens": batch_tokens, "max_examples": batch_size}
    order = np.arange(len(prepared.records)) if lengths is None else np.argsort(lengths, kind="stable")
    block = batch_size if lengths is None else 64 * batch_size  # the best cut takes time quadratic in the block
    for start in range(0, len(order), block):
        own = order[start : start + block]
        if lengths is None:
            yield own
        else:
            cuts = cut_by_length(lengths[own], **limits, bucket=prepared.bucket, price=1024)
            yield from (own[cut] for cut in cuts)


class Diagnostics:
    """Measures the step between `before()` and `after()`.

    Guarantee: the values are computed from what a step released and from the plan's public numbers, so anyone who may
    see the model may see them.
    """

    def __init__(self, optimizer: PrivateOptimizer) -> None:
        self._optimizer = optimizer
        self._found: dict[str, Any] = {}
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._numel = sum(parameter.numel() for parameter in self._parameters)
        self._old: list[Tensor] = []
        optimizer.observers.append(self._observe)

    def before(self) -> None:
        """Measure the next step."""
        self._old = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def after(self) -> dict[str, Any]:
        """The values of that step."""
        moved = [parameter.detach() - old for parameter, old in zip(self._parameters, self._old, strict=True)]
        found = {**self._found, "negative_fraction": self._negative_fraction(), "update_norm": float(norm_of(moved))}
        self._old, self._found = [], {}
        return found

    @torch.no_grad()
    def _observe(self, released: Released) -> None:
        if not self._old:
            return
        scale = self._optimizer.mechanism.scale
        gradient, noise = map(float, released_norms(released, scale))
        signal = math.sqrt(max(gradient**2 - noise**2, 0.0))
        self._found = {
            "gradient_norm": gradient,  # ‖g̃‖
            "noise_norm": noise,  # √(φ·Σ 1/s²), the expected norm of the noise alone
            "signal_norm": signal,  # an estimate of the norm without noise
            "signal_over_clip": signal / (self._optimizer.plan.clip_norm * released.clip_factor),
            "noise_to_signal": noise / signal if signal > 0 else None,
            "scale_quantiles": None if scale is None else _quantiles(scale.values(), self._numel),
        }

    def _negative_fraction(self) -> float | None:
        """The share of second moments below the noise's part; None if gradients are scaled."""
        optimizer = self._optimizer
        if not isinstance(optimizer.rule, Adam) or optimizer.mechanism.scale is not None:
            return None
        if isinstance(optimizer.plan.clipping, AdaptiveClipNorm):  # the noise follows the clip norm
            return None
        bias = 0.0
        if isinstance(optimizer.second_moment, OfNoisyGradient | NoiseCorrected):
            step, beta2 = optimizer.mechanism.step, optimizer.param_groups[0]["betas"][1]
            bias = float(self._noise_shares[step - 1]) * (1 - beta2**step)
        elif not isinstance(optimizer.second_moment, OfReleasedSquare):
            return None
        moments = [optimizer.state[parameter]["second_moment"] for parameter in self._parameters]
        negative = sum(int((moment < bias).sum()) for moment in moments)
        return negative / sum(moment.numel() for moment in moments)

    @functools.cached_property
    def _noise_shares(self) -> Any:
        """b_t, what the noise adds to the debiased second moment on average, for each step t."""
        optimizer = self._optimizer
        plan, beta2 = optimizer.plan, optimizer.param_groups[0]["betas"][1]
        unit = plan.noise_stddevs().gradient_sum * plan.strategy.column_norm / plan.batch_size
        return unit**2 * second_moment_bias(plan.strategy, beta2=beta2)


def _quantiles(tensors: Iterable[Tensor], numel: int) -> list[float]:
    """Return quantiles of at most a million evenly spaced coordinates of `numel`; minimum and maximum are exact."""
    every, at = -(-numel // _MOST_SORTED), 0
    some, lows, highs = [], [], []
    # One tensor at a time, because a large model's scale is computed when it is read.
    for flat in (tensor.reshape(-1).float() for tensor in tensors if tensor.numel()):
        some.append(flat[-at % every :: every].clone())
        lows.append(flat.min())
        highs.append(flat.max())
        at += len(flat)
    inner = torch.quantile(torch.cat(some), torch.tensor(QUANTILES[1:-1], device=some[0].device))
    return [float(torch.stack(lows).min()), *inner.tolist(), float(torch.stack(highs).max())]
