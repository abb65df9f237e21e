"""A recipe: every setting of a training run, as plain values in a TOML file.

Each field of `Recipe` carries its check, its command-line flag and its help text. This module does not import torch, so
that `dpoptim train --help` stays fast.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dpoptim.app.recipes import columns as columns_table
from dpoptim.app.recipes import prompts
from dpoptim.arguments import check_choice, check_number, check_whole

VARIANTS = (
    "scale_then_privatize",
    "post_processing",
    "bias_correction",
    "independent_moments",
    "joint_moments",
    "dp_sgd",
)
SCHEDULES = ("linear", "cosine", "constant", "wsd")
TASKS = (
    "masked-lm", "causal-lm", "text-classification", "image-classification", "tabular-classification",
    "tabular-regression",
)  # fmt: skip
ADJACENCIES = ("zero-out", "add-remove", "replace")
CLIPPING = ("fixed", "adaptive", "normalized")
TARGETS = ("none", "tensorboard", "wandb")
TABULAR_MODELS = ("mlp", "linear")
BUILT_IN = (*TABULAR_MODELS, "small-cnn")
"""Models that need no files."""

Kind = dict[str, Any]
"""A kind of setting: its check, (name, value) -> the value as the recipe stores it, and how its flag is shown."""


def _kind(check: Callable[[str, Any], Any], type: type, metavar: Any = None, **more: Any) -> Kind:
    return {"check": check, "type": type, "metavar": metavar, "choices": None, **more}


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError(f"{name}={value!r} must be a name or a path")
    return str(value)


def _one_of(*allowed: str) -> Kind:
    def check(name: str, value: Any) -> str:
        check_choice(name, value, allowed)
        return str(value)

    return _kind(check, str, "NAME", choices=allowed)


def _adjacency(name: str, value: Any) -> str:
    check = _one_of(*ADJACENCIES)["check"]
    return str(check(name, str(value).replace("_", "-"))).replace("-", "_")


def boolean(name: str, value: Any) -> bool:
    """Check that a setting is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value


def _whole(low: int) -> Kind:
    def check(name: str, value: Any) -> int:
        check_number(name, check_whole(name, value, low=low), below=2**63)
        return int(value)

    return _kind(check, int, "N")


def _number(**limits: Any) -> Kind:
    """A finite number within the limits of `check_number`."""

    def check(name: str, value: Any) -> float:
        check_number(name, value, **limits)
        return float(value)

    return _kind(check, float, "X")


def _betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be two numbers such as [0.9, 0.999]")
    check = _number(low=0, below=1)["check"]
    return check(f"{name}[0]", value[0]), check(f"{name}[1]", value[1])


def _targets(name: str, value: Any) -> tuple[str, ...]:
    given = names(name, [value] if isinstance(value, str) else value)
    for part in given:
        check_choice(name, part, TARGETS)
    if "none" in given and len(given) > 1:
        raise ValueError(f"{name}={list(given)} combines none with other names; give one or the other")
    return tuple(part for part in dict.fromkeys(given) if part != "none")


def names(name: str, value: Any) -> tuple[str, ...]:
    """Check that a setting is a list of strings."""
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise ValueError(f"{name}={value!r} must be a list of names")
    return tuple(value)


_ABOVE_0 = _number(above=0)
_TEXT = _kind(_name, str, "NAME")
_SWITCH = _kind(boolean, bool)
_COLUMNS = _kind(columns_table.check_columns, str, "NAME=…", nargs="+")

DATA, PRIVACY, OPTIMIZER, RUN = "model and data", "privacy", "optimizer", "the run"


