"""Measure on PUBLIC examples what the adviser otherwise assumes: length and spread of the averaged clipped gradient.

THE EXAMPLES MUST BE PUBLIC. No noise is added here. Advice based on private gradients would reveal them.

An average over n examples is longer than the mean gradient because of sampling: E‖g_n‖² = ‖μ‖² + tr V/n. Training
averages over B examples. So both parts are estimated, coordinate by coordinate, and recombined for B. With S_k the
clipped sum of the k-th batch of b_k examples and n = Σb_k,

    μ² ← ((ΣS_k)² − ΣS_k²) / (n² − Σb_k²),     v ← (ΣS_k² − Σb_k²·μ²) / n,     E g² at batch size B = μ² + v/B

These are unbiased, because products of different batches are. To see how μ² is spread, coordinates of similar v form
groups. In each group μ is taken as normal around 0 with the group's mean μ² as its variance, and every coordinate as
its posterior given ΣS_k/n. For large n that is the observation; for small n it is the prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpoptim.arguments import check_number
from dpoptim.clipping import clipped_sum
from dpoptim.noise.series import Series
from dpoptim.theory.adviser import GradientSignal

_PRIOR_GROUPS = 64
_GROUPS = 64
_MOST_COORDINATES = 2_000_000  # of a larger model, every k-th coordinate is used
_NODES = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))  # of a normal, exact to the fifth power


def measure_signal(
    model: nn.Module,
    loss_per_example: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    clip_norm: float,
    batch_size: float,
    progress: Callable[[int], None] | None = None,
) -> GradientSignal:
    """Measure the gradient signal at training batches of `batch_size`, from small batches of PUBLIC examples.

    Args:
        model: The model, used in its current mode. The `grad` of its parameters stays unchanged.
        loss_per_example: Called as `loss_per_example(model, batch)`; returns one loss per example.
        batches: At least two batches. More and smaller batches help: a few hundred examples in batches of 8, say.
        clip_norm: The clip norm of the training.
        batch_size: The batch size of the training.
        progress: Called with the number of examples so far.

    Returns:
        The signal. Coordinates that no public example touches (rows of an embedding) count as 0. A total below 0, which
        happens by chance, counts as v/B alone. Examples with non-finite gradients have weight 0.

    Guarantee:
        E‖g‖² is estimated without bias. Nothing here is private: the examples must be public.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> examples = torch.tensor([[3.0, 4.0, 0.0]]).repeat(8, 1)  # all equal: no sampling noise
    >>> signal = measure_signal(
    ...     model, lambda m, x: m(x)[:, 0], examples.split(2), clip_norm=1.0, batch_size=100
    ... )
    >>> round(signal.norm, 5), round(signal.agreement, 5), [round(norm, 3) for norm in signal.example_norms]
    (1.0, 1.0, [5.0, 5.0, 5.0])
    """
    check_number("clip_norm", clip_norm, above=0)
    check_number("batch_size", batch_size, low=1)
    total: Any = 0.0  # an array from the first batch on
    total_of_squares: Any = 0.0
    norms: list[Series] = []
    for batch in batches:
        sums, found = clipped_sum(model, loss_per_example, batch, clip_norm=clip_norm)
        flat = torch.cat([sums[name].detach().double().flatten().cpu() for name in sums]).numpy()
        total += flat
        total_of_squares += flat**2
        norms.append(found.detach().double().cpu().numpy())
        if progress is not None:
            progress(sum(len(one) for one in norms))
    if len(norms) < 2:
        raise ValueError(f"batches holds {len(norms)} batches. Pass at least two; they may be small.")
    sizes = np.asarray([len(one) for one in norms], dtype=np.float64)
    mean_squares, variances = split_moments(total, total_of_squares, sizes)
    count = float(sizes.sum())
    squares, weights = spread(total / count, mean_squares, variances, count=count, batch_size=batch_size)
    every = np.concatenate(norms)
    finite = every[np.isfinite(every)]
    if not len(finite):
        raise ValueError("batches: no example has a finite gradient. Check the model and its loss.")
    clipped = float(np.minimum(finite, clip_norm).mean())
    length = math.sqrt(float(np.dot(squares, weights)) * len(mean_squares))
    low, middle, high = (float(q) for q in np.quantile(finite, (0.1, 0.5, 0.9)))
    return GradientSignal(
        parameters=len(mean_squares),
        squares=tuple((squares / clip_norm**2).tolist()),
        weights=tuple(weights.tolist()),
        measured=True,
        examples=int(count),
        agreement=min(1.0, length / clipped) if clipped else 0.0,
        example_norms=(low, middle, high),
    )


def split_moments(total: Series, total_of_squares: Series, sizes: Series) -> tuple[Series, Series]:
    """Unbiased (μ², v) per coordinate from ΣS_k, ΣS_k² and the batch sizes; single values may be below 0."""
    count, own = float(sizes.sum()), float((sizes**2).sum())
    mean_squares = (total**2 - total_of_squares) / (count**2 - own)
    return mean_squares, (total_of_squares - own * mean_squares) / count


def spread(
    means: Series, mean_squares: Series, variances: Series, *, count: float, batch_size: float
) -> tuple[Series, Series]:
    """E g² at `batch_size` in groups of coordinates, and the weights of the groups; see the module."""
    chance = max(0.0, float(variances.mean())) / batch_size
    target = max(0.0, float(mean_squares.mean()))
    every = -(-len(means) // _MOST_COORDINATES)
    order = np.argsort(variances[::every], kind="stable")
    means, mean_squares, variances = (x[::every][order] for x in (means, mean_squares, variances))
    found: list[Series] = []
    shares: list[Series] = []
    for group in np.array_split(np.arange(len(means)), min(_PRIOR_GROUPS, len(means))):
        prior = max(0.0, float(mean_squares[group].mean()))
        v = np.maximum(variances[group], 0.0)
        error = v / count
        trust = np.where(error > 0, prior / np.maximum(prior + error, 1e-300), 1.0)
        for node, share in _NODES:
            found.append(np.stack([(trust * means[group] + node * np.sqrt(trust * error)) ** 2, v / batch_size]))
            shares.append(np.full(len(group), share))
    parts, weights = np.concatenate(found, axis=1), np.concatenate(shares) / len(means)
    scaled = [
        part * (wanted / have if (have := float(part @ weights)) else 0.0)
        for part, wanted in zip(parts, (target, chance), strict=True)
    ]
    return _grouped(scaled[0] + scaled[1], weights)


def _grouped(squares: Series, weights: Series) -> tuple[Series, Series]:
    """At most 64 groups, each at its mean: zeros, then the rest by size, finer at the top, which holds most of it."""
    order = np.argsort(squares, kind="stable")
    squares, weights = squares[order], weights[order]
    upto = np.cumsum(np.where(squares > 0, weights, 0.0))
    edges = np.concatenate([np.linspace(0, 0.99, _GROUPS - 9, endpoint=False), 1 - np.geomspace(1e-2, 1e-5, 8)])
    groups = np.searchsorted(edges, upto / max(upto[-1], 1e-300) - 1e-12, side="right")
    groups = np.where(squares > 0, np.maximum(groups, 1), 0)
    size = np.bincount(groups, weights=weights, minlength=_GROUPS)
    total = np.bincount(groups, weights=weights * squares, minlength=_GROUPS)
    full = size > 0
    return np.asarray(total[full] / size[full]), np.asarray(size[full] / size.sum())
