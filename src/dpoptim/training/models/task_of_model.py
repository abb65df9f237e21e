"""Which task a model is for, where a recipe does not say."""

from __future__ import annotations

from pathlib import Path

from dpoptim.training.losses.tasks import Task
from dpoptim.training.support.optional import needed, one_line

_ENDINGS = {
    "ForMaskedLM": Task.MASKED_LM,
    "LMHeadModel": Task.CAUSAL_LM,
    "ForCausalLM": Task.CAUSAL_LM,
    "ForSequenceClassification": Task.TEXT_CLASSIFICATION,
    "ForImageClassification": Task.IMAGE_CLASSIFICATION,
}


def task_of_model(name: str) -> Task:
    """The task that a model's configuration names its class for; the built-in models have one each.

    Edge cases: one ValueError line where the configuration cannot be read, or names no class of a known task.

    >>> task_of_model("mlp")
    <Task.TABULAR_CLASSIFICATION: 'tabular-classification'>
    """
    if name == "mlp":
        return Task.TABULAR_CLASSIFICATION
    if name == "small-cnn":
        return Task.IMAGE_CLASSIFICATION
    transformers = needed("transformers", f"model={name!r}")
    path = Path(name).expanduser()
    if (path.is_absolute() or name.startswith(".")) and not path.is_dir():
        raise ValueError(f"model={name!r} does not exist; give a folder made by save_pretrained, or a hub name")
    try:
        config = transformers.AutoConfig.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:
        raise ValueError(
            f"model={name!r} is no folder of a model, and the Hugging Face hub does not give it ({one_line(error)}); "
            "give a local folder"
        ) from error
    for architecture in config.architectures or ():
        for ending, task in _ENDINGS.items():
            if architecture.endswith(ending):
                return task
    raise ValueError(
        f"task=None: the configuration of model={name!r} does not say what it is for ({config.architectures}); set "
        f"task to one of {', '.join(task.value for task in Task)}"
    )
