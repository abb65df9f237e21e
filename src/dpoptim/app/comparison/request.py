"""What to compare: a recipe, variants, seeds, a grid of settings, and what tuning may cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpoptim.app.recipes.columns import ESTIMATES
from dpoptim.app.recipes.recipe import VARIANTS, Recipe, boolean, check_known, names, read_recipe, read_toml, whole_path
from dpoptim.arguments import check_choice, check_number, check_whole

METRICS = ("loss", "accuracy")
PUBLIC, UNCOVERED = "public", "uncovered"
NON_PRIVATE = "non_private"
"""The reference that trains without noise and without clipping."""

LOOSE = ("device", "micro_batch_size", "micro_batch_tokens", "checkpoint_every", "log_every")
"""Settings of a recipe that change neither what is released nor what is compared."""

Setting = dict[str, Any]
"""Values of a recipe's settings, by name."""

_KEYS = ("variants", "seeds", "grid", "tuning_epsilon", "tuning_data", "tuning_steps", "references", "metric")
_TUNABLE = ("learning_rate", "clip_norm", "weight_decay", "betas", "schedule", "warmup")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Several variants at one (ε, δ), each with every seed and at its best setting of the grid.

    `tuning_epsilon` is the ε that all trials of a variant together may cost; "public" if trials run on `tuning_data`,
    which is not private, at no cost; or "uncovered" if trials run on the private records and the ε of a run does NOT
    cover them.

    Guarantee: a grid with a choice needs an explicit `tuning_epsilon`.
    """

    recipe: Recipe
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    grid: Mapping[str, Any] = field(default_factory=dict)
    tuning_epsilon: float | str | None = None
    tuning_data: str | None = None
    tuning_steps: int | None = None
    references: bool = False
    metric: str = "loss"

    def __post_init__(self) -> None:
        for name, values in (("variants", self.variants), ("seeds", self.seeds)):
            if not values:
                raise ValueError(f"{name} is empty; give at least one")
            if len(set(values)) != len(values):
                raise ValueError(f"{name}={list(values)} has a duplicate; remove it")
        for name in self.variants:
            check_choice("variants", name, VARIANTS)
        check_choice("metric", self.metric, METRICS)
        if self.tuning_steps is not None:
            check_whole("tuning_steps", self.tuning_steps)
        boolean("references", self.references)
        if estimates := [name for name, value in (self.recipe.columns or {}).items() if value in ESTIMATES]:
            raise ValueError(
                f"columns.{estimates[0]} cannot be estimated in a comparison, which has several runs; declare it, or "
                "copy the estimate from the recipe.toml of a run"
            )
        for name, values in self.grid.items():
            if isinstance(values, Mapping):
                check_choice("grid", name, (*VARIANTS, NON_PRIVATE))
        self._check_tuning()
        for variant in self.rows:
            for setting in self.points(variant):
                with_setting(self.recipe, variant, setting)  # raises ValueError for values out of range

    def _check_tuning(self) -> None:
        budget = self.tuning_epsilon
        if budget not in (None, PUBLIC, UNCOVERED):
            check_number("tuning_epsilon", budget, above=0, hint=f'Or give "{PUBLIC}" or "{UNCOVERED}".')
        if (budget == PUBLIC) != (self.tuning_data is not None):
            raise ValueError(
                f"tuning_epsilon={budget!r} and tuning_data={self.tuning_data!r} do not match. Give tuning_data with "
                f'"{PUBLIC}", and only then'
            )
        largest = max(self.variants, key=lambda variant: len(self.points(variant)))
        if budget is None and len(self.points(largest)) > 1:
            raise ValueError(
                f"tuning_epsilon is missing, and {largest} has {len(self.points(largest))} settings to choose from. "
                f'Give the epsilon that tuning may cost, "{PUBLIC}" (with tuning_data), or "{UNCOVERED}" (on the '
                "private data, NOT covered by epsilon)"
            )

    @property
    def rows(self) -> tuple[str, ...]:
        """What is trained: the variants and, if asked for, the reference without privacy."""
        return (*self.variants, NON_PRIVATE) if self.references else self.variants

    def points(self, variant: str) -> list[Setting]:
        """Every combination in the variant's grid; one empty setting if there is nothing to choose."""
        grid = grid_of(variant, self.grid)
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def asked(self) -> dict[str, Any]:
        """What must not change while a folder fills up; variants, seeds and settings may be added."""
        recipe = self.recipe.with_whole_paths().to_dict()
        return {
            **{name: value for name, value in recipe.items() if name not in ("variant", *LOOSE)},
            "tuning_epsilon": self.tuning_epsilon,
            "tuning_data": None if self.tuning_data is None else whole_path(self.tuning_data),
            "tuning_steps": self.tuning_steps,
            "metric": self.metric,
        }


