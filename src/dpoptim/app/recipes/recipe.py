"""A recipe: every setting of a training run, as plain values that a TOML file holds."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dpoptim.integrations.losses import Task
from dpoptim.privacy import Adjacency

VARIANTS = (
    "scale_then_privatize",
    "post_processing",
    "bias_correction",
    "independent_moments",
    "joint_moments",
    "dp_sgd",
)
SCHEDULES = ("linear", "cosine", "constant")
BUILT_IN = ("mlp", "small-cnn")
"""Models without files."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train, on what, under which guarantee, and how; None leaves a setting to the rules in `defaults`.

    `model`, `data` and one of `epsilon` and `noise_multiplier` are all that is needed. `validation_fraction` of the
    records of `data` are held out before anything else, by their places alone; scores on them are outside the
    guarantee. `noise` is "auto" (the least error that is proved for the sampling), "independent",
    "banded-toeplitz:32", "buffered-toeplitz:3", "banded-inverse:16" or "square-root"; `sampling` is "auto" (secret
    sampling where it is proved for the noise, else shuffled), "poisson", "shuffled" or "cyclic" (with as many groups as
    the noise has bands, or "cyclic:32"). `epochs` is rounded up to whole steps. `warmup` is the share of the steps in
    which the learning rate rises. In dp_sgd the momentum is betas[0].

    Guarantee: a recipe that exists is within the range of every setting; what only the data can tell (a column, a
    batch larger than the data) is checked when the run is set up, before anything is trained or written.

    >>> recipe = Recipe(model="mlp", data="train.csv", epsilon=3)
    >>> recipe.variant, recipe.epsilon, recipe.steps
    ('scale_then_privatize', 3.0, None)
    >>> Recipe(model="mlp", data="train.csv", epsilon=0)
    Traceback (most recent call last):
    ValueError: epsilon=0 must be a finite number above 0
    """

    model: str
    data: str
    task: str | None = None
    validation_data: str | None = None
    validation_fraction: float | None = None
    split: str = "train"
    text_column: str | None = None
    label_column: str | None = None
    label_names: tuple[str, ...] | None = None
    max_length: int | None = None
    image_size: int | None = None
    from_scratch: bool = False
    lora_rank: int | None = None

    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    adjacency: str = Adjacency.ZERO_OUT.value
    num_examples: int | None = None
    sampling: str = "auto"
    noise: str = "auto"
    clip_norm: float | None = None

    variant: str = "scale_then_privatize"
    learning_rate: float | None = None
    eps: float | None = None
    eps_scale: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: str = "linear"
    warmup: float = 0.05
    batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None

    dtype: str | None = None
    device: str = "auto"
    seed: int = 0
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    log_every: int = 10
    debug: bool = False

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if value is None and name not in ("model", "data"):
                continue
            object.__setattr__(self, name, rule(name, value))
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("epsilon is not given: say how private the model is to be, as epsilon = 8 or --epsilon 8")
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                f"epsilon={self.epsilon:g} and noise_multiplier={self.noise_multiplier:g}: one follows from the other; "
                "give one of the two"
            )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps={self.steps} and epochs={self.epochs}: give one of the two")
        if self.validation_data is not None and self.validation_fraction:
            raise ValueError(
                f"validation_data={self.validation_data!r} and validation_fraction={self.validation_fraction}: give "
                "one of the two"
            )
        if self.from_scratch and self.lora_rank is not None:
            raise ValueError(
                f"from_scratch=true and lora_rank={self.lora_rank}: LoRA leaves the model's own weights as they are, "
                "and new ones know nothing; leave one of the two out"
            )
        if self.adjacency == Adjacency.ADD_REMOVE.value:
            self._check_add_remove()

    def _check_add_remove(self) -> None:
        """There the number of records is private: it must be declared, and no rule may depend on a record's place."""
        if self.num_examples is None:
            raise ValueError(
                "num_examples is not given: under adjacency='add_remove' the size of the data is private; declare a "
                "public one"
            )
        if self.validation_fraction:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} holds records out by their places, which shift where "
                "one is removed; under adjacency='add_remove' give validation_data, or validation_fraction=0"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe of these plain values; unknown keys are refused by name.

        >>> Recipe.from_dict({"model": "mlp", "data": "a.csv", "epsilon": 1, "learning_rat": 0.1})
        Traceback (most recent call last):
        ValueError: learning_rat=0.1 is no setting of a recipe; did you mean learning_rate?
        """
        known = [part.name for part in dataclasses.fields(cls)]
        for name, value in values.items():
            if name not in known:
                near = get_close_matches(name, known, 1)
                mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise ValueError(f"{name}={value!r} is no setting of a recipe; {mend}")
        for name in ("model", "data"):
            if name not in values:
                raise ValueError(f"{name} is not given; add --{name} NAME_OR_PATH, or {name} = ... to the recipe")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All settings that are not None, as plain values."""
        found = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
            if value is not None
        }

    def to_toml(self) -> str:
        """The recipe as a TOML document; a setting that is None is left out.

        >>> recipe = Recipe(model="mlp", data="train.csv", epsilon=3.0, betas=(0.9, 0.99))
        >>> Recipe.from_dict(tomllib.loads(recipe.to_toml())) == recipe
        True
        """
        return "".join(f"{name} = {_toml(value)}\n" for name, value in self.to_dict().items())

    def with_whole_paths(self) -> Recipe:
        """Local paths from the root on, so that a run can be taken up from any folder."""
        paths = {name: getattr(self, name) for name in ("model", "data", "validation_data")}
        return self.replace(**{name: whole_path(path) for name, path in paths.items() if path is not None})

    def replace(self, **changes: Any) -> Recipe:
        """A new recipe with these settings changed."""
        return dataclasses.replace(self, **changes)


