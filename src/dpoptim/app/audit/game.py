"""The game: a coin flip decides whether each canary is in, and a whole private training runs with or without it.

Each canary has its own coordinate, along which its gradient is a million clip norms long. Clipped, it moves the release
by exactly the clip norm there, which is the most that the guarantee allows. If the plan protects users, a canary is a
user with all records. A canary that is out is a blank with zero gradient; under replace adjacency it is the same canary
pointing the other way. Loader, engine, clipping, noise and optimizer are the ones that train models.

A `Game` flips the coins and reads the releases. The loop in between is a function of the game: one of the audit's own,
over canaries alone or beside a model, or the user's.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.app.audit.statistics import Bools, Floats
from dpoptim.clipping import Released
from dpoptim.data import PrivateLoader, private_loader
from dpoptim.data.processes import check_alone
from dpoptim.data.secret_randomness import generator_states
from dpoptim.data.users import UserRecords, read_user_ids
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import Adjacency, FixedClipNorm, GroupClipNorms, PrivacyPlan

_RUN = "audit"
_LENGTH = 1e6  # of a canary's gradient, in clip norms
_MOST_RECORDS = 4  # of a user, in a game of canaries alone
_TABLES = ("first.weight", "second.weight")

MakeOptimizer = Callable[..., PrivateOptimizer]
"""Makes the optimizer to attack from (model, plan, key=, run_id=), which determine its noise."""


Scale = Mapping[str, Tensor] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class GameResult:
    """What one game showed, with one column per canary."""

    gradient: Floats  # [steps, canaries]: the released sum along each canary, in clip norms
    square: Floats | None  # [steps, canaries]: the released square, if there is one
    drawn: Bools  # [steps, canaries]: whether it was in the batch, which an attack may not know
    directions: Floats  # [canaries]: 1 if it is in; if it is out, 0, or −1 under replace adjacency
    batches: list[NDArray[np.int64]]  # the examples or users drawn at each step


class Game:
    """One game, as a training loop sees it; `dpoptim.app.audit.audit_loop` plays it.

    Attributes:
        plan: The plan of this game.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        *,
        canaries: int,
        seed: int,
        steps: int | None = None,
        observe: Callable[[Released, Scale], None] = lambda released, scale: None,
        one_by_one: bool = False,
    ) -> None:
        """The seed determines coins, batches and noise; `one_by_one` differentiates each example or user by itself.

        `observe` is called with each release and the scale at which it was clipped.
        """
        check_alone("dpoptim audit")
        if isinstance(plan.clipping, GroupClipNorms):  # whose groups are of a different model
            plan = plan.replace(clipping=FixedClipNorm())
        self.plan = plan
        self.draws_random_numbers = False  # whether the first batch or its loss did
        self._canaries, self._steps, self._keep = canaries, plan.steps if steps is None else steps, observe
        secret = hashlib.sha256(f"dpoptim audit {seed}".encode())
        self._key, self._coins = NoiseKey.from_bytes(secret.digest()), np.random.default_rng(seed)
        self._one_by_one = one_by_one
        self._loader: PrivateLoader | None = None
        self._optimizer: PrivateOptimizer | None = None
        self._parts: list[NDArray[np.int64]] = []  # the example or user of each row, for each physical batch
        self._part = 0  # the place of the current one
        self._is_in_step = self._is_inserted = False
        self._moved: Tensor | None = None  # the canaries' numbers, from the last call of the model
        self._begun: dict[str, bytes] = {}  # the states of random generators before the first batch
        self._gradient = np.zeros((self._steps, canaries))
        self._square = np.zeros((self._steps, canaries)) if plan.noise_stddevs().square else None
        self._made = 0  # steps

    # -- what a loop calls -----------------------------------------------------------------------------------------

    def private_loader(self, dataset: Any, *, users: Any = None, **options: Any) -> PrivateLoader:
        """Make the loader of the training records: `dpoptim.private_loader` with the game's plan and key.

        Args:
            dataset: As in `dpoptim.private_loader`.
            users: As in `dpoptim.private_loader`.
            options: As in `dpoptim.private_loader`.
        """
        if self._steps == 1:
            options["num_workers"] = 0  # so that random numbers of a collator are seen to be drawn
        if self._one_by_one:
            options = {**options, "micro_batch_size": 1, "lengths": None, "micro_batch_tokens": None}
        users = None if users is None else read_user_ids(dataset, users)
        loader = private_loader(dataset, self.plan, users=users, key=self._key, run_id=_RUN, **options)
        self._owner = np.arange(len(dataset)) if users is None else UserRecords(users).user_of
        if (units := int(self._owner.max()) + 1) != self.plan.num_examples:
            raise ValueError(f"Expected the {self.plan.num_examples:,} {self.plan.unit}s of the plan, got {units:,}.")
        self._batches, self._parts = [], []
        for step in range(self._steps):
            drawn_now = [np.zeros(0, dtype=np.int64)]
            for part, ticket in loader.physical_batches(step):
                self._parts.append(self._owner[part])
                if not ticket.is_placeholder:
                    counts = np.array(ticket.rows_of_users or [1] * len(part))
                    drawn_now.append(self._owner[part][np.cumsum(counts) - counts])  # whose the first row of each is
            self._batches.append(np.concatenate(drawn_now))
        self._loader = loader
        return loader

    def model(self, model: nn.Module | None) -> nn.Module:
        """Put one number per canary beside the model; call what this returns, and hand it to `game.optimizer`."""
        return BesideCanaries(self, model, self._canaries)

    def optimizer(self, make: MakeOptimizer, model: nn.Module, *args: Any, **options: Any) -> PrivateOptimizer:
        """Make the optimizer with the game's plan and key.

        Args:
            make: One of dpoptim's optimizers, such as `dpoptim.scale_then_privatize`.
            model: What `game.model` returned.
            args: More arguments of the optimizer, such as the learning rate.
            options: More keyword arguments of the optimizer.
        """
        if not isinstance(model, BesideCanaries):
            raise ValueError(f"Expected what game.model returned, got {type(model).__name__}. Call game.model first.")
        if self._loader is None:
            raise ValueError("game.optimizer was called before game.private_loader. Make the loader first.")
        if options.get("param_groups") is not None:
            tables = [*model.first.parameters(), *model.second.parameters()]
            options["param_groups"] = [*options["param_groups"], {"params": tables}]
        optimizer = make(model, self.plan, *args, key=self._key, run_id=_RUN, **options)
        if optimizer.plan.release != self.plan.release:
            release = optimizer.plan.release
            raise ValueError(f"the optimizer releases {release}; audit its own plan, plan.with_release({release})")
        self._flip_coins(is_alone=model.model is None)
        optimizer.observers.append(self._observe)
        optimizer.register_step_pre_hook(self._begin_step)
        optimizer.register_step_post_hook(self._end_step)
        self._optimizer, self._begun = optimizer, generator_states()
        return optimizer

    def insert(self, losses: Tensor) -> Tensor:
        """Insert the canaries of the batch into its losses; differentiate the sum of the result.

        Args:
            losses: One loss per example of the batch, or per record if the plan protects users.
        """
        if self._optimizer is None:
            raise ValueError(
                "the optimizer does not belong to the game. Make it with game.optimizer(make, model, ...)."
            )
        rows = self._current_rows()
        if rows is None or self._moved is None:
            raise ValueError("game.insert was called without the model. Call what game.model returned for each batch.")
        if losses.shape != rows.shape:
            raise ValueError(
                f"Expected game.insert(losses) to get one value per example, [{len(rows)}], got {list(losses.shape)}. "
                "Insert canaries before losses are reduced."
            )
        if self._part == 0:
            self.draws_random_numbers = generator_states() != self._begun
        moved, self._moved, self._is_inserted = self._moved, None, True
        lengths, weights = (values[rows].to(losses.device) for values in (self._lengths, self._weights))
        return moved.to(losses.device) * lengths + losses * weights

    # -- coins and releases ----------------------------------------------------------------------------------------

    def play(self, train: Callable[[Game], Any]) -> GameResult:
        """Run the loop; it is interrupted after the game's steps if the plan has more."""
        with contextlib.suppress(_Enough):
            train(self)
        if self._made < self._steps:
            raise ValueError(
                f"Expected {self._steps:,} steps of training, got {self._made:,}. Loop over the whole "
                "loader, and call step() of the optimizer that game.optimizer made."
            )
        assert self._optimizer is not None
        self._optimizer.detach()
        self._optimizer = None  # nothing else holds it, so its memory is freed
        return GameResult(
            gradient=self._gradient,
            square=self._square,
            drawn=np.stack([np.isin(self._places, batch) for batch in self._batches]),
            directions=self._directions,
            batches=self._batches,
        )

    def _flip_coins(self, *, is_alone: bool) -> None:
        """Choose the canaries, and which of them are in."""
        count, examples = self._canaries, self.plan.num_examples
        self._places = _places(self.plan, self._batches if is_alone else [], self._coins)[:count]
        replaces = self.plan.adjacency is Adjacency.REPLACE
        self._directions = np.where(self._coins.random(count) < 0.5, 1.0, -1.0 if replaces else 0.0)
        self._rows = torch.full((examples,), count)  # the coordinate that an example moves; blanks share the last
        self._lengths = torch.zeros(examples)  # how far it moves it
        self._weights = torch.ones(examples)  # of its loss
        self._rows[self._places] = torch.arange(count)
        self._lengths[self._places] = torch.from_numpy(self._directions).float() * _LENGTH * self.plan.clip_norm
        if not replaces:
            self._weights[self._places] = torch.from_numpy(self._directions).float()

    def _current_rows(self) -> NDArray[np.int64] | None:
        """The example or user of each row of the current batch; None outside of batches."""
        if self._optimizer is None or self._is_in_step:
            return None
        if self._loader is None or not self._loader.generation or self._part >= len(self._parts):
            raise ValueError("the batch is not from the game's loader. Loop over what game.private_loader returned.")
        return self._parts[self._part]

    def _coordinates(self) -> Tensor | None:
        """The coordinate that each row of the current batch moves; None outside of batches, as for public data."""
        rows = self._current_rows()
        return None if rows is None else self._rows[rows]

    def plain_records(self) -> NDArray[np.int64]:
        """The records in the first batch that belong to no canary."""
        return np.flatnonzero(~np.isin(self._owner, self._places) & np.isin(self._owner, self._batches[0]))

    def _begin_step(self, *_: Any) -> None:
        if not self._is_inserted:
            raise ValueError("a batch has no canaries. Differentiate game.insert(losses).sum() before each step().")
        self._is_in_step = True

    def _end_step(self, *_: Any) -> None:
        self._is_in_step = self._is_inserted = False
        self._part += 1

    def _observe(self, released: Released) -> None:
        assert self._optimizer is not None
        clip_norm = self.plan.clip_norm * released.clip_factor
        scale = self._optimizer.mechanism.scale
        seen = _along_canaries(released.gradient, scale) * (self.plan.batch_size / clip_norm)
        if not np.isfinite(seen).all():
            raise ValueError(f"the audit diverged at step {released.step + 1}; use a different plan or variant")
        self._gradient[released.step] = seen
        if self._square is not None and released.square is not None:
            self._square[released.step] = _along_canaries(released.square, None)
        self._made = released.step + 1
        self._keep(released, scale)
        if self._made == self._steps < self.plan.steps:
            raise _Enough


