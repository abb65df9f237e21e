"""How many parameters a model has: by number, by folder or by name, without loading a weight."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dpoptim.app import load_model
from dpoptim.app.cli.units import count
from dpoptim.app.models.loading import task_of_model
from dpoptim.integrations.losses import Task
from dpoptim.integrations.optional import require

_OPTIONS = {
    "model": "MODEL",
    "tokenizer": "MODEL's tokenizer",
    "task": "--task",
    "from_scratch": "--from-scratch",
    "label_column": "--label-column",
    "text_column": "--text-column",
    "max_length": "--max-length",
}
_NAMES = re.compile(rf"\b(model|tokenizer|task)=|\b({'|'.join(name for name in _OPTIONS if '_' in name)})\b(=?)")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Trained parameters, and the class that they were counted of; None where a number was given."""

    parameters: int
    counted: str | None = None


def typed_count(model: str) -> int | None:
    """The number that MODEL is, or None where it is a folder or a name.

    Edge cases: what begins like a number and is neither one, nor a folder, nor a name with a "/" is refused, before a
    network is asked for it.

    >>> typed_count("124M"), typed_count("gpt2")
    (124000000, None)
    """
    try:
        return count(model)
    except argparse.ArgumentTypeError:
        if re.match(r"[-+\d]", model) and "/" not in model and not Path(model).is_dir():
            raise ValueError(
                f"MODEL {model!r} is no number of parameters such as 4400000 or 4.4M, and there is no such folder"
            ) from None
        return None


def model_size(model: str, *, task: Task | None = None) -> ModelSize:
    """Trained parameters of a model given as a folder with config.json or a name on the hub (or built in).

    The class that `task` asks for, else the one that the configuration names, is built on the meta device, which takes
    neither memory nor weights; what is tied counts once. Edge cases: one ValueError line where transformers is missing,
    the hub cannot be reached, there is no such model, or its configuration names no task.

    >>> model_size("small-cnn").counted
    'SmallCNN'
    """
    with in_options():
        task = task_of_model(model) if task is None else task
        if task is Task.TABULAR_CLASSIFICATION:
            raise ValueError(f"MODEL {model!r}: its parameters depend on the columns of the data; give their number")
        with torch.device("meta"):
            made = load_model(task, model, num_labels=_labels(model, task), from_scratch=True)
    parameters = sum(p.numel() for p in made.parameters() if p.requires_grad)
    return ModelSize(parameters=parameters, counted=type(made).__name__)


def _labels(model: str, task: Task) -> int | None:
    """As many as the configuration has, where the task has labels."""
    if not task.is_classification:
        return None
    if model == "small-cnn" or (Path(model).is_dir() and not (Path(model) / "config.json").is_file()):
        return 2
    try:
        config = require("transformers", f"MODEL {model!r}").AutoConfig.from_pretrained(model)
    except OSError:
        return 2  # load_model says what is wrong
    return max(2, int(config.num_labels))


@contextlib.contextmanager
def in_options() -> Iterator[None]:
    """Errors of the library in the words of the command line.

    >>> with in_options():
    ...     raise ValueError("max_length=1 must lie above 1; set from_scratch or model='x'")
    Traceback (most recent call last):
    ValueError: --max-length 1 must lie above 1; set --from-scratch or MODEL 'x'
    """
    try:
        yield
    except ValueError as error:
        told = str(error).replace("task is not given, and ", "").replace("set task (--task) to", "set --task to")
        raise ValueError(_NAMES.sub(_in_option, re.sub(r"\bdata (?=['\"])", "--probe ", told))) from error


def _in_option(found: re.Match[str]) -> str:
    """NAME=value is an option and its value, NAME alone the option."""
    name, blank = (found[1], " ") if found[1] else (found[2], " " if found[3] else "")
    return f"{_OPTIONS[name]}{blank}"