def read_recipe(path: str | Path | None, **over: Any) -> Recipe:
    """The recipe in a TOML file (none for None), with settings put over those of the file.

    A setting of None in `over` leaves the file's. One of a pair (epsilon and noise_multiplier, steps and epochs) that
    is put over takes the other's place. A table [compare] is for `dpoptim compare` and is passed over here.
    Edge cases: one ValueError line for a file that is missing or no TOML, and for a setting that is unknown or out of
    range.
    """
    values = {} if path is None else read_toml(path)
    values.pop("compare", None)
    given = {name: value for name, value in over.items() if value is not None}
    for one, other in (
        ("epsilon", "noise_multiplier"),
        ("steps", "epochs"),
        ("validation_data", "validation_fraction"),
    ):
        for name, rival in ((one, other), (other, one)):
            if name in given and rival not in given:
                values.pop(rival, None)
    return Recipe.from_dict({**values, **given})


def read_toml(path: str | Path) -> dict[str, Any]:
    """The values in a recipe's file.

    Edge cases: what is no TOML file is one ValueError line; a folder or a table says by which flag it would be given.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        mends = {"recipe.toml": "to go on with this run: --resume", "config.json": "for a model: --model"}
        mend = next((mends[name] for name in mends if (file / name).is_file()), "for records: --data")
        raise ValueError(f"RECIPE {str(path)!r} is a folder, and must be a TOML file; {mend} {path}")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"recipe {str(path)!r} does not exist; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        mend = "" if file.suffix == ".toml" else f"; if it holds records: dpoptim train --data {path}"
        raise ValueError(f"recipe {str(path)!r} is no TOML file: {error}{mend}") from None


def whole_path(name: str) -> str:
    """From the root on where it is a local path, else as it is.

    >>> whole_path("mlp"), whole_path("no/such:dataset")
    ('mlp', 'no/such:dataset')
    """
    path = Path(name).expanduser()
    return str(path.absolute()) if name not in BUILT_IN and path.exists() else name


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return repr(value)


_Rule = Callable[[str, Any], Any]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError(f"{name}={value!r} must be a name or a path")
    return str(value)


def _one_of(*allowed: str) -> _Rule:
    def rule(name: str, value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}")
        return str(value)

    return rule


def yes_or_no(name: str, value: Any) -> bool:
    """The value, or one ValueError line where it is neither."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value


def _whole(low: int) -> _Rule:
    def rule(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
            raise ValueError(f"{name}={value!r} must be a whole number, {low} or more")
        return value

    return rule


def _number(low: float, high: float = math.inf, *, low_allowed: bool = True) -> _Rule:
    """low ≤ value < high, or low < value."""

    def rule(name: str, value: Any) -> float:
        fits = not isinstance(value, bool) and isinstance(value, int | float) and low <= value < high
        if not fits or (value == low and not low_allowed):
            least = f"{low:g} or more" if low_allowed else f"above {low:g}"
            most = "" if math.isinf(high) else f" and below {high:g}"
            raise ValueError(f"{name}={value!r} must be a finite number {least}{most}")
        return float(value)

    return rule


def _betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be two numbers such as [0.9, 0.999]")
    beta = _number(0, 1)
    return beta(f"{name}[0]", value[0]), beta(f"{name}[1]", value[1])


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise ValueError(f"{name}={value!r} must be a list of names")
    return tuple(value)


_above_0 = _number(0, low_allowed=False)
_RULES: dict[str, _Rule] = {
    "model": _text, "data": _text, "task": _one_of(*(task.value for task in Task)), "validation_data": _text,
    "validation_fraction": _number(0, 1), "split": _text, "text_column": _text, "label_column": _text,
    "label_names": _names, "max_length": _whole(2), "image_size": _whole(1), "from_scratch": yes_or_no,
    "lora_rank": _whole(1), "epsilon": _above_0, "delta": _number(0, 1, low_allowed=False),
    "noise_multiplier": _number(0), "adjacency": _one_of(*(kind.value for kind in Adjacency)),
    "num_examples": _whole(1), "sampling": _text, "noise": _text, "clip_norm": _above_0, "variant": _one_of(*VARIANTS),
    "learning_rate": _number(0), "eps": _number(0), "eps_scale": _above_0, "betas": _betas,
    "weight_decay": _number(0), "schedule": _one_of(*SCHEDULES), "warmup": _number(0, 1), "batch_size": _whole(1),
    "steps": _whole(1), "epochs": _above_0, "micro_batch_size": _whole(1), "micro_batch_tokens": _whole(1),
    "dtype": _one_of("fp32", "bf16"), "device": _text, "seed": _whole(0), "evaluate_every": _whole(1),
    "checkpoint_every": _whole(1), "log_every": _whole(1), "debug": yes_or_no,
}  # fmt: skip
