"""The game: a coin flip decides whether each canary is in, a whole private training runs, and an attack scores them.

Each canary has its own coordinate, along which its gradient is a million clip norms long. Clipped, it moves the release
by exactly the clip norm there, which is the most that the guarantee allows. A canary that is out is a blank with zero
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
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpoptim.clipping import Released
from dpoptim.data import PrivateLoader, private_loader
from dpoptim.noise import Independent, NoiseKey, Strategy
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import Adjacency, CyclicPoisson, IndependentMoments, PrivacyPlan

_RUN = "audit"
_LENGTH = 1e6  # of a canary's gradient, in clip norms

Floats = NDArray[np.float64]


class MakeOptimizer(Protocol):
    """Makes the optimizer to attack; its noise comes from key and run, so that a game can be repeated."""

    def __call__(self, model: nn.Module, plan: PrivacyPlan, *, key: NoiseKey, run_id: str) -> PrivateOptimizer: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class GameResult:
    """What one game showed, with one column per canary."""

    gradient: Floats  # [steps, canaries]: the released sum along each canary, in clip norms
    square: Floats | None  # [steps, canaries]: the released square, if there is one
    drawn: NDArray[np.bool_]  # [steps, canaries]: whether it was in the batch, which an attack may not know
    directions: Floats  # [canaries]: 1 if it is in; if it is out, 0, or −1 under replace adjacency
    batches: list[NDArray[np.int64]]  # the examples drawn at each step

    @property
    def included(self) -> NDArray[np.bool_]:
        """The coins."""
        return self.directions > 0


def play(
    plan: PrivacyPlan,
    make_optimizer: MakeOptimizer,
    *,
    canaries: int,
    seed: int,
    steps: int | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> GameResult:
    """Train, in micro-batches, over a dataset of canaries and blanks that is as large as the plan says.

    The seed determines coins, batches and noise. Under a known order (`Shuffled`), canaries take the places that are
    drawn most often.
    """
    steps = plan.steps if steps is None else steps
    secret = hashlib.sha256(f"dpoptim audit {seed}".encode())
    key, generator = NoiseKey.from_bytes(secret.digest()), np.random.default_rng(seed)
    everyone: Any = range(plan.num_examples)
    players = _Players(plan.num_examples, canaries)
    loader = private_loader(
        everyone,
        plan,
        key=key,
        run_id=_RUN,
        micro_batch_size=-(-2 * plan.batch_size // 3),
        collate_fn=players.batch,
        check_schema=False,
    )
    batches = [_drawn_at(loader, step) for step in range(steps)]
    places = _places(plan, batches, generator)[:canaries]
    included = generator.random(canaries) < 0.5
    directions = np.where(included, 1.0, -1.0 if plan.adjacency is Adjacency.REPLACE else 0.0)
    players.row[places] = torch.arange(canaries)
    players.length[places] = torch.from_numpy(directions).float() * _LENGTH * plan.clip_norm
    model = _Coordinates(canaries)
    optimizer = make_optimizer(model, plan, key=key, run_id=_RUN)
    gradient = np.zeros((steps, canaries))
    square = np.zeros((steps, canaries)) if plan.noise_stddevs().square else None

    def observe(released: Released) -> None:
        seen = _along_canaries(released.gradient, optimizer.mechanism.scale) * (plan.batch_size / plan.clip_norm)
        if not np.isfinite(seen).all():
            raise ValueError(
                f"release {released.step + 1} of the training over canaries is not finite: the optimizer diverged. "
                "Audit a plan or variant that trains"
            )
        gradient[released.step] = seen
        if square is not None and released.square is not None:
            square[released.step] = _along_canaries(released.square, None)

    optimizer.observers.append(observe)
    for rows, lengths in loader:
        (model(rows) * lengths).sum().backward()
        optimizer.step()
        if loader.step_ends:
            after_step()
            if loader.next_step == steps:
                break
    drawn = np.stack([_rows_drawn(batch, players.row, canaries) for batch in batches])
    return GameResult(gradient=gradient, square=square, drawn=drawn, directions=directions, batches=batches)


def _along_canaries(values: Mapping[str, Tensor], scale: Mapping[str, Tensor] | None) -> Floats:
    """The release along each canary, in the coordinates in which it was clipped and noised."""
    parts = [value.double() if scale is None else value.double() * scale[name] for name, value in values.items()]
    return torch.cat([part[:-1, 0] for part in parts]).numpy()  # the last row of each table belongs to blanks


def _drawn_at(loader: PrivateLoader, step: int) -> NDArray[np.int64]:
    parts = [part for part, ticket in loader.physical_batches(step) if not ticket.is_placeholder]
    return np.array([index for part in parts for index in part], dtype=np.int64)


def _places(plan: PrivacyPlan, batches: list[NDArray[np.int64]], generator: np.random.Generator) -> NDArray[np.int64]:
    """Examples in the order in which they become canaries."""
    order = generator.permutation(plan.num_examples)
    if plan.sampling.is_random:  # batches are secret, so they may not influence the choice
        return order
    often = np.bincount(np.concatenate(batches), minlength=len(order))
    return order[np.argsort(-often[order], kind="stable")]


def _rows_drawn(batch: NDArray[np.int64], row: Tensor, canaries: int) -> NDArray[np.bool_]:
    drawn = np.zeros(canaries + 1, dtype=np.bool_)
    drawn[row[torch.from_numpy(batch)].numpy()] = True
    return drawn[:-1]


class _Players:
    """Which coordinate each example moves, and how far; blanks move one that is not trained."""

    def __init__(self, examples: int, canaries: int) -> None:
        self.row = torch.full((examples,), canaries)
        self.length = torch.zeros(examples)

    def batch(self, places: list[int]) -> tuple[Tensor, Tensor]:
        return self.row[places], self.length[places]


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


class Whitening:
    """Multiplies by C/(κ·std)."""

    def __init__(self, strategy: Strategy, stddev: float, *, is_identity: bool) -> None:
        self._matrix = None if is_identity else np.asarray(strategy.strategy_matrix()) / (strategy.column_norm * stddev)
        self._number = 1.0 / stddev

    def __call__(self, table: Floats) -> Floats:
        """Whiten values by step, [steps, canaries]."""
        return self._number * table if self._matrix is None else self._matrix[: len(table), : len(table)] @ table

    def along_columns(self, whitened: Floats) -> Floats:
        """v·w for each step's v, [steps, canaries]."""
        return self._number * whitened if self._matrix is None else self._matrix.T @ whitened

    @property
    def squared_columns(self) -> Floats:
        """‖v‖² of each step, [steps, 1], or one number if all are equal."""
        if self._matrix is None:
            return np.array(self._number**2)
        return np.asarray((self._matrix**2).sum(axis=0)[:, None])


