"""The game: a coin flip decides whether each canary is in, a whole private training runs, and an attack scores them.

Each canary has its own coordinate, along which its gradient is a million clip norms long. Clipped, it moves the release
by exactly the clip norm there, which is the most that the guarantee allows. If the plan protects users, a canary is a
user with several such records. A canary that is out is a blank with zero
gradient; under replace adjacency it is the same canary pointing the other way. Loader, engine, clipping, noise and
optimizer are the ones that train models.

In units of the clip norm, the releases along a canary's coordinate are y = x + std·κ·C⁻¹z. Here x is its direction at
the steps that drew it, and κ is the largest column norm of C. So w = Cy/(κ·std) contains unit normals, and a step that
draws the canary adds v = (its column of C)/(κ·std). A released square has the same form, with its own C, std and x.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import ndtri
from torch import Tensor, nn

from dpoptim.app.audit.statistics import Bools, Floats
from dpoptim.app.audit.training import BesideModel, Gradients, Training, distance, expected_gradients
from dpoptim.clipping import Released
from dpoptim.data import private_loader
from dpoptim.data.processes import check_alone
from dpoptim.noise import NoiseKey, Strategy
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import (
    Adjacency,
    CyclicPoisson,
    FixedClipNorm,
    GroupClipNorms,
    IndependentMoments,
    PrivacyPlan,
)

_RUN = "audit"
_LENGTH = 1e6  # of a canary's gradient, in clip norms
_MOST_RECORDS = 4  # of a user
_TABLES = ("first.weight", "second.weight")

MakeOptimizer = Callable[..., PrivateOptimizer]
"""Makes the optimizer to attack from (model, plan, key=, run_id=), which determine its noise."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GameResult:
    """What one game showed, with one column per canary."""

    gradient: Floats  # [steps, canaries]: the released sum along each canary, in clip norms
    square: Floats | None  # [steps, canaries]: the released square, if there is one
    drawn: Bools  # [steps, canaries]: whether it was in the batch, which an attack may not know
    directions: Floats  # [canaries]: 1 if it is in; if it is out, 0, or −1 under replace adjacency
    batches: list[NDArray[np.int64]]  # the examples or users drawn at each step
    distance: float | None  # of the first release from the model's gradients, taken one example at a time; if compared


