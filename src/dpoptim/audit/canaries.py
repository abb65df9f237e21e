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
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpoptim.gradients import Released
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import Adjacency, PrivacyPlan, PrivateLoader, private_loader


class MakeOptimizer(Protocol):
    """Makes the optimizer whose releases are attacked; key and run make its noise, so that a game can be repeated."""

    def __call__(self, model: nn.Module, plan: PrivacyPlan, *, key: NoiseKey, run_id: str) -> PrivateOptimizer: ...


_RUN = "audit"
_LENGTH = 1e6  # of a canary's gradient, in clip norms


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """What one game showed, a column a canary."""

    values: NDArray[np.float32]  # [steps, canaries]: each step's release along it, of the sum, in clip norms
    drawn: NDArray[np.bool_]  # [steps, canaries]: whether it was in the batch; an attack may not know it
    included: NDArray[np.bool_]  # [canaries]: the coins


def play(
    plan: PrivacyPlan,
    make_optimizer: MakeOptimizer,
    *,
    canaries: int,
    seed: int,
    after_step: Callable[[], None] = lambda: None,
) -> Observed:
    """Train once over a dataset of canaries and blanks as large as the plan says.

    Edge cases: of an order that is known (`Shuffled`), canaries stand where examples take part most often.
    """
    secret = hashlib.sha256(f"dpoptim audit {seed}".encode())
    key, generator = NoiseKey.from_bytes(secret.digest()), np.random.default_rng(seed)
    dataset = _Canaries(plan.num_examples, blank=canaries)
    places: Any = range(plan.num_examples)
    loader = private_loader(places, plan, key=key, run_id=_RUN, collate_fn=dataset.batch, check_forms=False)
    drawn = _places(loader, generator, canaries, dataset)
    included = generator.random(canaries) < 0.5
    dataset.length[dataset.places] = torch.from_numpy(_directions(plan, included)).float() * _LENGTH * plan.clip_norm

    model = _Coordinates(canaries)
    optimizer = make_optimizer(model, plan, key=key, run_id=_RUN)
    values = np.zeros((plan.steps, canaries), dtype=np.float32)

    def observe(released: Released) -> None:
        values[released.step] = _in_clip_norms(released, optimizer.release.scale, plan)[:canaries]

    optimizer.observers.append(observe)
    for rows, lengths in loader:
        (model(rows) * lengths).sum().backward()
        optimizer.step()
        after_step()
    return Observed(values=values, drawn=drawn, included=included)


def _directions(plan: PrivacyPlan, included: NDArray[np.bool_]) -> NDArray[np.float64]:
    """1 for what is in; for what is out 0, or −1 where neighbours replace."""
    out = -1.0 if plan.adjacency is Adjacency.REPLACE else 0.0
    return np.where(included, 1.0, out)


def _in_clip_norms(released: Released, scale: Mapping[str, Tensor] | None, plan: PrivacyPlan) -> NDArray[np.float32]:
    """The released sum as it was clipped and noised: scaled, in clip norms."""
    (name, average), *_ = released.gradient.items()
    if scale is not None:
        average = average * scale[name]
    return (average.double() * (plan.batch_size / plan.clip_norm)).reshape(-1).float().numpy()


def _places(
    loader: PrivateLoader, generator: np.random.Generator, canaries: int, dataset: _Canaries
) -> NDArray[np.bool_]:
    """Give places in the dataset to the canaries; which steps draw which canary."""
    steps = [_drawn_at(loader, step) for step in range(loader.plan.steps)]
    order = generator.permutation(loader.plan.num_examples)
    if not loader.plan.sampling.is_random:
        often = np.bincount(np.concatenate(steps), minlength=len(order))
        order = order[np.argsort(-often[order], kind="stable")]
    dataset.places = torch.from_numpy(order[:canaries].copy())
    dataset.row[dataset.places] = torch.arange(canaries)
    drawn = np.zeros((loader.plan.steps, canaries + 1), dtype=np.bool_)
    for step, indices in enumerate(steps):
        drawn[step, dataset.row[torch.from_numpy(indices)].numpy()] = True
    return drawn[:, :-1]


def _drawn_at(loader: PrivateLoader, step: int) -> NDArray[np.int64]:
    parts = [part for part, ticket in loader.physical_batches(step) if not ticket.is_placeholder]
    return np.array([index for part in parts for index in part], dtype=np.int64)


class _Canaries:
    """Which row of the model an example touches, and how strongly; blanks touch a row that is not trained."""

    def __init__(self, examples: int, *, blank: int) -> None:
        self.row = torch.full((examples,), blank)
        self.length = torch.zeros(examples)
        self.places = torch.zeros(0, dtype=torch.int64)

    def batch(self, places: list[int]) -> tuple[Tensor, Tensor]:
        return self.row[places], self.length[places]


class _Coordinates(nn.Module):
    """One number a canary, and one for blanks, whose gradient is zero."""

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(canaries + 1, 1, padding_idx=canaries)

    def forward(self, rows: Tensor) -> Tensor:
        return self.rows(rows).squeeze(-1)