def gradient_whitening(plan: PrivacyPlan) -> Whitening:
    """The whitening of the released gradients."""
    level = plan.noise_stddevs().gradient_sum / plan.clip_norm
    return Whitening(plan.strategy, level, is_identity=isinstance(plan.noise, Independent))


class Whitened(NamedTuple):
    """The releases of the gradient, and what canaries should add to them, both whitened, [steps, canaries]."""

    released: Floats
    expected: Floats

    @property
    def residuals(self) -> Floats:
        """Unit normals, if clipping and noise follow the plan."""
        return self.released - self.expected


def whitened_gradient(whitening: Whitening, game: GameResult) -> Whitened:
    """Whiten the game's gradients."""
    return Whitened(whitening(game.gradient), whitening(game.drawn * game.directions))


def square_residuals(plan: PrivacyPlan, game: GameResult) -> Floats | None:
    """The residuals of the released square, or None if no square is noised.

    A canary that is drawn alone along its coordinate adds ζ²/B to an average of squares, (ζ/B)² to a squared average.
    """
    stddev = plan.noise_stddevs().square
    if not stddev or game.square is None:
        return None
    release = plan.release
    of_average = isinstance(release, IndependentMoments) and release.squares == "of_average"
    one = plan.clip_norm**2 / (plan.batch_size**2 if of_average else plan.batch_size)
    noise = release.square_noise if isinstance(release, IndependentMoments) else None
    is_identity = isinstance(plan.noise if noise is None else noise, Independent)
    whitening = Whitening(plan.square_strategy, stddev, is_identity=is_identity)
    return whitening(game.square - game.drawn * game.directions**2 * one)


def scores(plan: PrivacyPlan, whitening: Whitening, game: GameResult, whitened: Floats) -> Floats:
    """ln P[w | in] − ln P[w | out] of each canary; where batches are secret, over all possible draws."""
    replaces = plan.adjacency is Adjacency.REPLACE
    if not plan.sampling.is_random:
        added = whitening(game.drawn.astype(np.float64))
        along = (whitened * added).sum(axis=0)
        return 2.0 * along if replaces else along - (added**2).sum(axis=0) / 2
    along, squares = whitening.along_columns(whitened), whitening.squared_columns
    terms = _log_mixture(plan.sampling_prob, along - squares / 2)
    if replaces:
        terms -= _log_mixture(plan.sampling_prob, -along - squares / 2)
    return np.asarray(np.where(_may_be_drawn(plan, game.drawn), terms, 0.0).sum(axis=0))


def _log_mixture(rate: float, exponents: Floats) -> Floats:
    """ln(1 − q + q·e^x)."""
    if rate >= 1.0:
        return exponents
    return np.logaddexp(np.log1p(-rate), np.log(rate) + exponents)


def _may_be_drawn(plan: PrivacyPlan, drawn: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The steps of a canary's group, which is not secret; if it is never drawn, any group will do."""
    if not isinstance(plan.sampling, CyclicPoisson):
        return np.ones_like(drawn)
    groups = drawn.argmax(axis=0) % plan.sampling.bands
    return np.asarray((np.arange(len(drawn)) % plan.sampling.bands)[:, None] == groups)
