"""What is to be compared: a recipe, variants, seeds, a grid to choose from, and what the choosing costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dpoptim.app.comparison.grids import NON_PRIVATE, Setting, check_variant, grid_of, points, with_setting
from dpoptim.app.recipes.recipe import VARIANTS, Recipe, read_toml, whole_path, yes_or_no
from dpoptim.app.runs.shared_records import same_source

METRICS = ("loss", "accuracy")
PUBLIC, UNCOVERED = "public", "none"
_KEYS = (
    "variants", "seeds", "grid", "budget_for_tuning", "tuning_data", "tuning_steps", "references", "metric",
)  # fmt: skip
_MOST_SEEDS = 1000

LOOSE = ("device", "micro_batch_size", "micro_batch_tokens", "checkpoint_every", "log_every")
"""Settings of a recipe that change neither what is released nor what is compared."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Several variants at one (ε, δ), each with every seed, each at its best setting of the grid.

    `budget_for_tuning` is an ε that all trials of a variant together cost, "public" (trials run on `tuning_data`, which
    is not private, and cost nothing) or "none" (trials run on the private records beside the budget, which ε of a run
    then does NOT cover). `tuning_steps` makes trials shorter than runs. `references` adds the model before training
    and one that is trained without privacy. `metric` is what settings and variants are ranked by.

    Guarantee: a grid with something to choose needs an explicit `budget_for_tuning`.

    >>> recipe = Recipe(model="mlp", data="a.csv", epsilon=1.0)
    >>> Request(recipe=recipe, variants=("dp_sgd",), seeds=(0,), grid={"learning_rate": [0.1, 1]})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: budget_for_tuning is not given, and there are 2 settings of dp_sgd to choose from; give the epsilon ...
    """

    recipe: Recipe
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    grid: Mapping[str, Any] = field(default_factory=dict)
    budget_for_tuning: float | str | None = None
    tuning_data: str | None = None
    tuning_steps: int | None = None
    references: bool = False
    metric: str = "loss"

    def __post_init__(self) -> None:
        if not self.variants:
            raise ValueError(f"variants is empty; name some of {', '.join(VARIANTS)}")
        for name in self.variants:
            check_variant(name)
        for name, values in (("variants", self.variants), ("seeds", self.seeds)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name}={list(values)} has one twice; leave it out")
        if not self.seeds:
            raise ValueError("seeds is empty; give at least one, and three or more for an interval")
        if self.metric not in METRICS:
            raise ValueError(f"metric={self.metric!r} must be one of {', '.join(METRICS)}")
        if self.tuning_steps is not None and not _is_whole(self.tuning_steps, 1):
            raise ValueError(f"tuning_steps={self.tuning_steps!r} must be a whole number, 1 or more")
        for name in self.grid:
            if isinstance(self.grid[name], Mapping) and name not in (*VARIANTS, NON_PRIVATE):
                check_variant(name, what="grid")
        self._check_tuning()
        for variant in self.rows:
            for setting in self.points(variant):
                with_setting(self.recipe, variant, setting)  # which refuses values out of range

    def _check_tuning(self) -> None:
        budget = self.budget_for_tuning
        number = isinstance(budget, int | float) and not isinstance(budget, bool)
        if number and not 0 < float(budget or 0) < math.inf:
            raise ValueError(f"budget_for_tuning={budget!r} must be a finite epsilon above 0")
        if not number and budget not in (None, PUBLIC, UNCOVERED):
            raise ValueError(f'budget_for_tuning={budget!r} must be an epsilon, "{PUBLIC}" or "{UNCOVERED}"')
        if (budget == PUBLIC) != (self.tuning_data is not None):
            raise ValueError(
                f'budget_for_tuning={budget!r} and tuning_data={self.tuning_data!r}: "{PUBLIC}" goes with a file of '
                "records that are not private, and the file with it alone"
            )
        private = (self.recipe.data, self.recipe.validation_data)
        if self.tuning_data is not None and any(name and same_source(self.tuning_data, name) for name in private):
            raise ValueError(f"tuning_data={self.tuning_data!r} is the private data itself; give public records")
        largest = max(self.variants, key=lambda variant: len(self.points(variant)))
        if budget is None and len(self.points(largest)) > 1:
            raise ValueError(
                f"budget_for_tuning is not given, and there are {len(self.points(largest))} settings of {largest} to "
                f'choose from; give the epsilon that this may cost, "{PUBLIC}" (with tuning_data), or "{UNCOVERED}" '
                "(chosen on the private data, NOT covered by epsilon)"
            )

    @property
    def rows(self) -> tuple[str, ...]:
        """What is trained: the variants, and the reference without privacy where it is asked for."""
        return (*self.variants, NON_PRIVATE) if self.references else self.variants

    def points(self, variant: str) -> list[Setting]:
        """The settings among which the variant's is chosen."""
        return points(grid_of(variant, self.grid))

    def asked(self) -> dict[str, Any]:
        """What must not change while a folder is filled; variants, seeds and settings may be added."""
        recipe = {name: value for name, value in self.recipe.to_dict().items() if name not in ("variant", *LOOSE)}
        for name in ("model", "data", "validation_data"):
            if name in recipe:
                recipe[name] = whole_path(recipe[name])
        tuning = {
            "budget_for_tuning": self.budget_for_tuning,
            "tuning_data": None if self.tuning_data is None else whole_path(self.tuning_data),
            "tuning_steps": self.tuning_steps,
        }
        return {**recipe, **tuning, "metric": self.metric}


