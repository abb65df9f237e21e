"""Load models and tokenizers by name or folder; three small models are built in.

New weights (a classification head, LoRA factors, a whole model from its configuration) are drawn from `seed` and do not
change the global random state.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from dpoptim.integrations.losses import Task, tasks_of_classes, trained_elsewhere
from dpoptim.integrations.optional import first_line, require
from dpoptim.integrations.tables import table_model

CNN_IMAGE_SIZE = 32
_AUTO_CLASSES = {
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.TEXT_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
}
_TABULAR = (Task.TABULAR_CLASSIFICATION, Task.TABULAR_REGRESSION)
_BUILT_IN = {"mlp": _TABULAR, "linear": _TABULAR, "small-cnn": (Task.IMAGE_CLASSIFICATION,)}
_ADAPTER = "adapter_config.json"
_ADAPTER_TASKS = {"CAUSAL_LM": Task.CAUSAL_LM, "SEQ_CLS": Task.TEXT_CLASSIFICATION}
_HEADS = ("classifier", "score", "classification_head")


class SmallCNN(nn.Module):
    """Three convolutions with GroupNorm (BatchNorm would mix examples), ReLU and pooling, then a linear classifier."""

    def __init__(self, *, num_labels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(128, num_labels)

    def forward(self, pixel_values: Tensor) -> Tensor:  # [examples, 3, height, width], sides of at least 8
        return cast(Tensor, self.classifier(self.features(pixel_values).mean((2, 3))))


def load_model(
    task: Task,
    name_or_path: str | Path,
    *,
    num_labels: int | None = None,
    label_names: Sequence[str] | None = None,
    columns: int | None = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora_targets: Sequence[str] | None = None,
    from_scratch: bool = False,
    width: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """Load the model for a task.

    Args:
        task: What is predicted.
        name_or_path: A folder, a name on the Hugging Face hub, "mlp" or "linear" (tabular) or "small-cnn" (images). A
            folder of LoRA factors loads its base model with the factors added.
        num_labels: The number of labels, for classification without `label_names`.
        label_names: The names of the labels, saved in the model's configuration.
        columns: The number of features, for "mlp" and "linear".
        lora_rank: Freeze the model and add LoRA factors of this rank; see `add_lora`, also for the next two.
        lora_alpha: The scale of the factors, times their rank.
        lora_targets: The layers that get factors.
        from_scratch: Read the configuration only, and draw all weights.
        width: The hidden units of "mlp". Defaults to 32.
        seed: The seed of new weights. The same arguments give the same weights.

    Raises:
        ValueError: A package is not installed, nothing has this name, the folder is incomplete, or the model does not
            fit the task.

    >>> load_model(Task.TABULAR_CLASSIFICATION, "mlp", columns=4, num_labels=3)[0]
    Linear(in_features=4, out_features=32, bias=True)
    """
    labels = label_names or [str(place) for place in range(num_labels or 0)]
    if task.is_classification and len(labels) < 2:
        raise ValueError(f"{task.value} needs at least two labels, got {len(labels)}")
    name = _expanded(name_or_path)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        check_does(name, task)
        if name in _BUILT_IN:
            if lora_rank is not None:
                raise ValueError(f"lora_rank={lora_rank} is for pretrained models; {name!r} has random weights")
            if name == "small-cnn":
                return SmallCNN(num_labels=len(labels))
            if not columns:
                raise ValueError(f"columns={columns}: the built-in {name} needs the number of features")
            outputs = len(labels) if task.is_classification else 1
            return table_model(name, columns=columns, outputs=outputs, width=width)
        model = _from_transformers(task, name, labels, from_scratch)
        if lora_rank is None:
            return model
        return add_lora(model, task, rank=lora_rank, alpha=lora_alpha, targets=lora_targets)


def check_does(name: str, task: Task) -> None:
    """Refuse a built-in model for a task that it does not do, and other models for tables."""
    if (name in _BUILT_IN or task.is_tabular) and task not in _BUILT_IN.get(name, ()):
        own = (f"{known!r} does {' and '.join(t.value for t in its)}" for known, its in _BUILT_IN.items())
        raise ValueError(f"model={name!r} does not do {task.value}; {', '.join(own)}")


def load_tokenizer(name_or_path: str | Path) -> Any:
    """Load the tokenizer in a folder or of a name on the Hugging Face hub.

    Raises:
        ValueError: There is none, or transformers is not installed.
    """
    name = _expanded(name_or_path)
    transformers = require("transformers", f"the tokenizer of {name!r}")
    with _loading("tokenizer", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one if it finds no file
        raise ValueError(f"tokenizer={name!r} has no vocabulary; save the tokenizer in the model's folder")
    return tokenizer


def load_pixel_scale(name: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and standard deviation of colours in a model's preprocessor_config.json, ½ by default."""
    half = (0.5, 0.5, 0.5)
    if name is None or name in _BUILT_IN:
        return half, half
    base = require("transformers.image_processing_base", f"the image settings of {name!r}")
    try:
        found, _ = base.ImageProcessingMixin.get_image_processor_dict(_expanded(name))
    except Exception:  # a model need not have the file
        found = {}
    if not found.get("do_normalize", True):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return tuple(found.get("image_mean") or half), tuple(found.get("image_std") or half)


