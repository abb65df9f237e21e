"""Settings to choose from: which a variant takes, and every combination of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dpoptim.app.recipes.recipe import VARIANTS, Recipe

NON_PRIVATE = "non_private"
"""The reference that trains without noise and without clipping."""

Setting = dict[str, Any]
"""Names of a recipe's settings with one value each."""

_ALL = ("learning_rate", "clip_norm", "weight_decay", "betas", "schedule", "warmup")
_FIXED = (
    "epsilon", "delta", "noise_multiplier", "adjacency", "num_examples", "sampling", "noise", "batch_size", "steps",
    "epochs", "seed", "model", "data", "validation_data", "validation_fraction",
)  # fmt: skip


def settings_of(variant: str) -> tuple[str, ...]:
    """What may be chosen for a variant: settings that ε does not depend on, and that it reads.

    >>> settings_of("dp_sgd")
    ('learning_rate', 'clip_norm', 'weight_decay', 'betas', 'schedule', 'warmup')
    >>> [name for name in settings_of("scale_then_privatize") if name not in settings_of("dp_sgd")]
    ['eps', 'eps_scale']
    """
    if variant == NON_PRIVATE:
        return (*(name for name in _ALL if name != "clip_norm"), "eps")
    if variant == "dp_sgd":
        return _ALL
    return (*_ALL, "eps", "eps_scale") if variant == "scale_then_privatize" else (*_ALL, "eps")


def check_variant(name: str, *, what: str = "variants") -> None:
    """Refuse, in one line, what is no variant."""
    if name not in VARIANTS:
        raise ValueError(f"{what}={name!r}: there is no such variant; there are {', '.join(VARIANTS)}")


def grid_of(variant: str, grid: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of each setting for one variant: those of all, with those of its own table put over them.

    >>> grid_of("dp_sgd", {"learning_rate": [0.1, 0.2], "dp_sgd": {"learning_rate": 1.0}})
    {'learning_rate': [1.0]}
    >>> grid_of("dp_sgd", {"eps_scale": [1e-4]})
    Traceback (most recent call last):
    ValueError: grid: eps_scale is not a setting of dp_sgd; put it under [compare.grid.scale_then_privatize]
    """
    own = grid.get(variant, {})
    if not isinstance(own, Mapping):
        raise ValueError(f"grid.{variant}={own!r} must be a table of settings")
    shared = {name: values for name, values in grid.items() if name not in (*VARIANTS, NON_PRIVATE)}
    if variant == NON_PRIVATE:  # a reference takes what it can of everybody's
        shared = {name: values for name, values in shared.items() if name in settings_of(variant)}
    found = {}
    for name, values in {**shared, **own}.items():
        _check_setting(name, variant, is_own=name in own)
        found[name] = _listed(name, values)
    return found


def points(grid: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Every combination, the last setting varying first; one empty setting where there is nothing to choose.

    >>> points({"learning_rate": [1, 2], "eps": [3, 4]})[:2]
    [{'learning_rate': 1, 'eps': 3}, {'learning_rate': 1, 'eps': 4}]
    >>> points({})
    [{}]
    """
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def name_of_setting(setting: Mapping[str, Any]) -> str:
    """A setting in a word that names a folder too.

    >>> name_of_setting({"learning_rate": 0.001, "betas": [0.9, 0.99]}), name_of_setting({})
    ('learning_rate=0.001,betas=0.9-0.99', 'as-in-recipe')
    """
    if not setting:
        return "as-in-recipe"
    return ",".join(f"{name}={_word(value)}" for name, value in setting.items())


def with_setting(recipe: Recipe, variant: str, setting: Mapping[str, Any]) -> Recipe:
    """The recipe for a variant at a setting; what other variants alone read is left out.

    >>> recipe = Recipe(model="mlp", data="a.csv", epsilon=1.0, eps_scale=1e-3)
    >>> with_setting(recipe, "dp_sgd", {"learning_rate": 2}).eps_scale is None
    True
    """
    takes = settings_of(variant)
    unread = {name: None for name in ("eps", "eps_scale") if name not in takes}
    chosen = "post_processing" if variant == NON_PRIVATE else variant
    return recipe.replace(**{**unread, **setting, "variant": chosen})


def _check_setting(name: str, variant: str, *, is_own: bool) -> None:
    takes = settings_of(variant)
    if name in takes:
        return
    if name in _FIXED:
        raise ValueError(f"grid: {name} is the same for all that is compared; set it in the recipe")
    others = [other for other in VARIANTS if name in settings_of(other)]
    if not others:
        raise ValueError(f"grid: {name} is no setting to choose; there are {', '.join(takes)}")
    mend = "leave it out" if is_own else f"put it under [compare.grid.{others[0]}]"
    raise ValueError(f"grid: {name} is not a setting of {variant}; {mend}")


def _listed(name: str, values: Any) -> list[Any]:
    pairs = name == "betas"
    one = not isinstance(values, list | tuple) or (pairs and values and not isinstance(values[0], list | tuple))
    found = [values] if one else list(values)
    if not found:
        raise ValueError(f"grid: {name}=[] has no value; give at least one, or leave it out")
    plain: list[Any] = []
    for value in found:
        number = isinstance(value, int) and not isinstance(value, bool)
        plain.append(float(value) if number else list(value) if isinstance(value, tuple) else value)
    if len({repr(value) for value in plain}) != len(plain):
        raise ValueError(f"grid: {name}={plain} has a value twice; leave one out")
    return plain


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(_word(part) for part in value)
    return "".join(mark if mark.isalnum() or mark in ".-+_" else "_" for mark in str(value))