def read_request(path: str | Path, *, epsilon: float | None = None, device: str | None = None, **over: Any) -> Request:
    """The request in a recipe file with a [compare] table; what is given otherwise is put over it.

    Edge cases: without `variants` all are compared; `seeds` is a number of them, from the recipe's seed on, or a list.
    One ValueError line for a file that is missing or no TOML, and for what is unknown or out of range.
    """
    values = read_toml(path)
    table = values.pop("compare", {})
    if not isinstance(table, Mapping):
        raise ValueError(f"compare={table!r} must be a table: write [compare]")
    for name, value in table.items():
        if name not in _KEYS:
            near = get_close_matches(name, _KEYS, 1)
            mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(_KEYS)}"
            raise ValueError(f"compare.{name}={value!r} is no setting of a comparison; {mend}")
    if epsilon is not None:
        values.pop("noise_multiplier", None)
        values["epsilon"] = epsilon
    if device is not None:
        values["device"] = device
    recipe = Recipe.from_dict(values)
    given = {name: value for name, value in over.items() if value is not None}
    grid = _merged(table.get("grid", {}), given.pop("grid", {}))
    wanted = {"variants": list(VARIANTS), "seeds": 3, **table, **given}
    return Request(
        recipe=recipe,
        variants=_names(wanted["variants"]),
        seeds=_seeds(wanted["seeds"], recipe.seed),
        grid=grid,
        budget_for_tuning=wanted.get("budget_for_tuning"),
        tuning_data=wanted.get("tuning_data"),
        tuning_steps=wanted.get("tuning_steps"),
        references=yes_or_no("references", wanted.get("references", False)),
        metric=wanted.get("metric", "loss"),
    )


def _merged(table: Any, over: Mapping[str, Any]) -> dict[str, Any]:
    """One grid over another, setting by setting, in the tables of single variants too."""
    if not isinstance(table, Mapping):
        raise ValueError(f"compare.grid={table!r} must be a table of settings: write [compare.grid]")
    found = {name: dict(value) if isinstance(value, Mapping) else value for name, value in table.items()}
    for name, value in over.items():
        own = isinstance(value, Mapping) and isinstance(found.get(name), dict)
        found[name] = {**found[name], **value} if own else value
    return found


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"variants={value!r} must be a list of names")
    return tuple(value)


def _seeds(value: Any, first: int) -> tuple[int, ...]:
    if _is_whole(value, 1):
        if value > _MOST_SEEDS:
            raise ValueError(f"seeds={value} is how many there are, at most {_MOST_SEEDS}; name them as a list")
        return tuple(range(first, first + value))
    if isinstance(value, list | tuple) and all(_is_whole(seed, 0) for seed in value):
        return tuple(value)
    raise ValueError(f"seeds={value!r} must be how many there are (1 or more), or a list of whole numbers")


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