class _Enough(BaseException):
    """Ends a loop after the steps that a game needs; a loop may catch every Exception."""


class BesideCanaries(nn.Module):
    """One number per canary, in two tables, beside a model; the last row of each belongs to all other examples.

    Calling it calls the model. Both run in one call, so that examples are seen not to mix.
    """

    def __init__(self, game: Game, model: nn.Module | None, canaries: int) -> None:
        super().__init__()
        self._game = game
        self._in_first = (canaries + 1) // 2
        self._in_second = canaries - self._in_first
        parameter = None if model is None else next(model.parameters(), None)
        device = None if parameter is None else parameter.device
        self.first = nn.Embedding(self._in_first + 1, 1, padding_idx=self._in_first, device=device)
        self.second = nn.Embedding(self._in_second + 1, 1, padding_idx=self._in_second, device=device)
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = self._game._coordinates() if torch.is_grad_enabled() else None
        if rows is None and self.model is not None:
            return self.model(*args, **kwargs)
        assert rows is not None
        sizes = {leaf.shape[0] for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim}
        if sizes and len(rows) not in sizes:
            found = f"the batch has {len(rows)} examples, but the model was called with {max(sizes)}"
            raise ValueError(f"{found}. Call it once per batch, and with other data under torch.no_grad().")
        self._game._moved, output = super().__call__(rows.to(self.first.weight.device), args, kwargs)
        return output

    def forward(self, rows: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        first = rows.clamp(max=self._in_first)
        second = torch.where(rows < self._in_first, self._in_second, rows - self._in_first)
        moved = (self.first(first) + self.second(second)).squeeze(-1)
        return moved, None if self.model is None else self.model(*args, **kwargs)


def canaries_alone(plan: PrivacyPlan, make_optimizer: MakeOptimizer) -> Callable[[Game], None]:
    """A loop over canaries and blanks, one per example or user, without a model."""
    owner: Any = np.arange(plan.num_examples)  # of each record
    users = None
    if plan.records_per_user is not None:  # one record, two, ..., four at most
        most = min(plan.records_per_user + 1, _MOST_RECORDS)
        owner = users = np.repeat(owner, 1 + owner % most)
    everyone: Any = range(len(owner))

    def train(game: Game) -> None:
        size = -(-2 * plan.batch_size // 3)
        loader = game.private_loader(
            everyone, users=users, micro_batch_size=size, collate_fn=torch.tensor, check_schema=False
        )
        model = game.model(None)
        optimizer = game.optimizer(make_optimizer, model)
        for records in loader:
            model()
            game.insert(torch.zeros(len(records))).sum().backward()
            optimizer.step()

    return train


def _along_canaries(values: Mapping[str, Tensor], scale: Scale) -> Floats:
    """The release along each canary, in the coordinates in which it was clipped and noised."""
    parts = [values[name].double() * (1.0 if scale is None else scale[name]) for name in _TABLES if name in values]
    return torch.cat([part[:-1, 0] for part in parts]).cpu().numpy()  # the last row of each belongs to blanks


def _places(plan: PrivacyPlan, batches: list[NDArray[np.int64]], generator: np.random.Generator) -> NDArray[np.int64]:
    """Return the order in which examples become canaries: those drawn most often first, or any without batches."""
    order = generator.permutation(plan.num_examples)
    if plan.sampling.is_random or not batches:  # batches are secret, so they may not influence the choice
        return order
    often = np.bincount(np.concatenate(batches), minlength=len(order))
    return order[np.argsort(-often[order], kind="stable")]