def play(
    plan: PrivacyPlan,
    make_optimizer: MakeOptimizer,
    *,
    canaries: int,
    seed: int,
    steps: int | None = None,
    after_step: Callable[[], None] = lambda: None,
    training: Training | None = None,
    compare: bool = False,
) -> GameResult:
    """Train on canaries and blanks, one per example or user; the seed determines coins, batches and noise.

    With a `training`, canaries and blanks are its records, and its model is trained beside the canaries; `compare` its
    first release with its gradients, for which the plan should have hardly any noise.
    """
    check_alone("dpoptim audit")
    steps = plan.steps if steps is None else steps
    if isinstance(plan.clipping, GroupClipNorms):  # whose groups are of a different model
        plan = plan.replace(clipping=FixedClipNorm())
    secret = hashlib.sha256(f"dpoptim audit {seed}".encode())
    key, generator = NoiseKey.from_bytes(secret.digest()), np.random.default_rng(seed)
    owner: Any = np.arange(plan.num_examples)  # of each record
    users: Any = None
    if training is not None:
        owner, users = training.owners(plan), training.users
    elif plan.records_per_user is not None:  # one record, two, ..., four at most
        most = min(plan.records_per_user + 1, _MOST_RECORDS)
        owner = users = np.repeat(owner, 1 + owner % most)
    everyone: Any = range(len(owner))
    row = torch.full((plan.num_examples,), canaries)  # the coordinate that an example moves; blanks share the last
    length = torch.zeros(plan.num_examples)  # how far it moves it
    weight = torch.ones(plan.num_examples)  # of its loss, if a model is trained

    def collate(records: list[int]) -> Any:
        own = owner[records]
        return row[own], length[own], weight[own], None if training is None else training.batch(records)

    loader = private_loader(
        everyone,
        plan,
        users=users,
        key=key,
        run_id=_RUN,
        micro_batch_size=(None if training is None else training.micro_batch_size) or -(-2 * plan.batch_size // 3),
        collate_fn=collate,
        check_schema=False,
    )
    batches = []
    for step in range(steps):
        drawn_now = [np.zeros(0, dtype=np.int64)]
        for part, ticket in loader.physical_batches(step):
            if not ticket.is_placeholder:
                counts = np.array(ticket.rows_of_users or [1] * len(part))
                drawn_now.append(owner[part][np.cumsum(counts) - counts])  # whose the first row of each is
        batches.append(np.concatenate(drawn_now))
    places = _places(plan, [] if training is not None else batches, generator)[:canaries]
    included = generator.random(canaries) < 0.5
    replaces = plan.adjacency is Adjacency.REPLACE
    directions = np.where(included, 1.0, -1.0 if replaces else 0.0)
    row[places] = torch.arange(canaries)
    length[places] = torch.from_numpy(directions).float() * _LENGTH * plan.clip_norm
    model: Any = _Coordinates(canaries)
    expected: Gradients | None = None
    distances: list[float] = []
    if training is not None:
        model = BesideModel(training, model)
        if not replaces:
            weight[places] = torch.from_numpy(directions).float()
    optimizer = make_optimizer(model, plan, key=key, run_id=_RUN)
    if optimizer.plan.release != plan.release:
        raise ValueError(f"the optimizer releases {optimizer.plan.release}; audit its own plan, optimizer.plan")
    if training is not None and compare:
        plain = np.flatnonzero(~np.isin(owner, places) & np.isin(owner, batches[0]))
        expected = expected_gradients(model, training, plain, plan, optimizer.mechanism.scale)
    gradient = np.zeros((steps, canaries))
    square = np.zeros((steps, canaries)) if plan.noise_stddevs().square else None

    def observe(released: Released) -> None:
        clip_norm = plan.clip_norm * released.clip_factor
        seen = _along_canaries(released.gradient, optimizer.mechanism.scale) * (plan.batch_size / clip_norm)
        if not np.isfinite(seen).all():
            raise ValueError(f"the audit diverged at step {released.step + 1}; use a different plan or variant")
        if released.step == 0 and expected is not None:
            distances.append(distance(expected, released.gradient, plan, optimizer.mechanism.scale))
        gradient[released.step] = seen
        if square is not None and released.square is not None:
            square[released.step] = _along_canaries(released.square, None)

    optimizer.observers.append(observe)
    for rows, lengths, weights, batch in loader:
        if training is None:
            (model(rows) * lengths).sum().backward()
        else:
            where = model.canaries.first.weight.device
            moved, losses = model(rows.to(where), batch)
            (moved * lengths.to(where) + losses * weights.to(where)).sum().backward()
        optimizer.step()
        if loader.step_ends:
            after_step()
            if loader.next_step == steps:
                break
    drawn = np.stack([np.isin(places, batch) for batch in batches])
    if training is not None:
        optimizer.detach()
    return GameResult(
        gradient=gradient,
        square=square,
        drawn=drawn,
        directions=directions,
        batches=batches,
        distance=next(iter(distances), None),
    )


def _along_canaries(values: Mapping[str, Tensor], scale: Mapping[str, Tensor] | None) -> Floats:
    """The release along each canary, in the coordinates in which it was clipped and noised."""
    tables = [name for name in values if name in _TABLES or name.removeprefix("canaries.") in _TABLES]
    parts = [values[name].double() * (1.0 if scale is None else scale[name]) for name in tables]
    return torch.cat([part[:-1, 0] for part in parts]).cpu().numpy()  # the last row of each belongs to blanks


def _places(plan: PrivacyPlan, batches: list[NDArray[np.int64]], generator: np.random.Generator) -> NDArray[np.int64]:
    """Return the order in which examples become canaries: those drawn most often first, or any without batches."""
    order = generator.permutation(plan.num_examples)
    if plan.sampling.is_random or not batches:  # batches are secret, so they may not influence the choice
        return order
    often = np.bincount(np.concatenate(batches), minlength=len(order))
    return order[np.argsort(-often[order], kind="stable")]


class _Coordinates(nn.Module):
    """One number per canary, in two tables; each has one more row, with zero gradient, for all other examples."""

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self._in_first = (canaries + 1) // 2
        self._in_second = canaries - self._in_first
        self.first = nn.Embedding(self._in_first + 1, 1, padding_idx=self._in_first)
        self.second = nn.Embedding(self._in_second + 1, 1, padding_idx=self._in_second)

    def forward(self, rows: Tensor) -> Tensor:
        first = rows.clamp(max=self._in_first)
        second = torch.where(rows < self._in_first, self._in_second, rows - self._in_first)
        return cast(Tensor, self.first(first) + self.second(second)).squeeze(-1)


def whitening(strategy: Strategy, stddev: float) -> Any:
    """The matrix C/(κ·std), which is sparse if C is diagonal, because such a plan may have many steps."""
    if strategy.bands == 1:
        return sparse.diags_array(1.0 / (strategy.row_norms() * strategy.column_norm * stddev), format="csr")
    return np.asarray(strategy.strategy_matrix()) / (strategy.column_norm * stddev)


def whiten(matrix: Any, table: Floats) -> Floats:
    """Multiply values by step, [steps, canaries], by a whitening matrix; a game may have played fewer steps."""
    return np.asarray(matrix[: len(table), : len(table)] @ table)


def square_residuals(plan: PrivacyPlan, game: GameResult) -> Floats | None:
    """The residuals of the released square, or None if no square is noised."""
    stddev = plan.noise_stddevs().square
    if not stddev or game.square is None:
        return None
    release = plan.release
    of_average = isinstance(release, IndependentMoments) and release.squares == "of_average"
    # A canary that is drawn alone along its coordinate adds ζ²/B to an average of squares, (ζ/B)² to a squared average.
    one = plan.clip_norm**2 / (plan.batch_size**2 if of_average else plan.batch_size)
    matrix = whitening(plan.square_strategy, stddev)
    return whiten(matrix, game.square - game.drawn * game.directions**2 * one)


def scores(plan: PrivacyPlan, matrix: Any, game: GameResult, whitened: Floats) -> Floats:
    """ln P[w | in] − ln P[w | out] of each canary; where batches are secret, over all possible draws."""
    replaces = plan.adjacency is Adjacency.REPLACE
    if not plan.sampling.is_random:
        added = whiten(matrix, game.drawn.astype(np.float64))
        along = (whitened * added).sum(axis=0)
        return 2.0 * along if replaces else along - (added**2).sum(axis=0) / 2
    # Few canaries are drawn at a step, so the releases show the noise. If it is weak, a sharper attack fits.
    level = min(1.0, max(0.05, float(np.median(np.abs(whitened))) / float(ndtri(0.75))))
    along, squares = matrix.T @ whitened / level**2, (matrix**2).sum(axis=0)[:, None] / level**2
    terms = _log_mixture(plan.sampling_prob, along - squares / 2)
    if replaces:
        terms -= _log_mixture(plan.sampling_prob, -along - squares / 2)
    if isinstance(plan.sampling, CyclicPoisson):  # groups are not secret; a canary that is never drawn may be in any
        turns = np.arange(len(terms))[:, None] % plan.sampling.bands
        terms *= turns == game.drawn.argmax(axis=0) % plan.sampling.bands
    return np.asarray(terms.sum(axis=0))


def _log_mixture(rate: float, exponents: Floats) -> Floats:
    """ln(1 − q + q·e^x)."""
    if rate >= 1.0:
        return exponents
    return np.logaddexp(np.log1p(-rate), np.log(rate) + exponents)