def _setting(default: Any, kind: Kind, group: str, help: str, **more: Any) -> Any:
    """A field with what the command line needs; `flag` defaults to the field's name, and None leaves it without one."""
    if kind["choices"] is not None:
        help = f"{', '.join(kind['choices'])} ({help})"
    return dataclasses.field(default=default, metadata={**kind, "group": group, "help": help, **more})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a run: model, data, guarantee and training.

    `model`, `data` and one of `epsilon` and `noise_multiplier` are required. None leaves a setting to the rules in
    `dpoptim.app.recipes.defaults`. In dp_sgd the momentum is betas[0].

    Raises:
        ValueError: A setting is out of range, or two settings contradict each other. What depends on the data is
            checked when the run is prepared, before anything is written.

    >>> Recipe(model="mlp", data="train.csv", epsilon=3).variant
    'scale_then_privatize'
    """

    # fmt: off
    model: str = _setting(dataclasses.MISSING, _TEXT, DATA,
        'a folder, a Hugging Face name, "mlp", "linear" or "small-cnn"')
    data: str = _setting(dataclasses.MISSING, _TEXT, DATA,
        ".jsonl, .csv, .parquet, .txt, a folder, or a dataset's name")
    task: str | None = _setting(None, _one_of(*TASKS), DATA, "default: the task in the model's configuration")
    validation_data: str | None = _setting(None, _TEXT, DATA, "records for scores, not in the training data")
    validation_fraction: float | None = _setting(None, _number(low=0, below=1), DATA,
        "share of the records to hold out for scores, by position (default: 0.05)")
    split: str = _setting("train", _TEXT, DATA, "split of the data (default: train)")
    text_column: str | None = _setting(None, _TEXT, DATA, "column of the texts (default: text)")
    label_column: str | None = _setting(None, _TEXT, DATA, "column of the labels (default: label)")
    prompt_template: str | None = _setting(None, _kind(prompts.check_template, str, "TEXT"), DATA,
        "causal-lm: the prompt before each text, such as 'A {label} review:'; {names} are columns, and only texts are "
        "trained (default: {prompt}, if there is no column text)")
    messages_column: str | None = _setting(None, _TEXT, DATA,
        "causal-lm: column of chats (default: messages, if there is no column text)")
    user_column: str | None = _setting(None, _TEXT, DATA, "column with the user of each record; see --records-per-user")
    label_names: tuple[str, ...] | None = _setting(None, _kind(names, str), DATA, "the labels in order", flag=None)
    columns: Mapping[str, Any] | None = _setting(None, _COLUMNS, DATA,
        "columns of a table to use: NAME=LOW:HIGH (numbers), NAME=a,b,c (categories), NAME=estimate-range, "
        "NAME=estimate-categories, or NAME as the recipe declares it")
    drop: tuple[str, ...] | None = _setting(None, _kind(names, str, "NAME", nargs="+"), DATA,
        'columns of a table to leave out; "*" for all that are not declared')
    width: int | None = _setting(None, _whole(1), DATA, "hidden units of mlp (default: 32)")
    max_length: int | None = _setting(None, _whole(2), DATA, "cut texts to this many tokens")
    image_size: int | None = _setting(None, _whole(1), DATA, "side of an image in pixels")
    from_scratch: bool = _setting(False, _SWITCH, DATA, "start from new weights; read only the configuration")
    lora_rank: int | None = _setting(None, _whole(1), DATA, "train only LoRA factors of this rank")
    lora_alpha: float | None = _setting(None, _ABOVE_0, DATA, "LoRA scale times the rank (default: twice the rank)")
    lora_targets: tuple[str, ...] | None = _setting(None, _kind(names, str, "NAME", nargs="+"), DATA,
        "layers to train with LoRA, such as q_proj v_proj, or all-linear (default: peft's choice for the model)")

    epsilon: float | None = _setting(None, _ABOVE_0, PRIVACY, "epsilon of the run: 1 is strong, 8 is usual, 20 is weak")
    delta: float | None = _setting(None, _number(above=0, below=1, hint="Use 1/num_examples or less."), PRIVACY,
        "below 1/records (default: a power of ten, at most 1/(10 records))")
    noise_multiplier: float | None = _setting(None, _number(low=0), PRIVACY,
        "noise divided by the clip norm, instead of --epsilon")
    adjacency: str = _setting("zero_out", {**_one_of(*ADJACENCIES), "check": _adjacency}, PRIVACY, "default: zero-out")
    num_examples: int | None = _setting(None, _whole(1), PRIVACY, "a public size of the data, required by add-remove")
    sampling: str = _setting("shuffled", _TEXT, PRIVACY,
        "shuffled (default: batches need not stay secret), auto (secret if the noise has a proof for it), poisson, "
        "cyclic, cyclic:GROUPS")
    noise: str = _setting("auto", _TEXT, PRIVACY,
        "auto (default: the least error among those with a proof), independent, square-root, banded-toeplitz:BANDS, "
        "banded-inverse:BANDS, buffered-toeplitz:BUFFERS; for example banded-toeplitz:32")
    clip_norm: float | None = _setting(None, _ABOVE_0, PRIVACY,
        "bound on one example's gradient (default: 0.1; 3 for mlp, 1 for linear)")
    clipping: str = _setting("fixed", _one_of(*CLIPPING), PRIVACY,
        "default: fixed, at --clip-norm; adaptive follows the 0.9 quantile of norms, with slightly more noise, from "
        "--clip-norm (then default: 1; 2 for mlp; 0.1 for tables with numbers to predict); "
        "normalized divides each gradient by its norm")
    exact_noise: bool = _setting(False, _SWITCH, PRIVACY,
        "add noise without floating-point errors; slower, above all with correlated noise")
    records_per_user: int | None = _setting(None, _whole(1), PRIVACY,
        "protect users with all their records, of which at most N are used in a step; needs --user-column")
    columns_epsilon: float | None = _setting(None, _ABOVE_0, PRIVACY,
        "part of epsilon to spend on estimates of columns (default: a tenth)")

    variant: str = _setting(VARIANTS[0], _one_of(*VARIANTS), OPTIMIZER, f"default: {VARIANTS[0]}")
    learning_rate: float | None = _setting(None, _number(low=0), OPTIMIZER,
        "default: 2e-3; 4e-3 for LoRA or new weights; 0.1 for tables; 0.04 for small-cnn; 1 for dp_sgd (0.1 on "
        "tables); with independent noise or secret batches a quarter, and 0.03 for tables")
    eps: float | None = _setting(None, _number(low=0), OPTIMIZER, "Adam's eps; a floor in bias_correction",
        flag="--adam-eps")
    eps_scale: float | None = _setting(None, _ABOVE_0, OPTIMIZER,
        "stability constant of scale_then_privatize (default: twice the smallest stable value)")
    betas: tuple[float, float] = _setting((0.9, 0.999), _kind(_betas, float, ("B1", "B2"), nargs=2), OPTIMIZER,
        "default: 0.9 0.999")
    weight_decay: float = _setting(0.0, _number(low=0), OPTIMIZER, "decoupled weight decay (default: 0)")
    schedule: str | None = _setting(None, _one_of(*SCHEDULES), OPTIMIZER,
        "default: wsd, which is constant, then falls linearly to 0 over the last 30 % of the steps; linear for tables")
    warmup: float = _setting(0.05, _number(low=0, below=1), OPTIMIZER,
        "share of the steps in which the learning rate rises (default: 0.05)")
    averaged: float | None = _setting(None, _number(above=0, high=1), OPTIMIZER,
        "score and save a moving average of the weights with this decay, such as 0.99; see --schedule constant")
    batch_size: int | None = _setting(None, _whole(1), OPTIMIZER,
        "expected number of examples (default: up to 2048, depending on the size of the data)")
    steps: int | None = _setting(None, _whole(1), OPTIMIZER, "optimizer steps")
    epochs: float | None = _setting(None, _ABOVE_0, OPTIMIZER,
        "instead of --steps, rounded up to whole steps (default: 10; 20 for tables)")
    micro_batch_size: int | None = _setting(None, _whole(1), OPTIMIZER, "most examples in memory at once")
    micro_batch_tokens: int | None = _setting(None, _whole(1), OPTIMIZER, "most tokens in memory at once, with padding")

    dtype: str | None = _setting(None, _one_of("fp32", "bf16"), RUN, "default: bf16 on a GPU, else fp32")
    device: str = _setting("auto", _TEXT, RUN, "auto (default), cpu, cuda, cuda:1")
    seed: int = _setting(0, _whole(0), RUN, "seed of new weights and masks, never of noise (default: 0)")
    evaluate_every: int | None = _setting(None, _whole(1), RUN, "steps between scores (default: a tenth of the run)")
    checkpoint_every: int | None = _setting(None, _whole(1), RUN,
        "steps between checkpoints (default: a tenth of the run)")
    log_every: int = _setting(10, _whole(1), RUN, "steps between log entries (default: 10)")
    report_to: tuple[str, ...] = _setting((), _kind(_targets, str, "NAME", choices=TARGETS, nargs="+"), RUN,
        "where else to log: one or both; default: none")
    debug: bool = _setting(False, _SWITCH, RUN, "also log training losses and clipping: NOT private")
    # fmt: on

    def __post_init__(self) -> None:
        for part in dataclasses.fields(self):
            value = getattr(self, part.name)
            if value is not None or part.name in ("model", "data"):
                object.__setattr__(self, part.name, part.metadata["check"](part.name, value))
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("epsilon is missing; set it, for example epsilon = 8 or --epsilon 8")
        for one, other in _PAIRS:
            first, second = getattr(self, one), getattr(self, other)
            if first is not None and second is not None and not (other == "validation_fraction" and second == 0):
                raise ValueError(f"{one}={first!r} and {other}={second!r} were both given; give one of them")
        if (self.user_column is None) != (self.records_per_user is None):
            raise ValueError(
                f"user_column={self.user_column!r} and records_per_user={self.records_per_user!r} do not match; to "
                "protect users, give both"
            )
        for name in ("lora_alpha", "lora_targets"):
            if getattr(self, name) is not None and self.lora_rank is None:
                raise ValueError(f"{name}={getattr(self, name)!r} needs lora_rank (--lora-rank); give both")
        if self.from_scratch and self.lora_rank is not None:
            raise ValueError(f"from_scratch=true and lora_rank={self.lora_rank}: LoRA needs pretrained weights")
        if self.adjacency == "add_remove":  # the number of records is private, and so are their places
            if self.num_examples is None:
                raise ValueError("num_examples is missing; adjacency='add_remove' needs a public size of the data")
            if self.validation_fraction:
                raise ValueError(
                    f"validation_fraction={self.validation_fraction} holds records out by their places, which "
                    "adjacency='add_remove' does not allow; give validation_data"
                )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Make a recipe from plain values; unknown names are refused."""
        check_known(values, [part.name for part in dataclasses.fields(cls)], "a recipe")
        for name in ("model", "data"):
            if name not in values:
                if name in (values.get("columns") or {}):
                    raise ValueError(f"{name} is under [columns]; move it above that line")
                raise ValueError(f"{name} is missing; add --{name} NAME_OR_PATH, or {name} = ... to the recipe")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All settings that are not None, as plain values."""
        found = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def part(self, *names: str) -> dict[str, Any]:
        """Some settings by name."""
        return {name: getattr(self, name) for name in names}

    def to_toml(self) -> str:
        """The recipe as a TOML document; settings that are None are left out."""
        values = self.to_dict()
        declared = values.pop("columns", None)
        text = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())
        text += columns_table.to_toml(declared or {})
        return text.replace("\x7f", "\\u007f")

    def with_whole_paths(self) -> Recipe:
        """Make local paths absolute, so that a run can be resumed from any folder."""
        paths = self.part("model", "data", "validation_data")
        return self.replace(**{name: whole_path(path) for name, path in paths.items() if path is not None})

    def replace(self, **changes: Any) -> Recipe:
        """A new recipe with these settings changed."""
        return dataclasses.replace(self, **changes)


_PAIRS = (
    ("epsilon", "noise_multiplier"),
    ("steps", "epochs"),
    ("validation_data", "validation_fraction"),
    ("prompt_template", "messages_column"),
)
"""Settings that replace each other."""


def check_known(values: Mapping[str, Any], known: Sequence[str], what: str, prefix: str = "") -> None:
    """Refuse a name that is not a setting, and suggest the one that was probably meant."""
    for name, value in values.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}"
            raise ValueError(f"{prefix}{name}={value!r} is not a setting of {what}; {hint}")


def flags() -> dict[str, dataclasses.Field[Any]]:
    """The command-line flag of each setting that has one, in order."""
    named = {part: part.metadata.get("flag", f"--{part.name.replace('_', '-')}") for part in dataclasses.fields(Recipe)}
    return {flag: part for part, flag in named.items() if flag is not None}


def read_recipe(path: str | Path | None, **over: Any) -> Recipe:
    """Read a recipe from a TOML file and override some of its settings.

    Args:
        path: The file, or None for a recipe that consists of `over` alone.
        over: Settings that replace those of the file; None keeps the file's. A setting also replaces its rival in the
            file: epsilon and noise_multiplier, steps and epochs, validation_data and validation_fraction.

    Raises:
        ValueError: The file is missing or not TOML, or a setting is unknown or out of range.
    """
    values = {} if path is None else read_toml(path)
    values.pop("compare", None)  # a table of `dpoptim compare`
    given = {name: value for name, value in over.items() if value is not None}
    if isinstance(given.get("columns"), list):  # as flags; columns that are not named are left out
        given["columns"] = columns_table.columns_of_flags(given["columns"], values.get("columns") or {})
        given.setdefault("drop", [columns_table.ALL_OTHERS])
    replaced = {name for pair in _PAIRS if given.keys() & set(pair) for name in pair}
    return Recipe.from_dict({**{name: value for name, value in values.items() if name not in replaced}, **given})


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the values of a recipe's file."""
    try:
        return tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"recipe {str(path)!r} does not exist or cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        hint = "" if str(path).endswith(".toml") else "; to train on a data file, use --data"
        raise ValueError(f"recipe {str(path)!r} is not a TOML file: {error}{hint}") from None


def whole_path(name: str) -> str:
    """Make a local path absolute; other names stay unchanged."""
    path = Path(name).expanduser()
    return str(path.absolute()) if name not in BUILT_IN and path.exists() else name
