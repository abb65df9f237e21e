"""Which task a model is for, where a recipe does not say."""

from __future__ import annotations

import json
from pathlib import Path

from dpoptim.app.models.loading import base_of_adapter
from dpoptim.integrations.losses import Task, tasks_of_classes, trained_elsewhere
from dpoptim.integrations.optional import first_line, require

_OF_ADAPTER = {"CAUSAL_LM": Task.CAUSAL_LM, "SEQ_CLS": Task.TEXT_CLASSIFICATION}


def task_of_model(name: str) -> Task:
    """The task that a model's configuration names its class for; the built-in models have one each.

    Edge cases: one ValueError line where the configuration cannot be read, or names no class of a known task.
    A class that also makes a text of a text (BART's) is refused too: which one is meant must be said.

    >>> task_of_model("mlp")
    <Task.TABULAR_CLASSIFICATION: 'tabular-classification'>
    """
    if name == "mlp":
        return Task.TABULAR_CLASSIFICATION
    if name == "small-cnn":
        return Task.IMAGE_CLASSIFICATION
    transformers = require("transformers", f"model={name!r}")
    path = Path(name).expanduser()
    if (path.is_absolute() or name.startswith(".")) and not path.is_dir():
        raise ValueError(f"model={name!r} does not exist; give a folder made by save_pretrained, or a hub name")
    base = base_of_adapter(name)
    if base is not None:
        kind = json.loads((path / "adapter_config.json").read_text(encoding="utf-8")).get("task_type")
        return _OF_ADAPTER.get(kind) or task_of_model(base)
    try:
        config = transformers.AutoConfig.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:
        raise ValueError(
            f"model={name!r} cannot be loaded from its folder: {first_line(error)}"
            if path.is_dir()
            else f"model={name!r}: there is no such folder here, and the Hugging Face hub does not give it "
            f"({first_line(error)}); check the path"
        ) from error
    found = tasks_of_classes(config.architectures or ())
    elsewhere = trained_elsewhere(config.architectures or ())
    if elsewhere is not None:
        own = f"; or set task (--task) to {' or '.join(task.value for task in found)}" if found else ""
        raise ValueError(f"model={name!r} ({', '.join(config.architectures)}) is {elsewhere}{own}")
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"task is not given, and the configuration of model={name!r} does not say what it is for "
        f"({', '.join(config.architectures or ['no class'])}); set task (--task) to one of "
        f"{', '.join(task.value for task in Task)}"
    )
