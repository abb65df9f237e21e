"""The game: examples made to be noticed are in or out by a coin, and a whole private training runs over them.

Each canary has a coordinate of its own, along which its gradient is a million clip norms long: clipped, it moves the
release by exactly the clip norm there, which is the most that the guarantee allows. What is out is a blank, whose
gradient is zero; under replace neighbours it is the same canary, pointing the other way. Loader, engine, clipping,
noise and optimizer are the ones that train models; nothing is taken apart for the game.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpoptim.clipping import Released
from dpoptim.data import PrivateLoader, private_loader
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import Adjacency, PrivacyPlan

_RUN = "audit"
_LENGTH = 1e6  # of a canary's gradient, in clip norms

Floats = NDArray[np.float64]


class MakeOptimizer(Protocol):
    """Makes the optimizer whose releases are attacked; key and run make its noise, so that a game can be repeated."""

    def __call__(self, model: nn.Module, plan: PrivacyPlan, *, key: NoiseKey, run_id: str) -> PrivateOptimizer: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """What one game showed; a column a canary."""

    gradient: Floats  # [steps, canaries]: each step's release along it, of the sum, in clip norms
    square: Floats | None  # the same of the released square, as it is
    drawn: NDArray[np.bool_]  # [steps, canaries]: whether it was in the batch; an attack may not know it
    directions: Floats  # [canaries]: 1 for what is in; for what is out 0, or −1 where neighbours replace
    batches: list[NDArray[np.int64]]  # who was drawn at each step, of all examples

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
) -> Observed:
    """Train over a dataset of canaries and blanks as large as the plan says, in micro-batches; `steps` stop it early.

    Edge cases: of an order that is known (`Shuffled`), canaries stand where examples take part most often. One
    ValueError line where a release is not finite: the optimizer has diverged, and nothing can be judged.
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
        seen = _ends_to_end(released.gradient, optimizer.mechanism.scale) * (plan.batch_size / plan.clip_norm)
        if not np.isfinite(seen).all():
            raise ValueError(
                f"release {released.step + 1} of the training over canaries is not finite: the optimizer has diverged "
                "and nothing can be judged; audit a plan or variant that trains"
            )
        gradient[released.step] = seen
        if square is not None and released.square is not None:
            square[released.step] = _ends_to_end(released.square, None)

    optimizer.observers.append(observe)
    for rows, lengths in loader:
        (model(rows) * lengths).sum().backward()
        optimizer.step()
        if loader.step_ends:
            after_step()
            if loader.next_step == steps:
                break
    drawn = np.stack([_rows_drawn(batch, players.row, canaries) for batch in batches])
    return Observed(gradient=gradient, square=square, drawn=drawn, directions=directions, batches=batches)


def _ends_to_end(values: Mapping[str, Tensor], scale: Mapping[str, Tensor] | None) -> Floats:
    """What was released along each canary, in the coordinates in which it was clipped and noised."""
    parts = [value.double() if scale is None else value.double() * scale[name] for name, value in values.items()]
    return torch.cat([part[:-1, 0] for part in parts]).numpy()  # the last row of a table is for blanks


def _drawn_at(loader: PrivateLoader, step: int) -> NDArray[np.int64]:
    parts = [part for part, ticket in loader.physical_batches(step) if not ticket.is_placeholder]
    return np.array([index for part in parts for index in part], dtype=np.int64)


def _places(plan: PrivacyPlan, batches: list[NDArray[np.int64]], generator: np.random.Generator) -> NDArray[np.int64]:
    """Examples in the order in which they become canaries."""
    order = generator.permutation(plan.num_examples)
    if plan.sampling.is_random:  # who is drawn is secret, and nothing may be chosen by it
        return order
    often = np.bincount(np.concatenate(batches), minlength=len(order))
    return order[np.argsort(-often[order], kind="stable")]


def _rows_drawn(batch: NDArray[np.int64], row: Tensor, canaries: int) -> NDArray[np.bool_]:
    drawn = np.zeros(canaries + 1, dtype=np.bool_)
    drawn[row[torch.from_numpy(batch)].numpy()] = True
    return drawn[:-1]


class _Players:
    """Which coordinate an example touches, and how strongly; blanks touch one that is not trained."""

    def __init__(self, examples: int, canaries: int) -> None:
        self.row = torch.full((examples,), canaries)
        self.length = torch.zeros(examples)

    def batch(self, places: list[int]) -> tuple[Tensor, Tensor]:
        return self.row[places], self.length[places]


class _Coordinates(nn.Module):
    """A number a canary, in two tables, each with one more for those who are not in it, whose gradient is zero."""

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