def read_request(path: str | Path, *, epsilon: float | None = None, device: str | None = None, **over: Any) -> Request:
    """Read a request from a recipe file with a [compare] table; arguments that are not None override the file."""
    table = read_toml(path).get("compare", {})
    if not isinstance(table, Mapping):
        raise ValueError(f"compare={table!r} must be a table: write [compare]")
    check_known(table, _KEYS, "a comparison", prefix="compare.")
    recipe = read_recipe(path, epsilon=epsilon, device=device)
    given = {name: value for name, value in over.items() if value is not None}
    settings = {"variants": list(VARIANTS), "seeds": 3, **table, **given}
    settings["variants"] = names("variants", settings["variants"])
    settings["seeds"] = _seeds(settings["seeds"], recipe.seed)
    settings["grid"] = _merged(table.get("grid", {}), given.get("grid", {}))
    return Request(recipe=recipe, **settings)


def _merged(table: Any, over: Mapping[str, Any]) -> dict[str, Any]:
    """Override a grid, setting by setting, also inside the tables of single variants."""
    if not isinstance(table, Mapping):
        raise ValueError(f"compare.grid={table!r} must be a table of settings: write [compare.grid]")
    found = {name: dict(value) if isinstance(value, Mapping) else value for name, value in table.items()}
    for name, value in over.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), dict)
        found[name] = {**found[name], **value} if both else value
    return found


def _seeds(value: Any, first: int) -> tuple[int, ...]:
    """The seeds of a list, or this many, counted from the recipe's."""
    if isinstance(value, list | tuple):
        return tuple(check_whole("seeds", seed, low=0) for seed in value)
    return tuple(range(first, first + check_whole("seeds", value, hint="Or give a list of seeds.")))


def tunable_settings(variant: str) -> tuple[str, ...]:
    """The settings that can be tuned for a variant: it reads them, and ε does not depend on them."""
    shared = tuple(name for name in _TUNABLE if variant != NON_PRIVATE or name != "clip_norm")
    own = {"dp_sgd": (), "scale_then_privatize": ("eps", "eps_scale")}
    return shared + own.get(variant, ("eps",))


def grid_of(variant: str, grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each setting for one variant: those for all, overridden by its own table."""
    own = grid.get(variant, {})
    if not isinstance(own, Mapping):
        raise ValueError(f"grid.{variant}={own!r} must be a table of settings")
    shared = {name: values for name, values in grid.items() if name not in (*VARIANTS, NON_PRIVATE)}
    tunable = tunable_settings(variant)
    if variant == NON_PRIVATE:  # the reference takes those shared settings that it reads
        shared = {name: values for name, values in shared.items() if name in tunable}
    found = {}
    for name, values in {**shared, **own}.items():
        if name not in tunable:
            others = [other for other in VARIANTS if name in tunable_settings(other)]
            in_other = others and name not in own
            hint = f"put it under [compare.grid.{others[0]}]" if in_other else f"choose from {', '.join(tunable)}"
            raise ValueError(f"grid: {name} cannot be tuned for {variant}; {hint}")
        found[name] = _listed(name, values)
    return found


def _listed(name: str, values: Any) -> list[Any]:
    """The values as a list of plain values; one pair of betas is one value."""
    found = list(values) if isinstance(values, list | tuple) else [values]
    if name == "betas" and found and not isinstance(found[0], list | tuple):
        found = [values]
    if not found:
        raise ValueError(f"grid: {name}=[] has no value; give at least one, or leave it out")
    found = [float(value) if type(value) is int else value for value in found]
    if len(set(map(str, found))) != len(found):
        raise ValueError(f"grid: {name}={found} has a duplicate; remove it")
    return found


def name_of_setting(setting: Mapping[str, Any]) -> str:
    """A setting as one word, which is also the name of a folder."""
    pairs = [(name, value if isinstance(value, list | tuple) else [value]) for name, value in setting.items()]
    return ",".join(f"{name}={'-'.join(map(str, values))}" for name, values in pairs) or "as-in-recipe"


def with_setting(recipe: Recipe, variant: str, setting: Mapping[str, Any]) -> Recipe:
    """The recipe for a variant at a setting, without settings that only other variants read."""
    unread = {name: None for name in ("eps", "eps_scale") if name not in tunable_settings(variant)}
    chosen = "post_processing" if variant == NON_PRIVATE else variant
    return recipe.replace(**{**unread, **setting, "variant": chosen})