def add_lora(
    model: Any, task: Task, *, rank: int, alpha: float | None = None, targets: Sequence[str] | None = None
) -> nn.Module:
    """Freeze a model and add trainable LoRA factors; a classification head stays trainable.

    Args:
        model: A model of transformers.
        task: What the model predicts.
        rank: The rank of the factors.
        alpha: The factors are scaled by alpha/rank. Defaults to 2·rank.
        targets: The ends of the names of the layers that get factors, or ("all-linear",). Defaults to the layers that
            peft names for the architecture, or else to all linear layers.
    """
    peft = require("peft", f"lora_rank={rank}")
    heads = [name for name in _HEADS if hasattr(model, name)] if task.is_classification else []
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    chosen = "all-linear" if tuple(targets or ()) == ("all-linear",) else targets and list(targets)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=chosen or known.get(model.config.model_type, "all-linear"),
        exclude_modules=heads or None,
        modules_to_save=heads or None,
        task_type={found: name for name, found in _ADAPTER_TASKS.items()}.get(task),
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"lora_rank={rank} cannot be used: {first_line(error)}") from error


def task_of_model(name: str) -> Task:
    """The task of the class that a model's configuration names; classification for built-in models of tables."""
    if name in _BUILT_IN:
        return _BUILT_IN[name][0]
    transformers = require("transformers", f"model={name!r}")
    name = _expanded(name)
    adapter = _adapter(name)
    if adapter is not None:
        return _ADAPTER_TASKS.get(str(adapter.get("task_type"))) or task_of_model(adapter["base_model_name_or_path"])
    with _loading("model", name):
        classes = transformers.AutoConfig.from_pretrained(name).architectures or ()
    found, elsewhere = tasks_of_classes(classes), trained_elsewhere(classes)
    if elsewhere is not None:
        own = f"; or set task (--task) to {' or '.join(task.value for task in found)}" if found else ""
        raise ValueError(f"model={name!r} ({', '.join(classes)}) is {elsewhere}{own}")
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"the configuration of model={name!r} does not name its task ({', '.join(classes) or 'no class'}); set task "
        f"(--task) to one of {', '.join(task.value for task in Task)}"
    )


def _adapter(name: str) -> dict[str, Any] | None:
    """The configuration of a folder of LoRA factors, with their base model; None for any other folder or name."""
    file = Path(name) / _ADAPTER
    if not file.is_file():
        return None
    with _loading("model", name):
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not found.get("base_model_name_or_path"):
        raise ValueError(f"{file} does not name the base model of these LoRA factors; give a whole model")
    return found


def _from_transformers(task: Task, name: str, labels: Sequence[str], from_scratch: bool) -> Any:
    transformers = require("transformers", f"model={name!r}")
    adapter = _adapter(name)
    if adapter is not None:
        peft = require("peft", f"model={name!r}, which holds LoRA factors,")
        model = _from_transformers(task, adapter["base_model_name_or_path"], labels, from_scratch)
        with _loading("model", name):
            return peft.PeftModel.from_pretrained(model, name).merge_and_unload().requires_grad_(True)
    places = {label: place for place, label in enumerate(labels)}
    settings = {"id2label": dict(enumerate(labels)), "label2id": places} if task.is_classification else {}
    auto = getattr(transformers, _AUTO_CLASSES[task])
    with _loading("model", name):
        config = transformers.AutoConfig.from_pretrained(name, **settings)
    if type(config) not in auto._model_mapping:
        elsewhere = trained_elsewhere(config.architectures or ())
        raise ValueError(
            f"model={name!r} is a {config.model_type!r}, and transformers has no {_AUTO_CLASSES[task]} for it; "
            f"{'choose a different task or model' if elsewhere is None else f'it is {elsewhere}'}"
        )
    with _loading("model", name):
        if from_scratch:
            return auto.from_config(config, dtype=torch.float32)
        sizes = {"ignore_mismatched_sizes": True} if task.is_classification else {}  # a head for other labels
        return auto.from_pretrained(name, config=config, dtype=torch.float32, **sizes)


def _expanded(name_or_path: str | Path) -> str:
    name = str(name_or_path)
    return str(Path(name).expanduser()) if name.startswith("~") else name


@contextlib.contextmanager
def _loading(what: str, name: str) -> Iterator[None]:
    """Turn the many errors of transformers, peft and the hub into one line."""
    try:
        yield
    except Exception as error:
        problem = f"cannot be loaded ({first_line(error)})"
        if not Path(name).is_dir():
            # A name on the hub may exist even if the hub was not reached.
            is_hub_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)
            near = get_close_matches(name, _BUILT_IN, 1)
            problem = f"{'cannot be loaded' if is_hub_name else 'does not exist'}: it is not a folder here"
            if near:
                problem += f"; did you mean {near[0]}?"
            elif is_hub_name:
                problem += f", and the Hugging Face hub did not provide it ({first_line(error)})"
        raise ValueError(f"{what}={name!r} {problem}") from error
