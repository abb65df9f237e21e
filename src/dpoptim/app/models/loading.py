"""Models and tokenizers by name or folder, with every failure in one line.

New weights (a classification head, LoRA factors, a whole model from its configuration) are drawn from `seed` and leave
the global random numbers as they were.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpoptim.app.models import builtin
from dpoptim.integrations.losses import Task, trained_elsewhere
from dpoptim.integrations.optional import first_line, require

_AUTO_CLASSES = {
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.TEXT_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
}
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "*.bin.index.json")
_ADAPTER = "adapter_config.json"
_HEADS = ("classifier", "score", "classification_head")


def load_model(
    task: Task,
    name_or_path: str | Path,
    *,
    num_labels: int | None = None,
    label_names: Sequence[str] | None = None,
    columns: int | None = None,
    lora_rank: int | None = None,
    from_scratch: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """The model of a task: a folder, a name on the Hugging Face hub, or one that is built in.

    Built in are "mlp" (tabular; `columns` features) and "small-cnn" (images): see `builtin`. With `from_scratch` only
    the configuration is read and all weights are new. `lora_rank` freezes the model and adds LoRA factors of that rank
    (scaled by 2) to the layers that peft names for the architecture, else to all linear layers; a classification head
    stays trainable. A folder of LoRA factors is its base model with them added.

    Guarantee: the same arguments give the same weights; the global random numbers stay as they were.
    Edge cases: one ValueError line for a package that is not installed, a name that is not found, a folder without
    config.json or without weights, and weights that do not fit the task.

    >>> load_model(Task.TABULAR_CLASSIFICATION, "mlp", columns=4, num_labels=3)[0]
    Linear(in_features=4, out_features=128, bias=True)
    """
    if task.is_classification and (num_labels is None or num_labels < 2):
        raise ValueError(f"num_labels={num_labels!r}: {task.value} needs two labels or more")
    name = _expanded(name_or_path)
    with _own_randomness(seed):
        if name == "mlp" or name == "small-cnn" or task is Task.TABULAR_CLASSIFICATION:
            model = _built_in(task, name, num_labels or 0, columns)
            if lora_rank is not None:
                raise ValueError(f"lora_rank={lora_rank} is for pretrained models; {name!r} starts from random weights")
            return model.to(dtype)
        model = _from_transformers(task, name, num_labels, label_names, from_scratch, dtype)
        return model if lora_rank is None else add_lora(model, task, rank=lora_rank)


def load_tokenizer(name_or_path: str | Path) -> Any:
    """The tokenizer in a folder or of a name on the Hugging Face hub.

    Edge cases: one ValueError line where there is none, or transformers is not installed.
    """
    name = _expanded(name_or_path)
    transformers = require("transformers", f"the tokenizer of {name!r}")
    _check_folder(name, "tokenizer")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ValueError(_not_found("tokenizer", name, error)) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes one without words where it finds no file
        raise ValueError(f"tokenizer={name!r} has no vocabulary; save the tokenizer beside the model")
    return tokenizer


def load_pixel_scale(name_or_path: str | Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the colours that a pretrained image model expects, of pixels in [0, 1].

    From its preprocessor_config.json; (½, ½, ½) for both where it has none. They come with the model and were not
    computed on the private images.
    """
    base = require("transformers.image_processing_base", f"the image settings of {str(name_or_path)!r}")
    try:
        found, _ = base.ImageProcessingMixin.get_image_processor_dict(_expanded(name_or_path))
    except Exception:  # a model need not have the file
        found = {}
    half = (0.5, 0.5, 0.5)
    if not found.get("do_normalize", True):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return tuple(found.get("image_mean") or half), tuple(found.get("image_std") or half)


def add_lora(model: Any, task: Task, *, rank: int, targets: Sequence[str] | str | None = None) -> nn.Module:
    """`model` frozen, with trainable LoRA factors of this rank beside its layers, and a trainable head.

    `targets` are names of layers; by default those that peft names for the architecture, else all linear ones.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora_rank must be a whole number ≥ 1 or None, got {rank!r}")
    peft = require("peft", f"lora_rank={rank}")
    kinds = {Task.CAUSAL_LM: "CAUSAL_LM", Task.TEXT_CLASSIFICATION: "SEQ_CLS"}
    heads = [name for name in _HEADS if hasattr(model, name)] if task.is_classification else []

    def config(chosen: Sequence[str] | str | None) -> Any:
        return peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=chosen,
            exclude_modules=heads or None,
            modules_to_save=heads or None,
            task_type=kinds.get(task),
            fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        )

    if targets is None:
        known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        targets = known.get(getattr(model.config, "model_type", ""), "all-linear")
    try:
        return peft.get_peft_model(model, config(targets))
    except ValueError as error:
        raise ValueError(f"targets={targets!r} cannot be used: {first_line(error)}") from error


def base_of_adapter(name: str) -> str | None:
    """The model that a folder of LoRA factors belongs to; None for a folder or name of another kind."""
    file = Path(name).expanduser() / _ADAPTER
    if not file.is_file():
        return None
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"model={name!r} holds LoRA factors and does not say of which model; give a whole model")
    return str(base)


def _with_adapter(name: str, model: Any) -> nn.Module:
    """The model with the LoRA factors in a folder added to its weights."""
    peft = require("peft", f"model={name!r}, which holds LoRA factors,")
    try:
        merged: nn.Module = peft.PeftModel.from_pretrained(model, name).merge_and_unload()
    except Exception as error:
        raise ValueError(f"model={name!r} holds LoRA factors that cannot be loaded: {first_line(error)}") from error
    return merged.requires_grad_(True)


def _built_in(task: Task, name: str, num_labels: int, columns: int | None) -> nn.Module:
    if task is Task.TABULAR_CLASSIFICATION and name == "mlp":
        if columns is None:
            raise ValueError("columns=None: the built-in mlp needs the number of features")
        return builtin.MLP(columns=columns, num_labels=num_labels)
    if task is Task.IMAGE_CLASSIFICATION and name == "small-cnn":
        return builtin.SmallCNN(num_labels=num_labels)
    raise ValueError(
        f"model={name!r} does not do {task.value}; 'mlp' does tabular-classification and 'small-cnn' "
        "image-classification"
    )


def _from_transformers(
    task: Task,
    name: str,
    num_labels: int | None,
    label_names: Sequence[str] | None,
    from_scratch: bool,
    dtype: torch.dtype,
) -> Any:
    transformers = require("transformers", f"model={name!r}")
    _check_folder(name, "model", weights=not from_scratch)
    settings: dict[str, Any] = {}
    if task.is_classification:
        names = list(label_names) if label_names is not None else [str(i) for i in range(num_labels or 0)]
        settings = {
            "num_labels": num_labels,
            "id2label": dict(enumerate(names)),
            "label2id": {label: i for i, label in enumerate(names)},
        }
    auto = getattr(transformers, _AUTO_CLASSES[task])
    base = base_of_adapter(name)
    if base is not None:
        return _with_adapter(name, _from_transformers(task, base, num_labels, label_names, from_scratch, dtype))
    try:
        config = transformers.AutoConfig.from_pretrained(name, **settings)
    except Exception as error:
        raise ValueError(_not_found("model", name, error)) from error
    if type(config) not in auto._model_mapping:
        elsewhere = trained_elsewhere(config.architectures or ())
        raise ValueError(
            f"model={name!r} is a {config.model_type!r}, which transformers has no {_AUTO_CLASSES[task]} for; choose "
            f"another task or model{'' if elsewhere is None else f'; it is {elsewhere}'}"
        )
    try:
        if from_scratch:
            return auto.from_config(config, dtype=dtype)
        sizes = {"ignore_mismatched_sizes": True} if task.is_classification else {}  # a head for other labels
        return auto.from_pretrained(name, config=config, dtype=dtype, **sizes)
    except Exception as error:
        raise ValueError(_not_found("model", name, error)) from error


def _expanded(name_or_path: str | Path) -> str:
    name = str(name_or_path)
    return str(Path(name).expanduser()) if name.startswith("~") else name


def _check_folder(name: str, what: str, *, weights: bool = False) -> None:
    folder = Path(name)
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith("."):
            raise ValueError(f"{what}={name!r} does not exist; give a folder made by save_pretrained, or a hub name")
        return
    if what == "model" and not any((folder / file).is_file() for file in ("config.json", _ADAPTER)):
        raise ValueError(f"model={name!r} is a folder without config.json; give one made by save_pretrained")
    if weights and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ValueError(
            f"model={name!r} is a folder without weights (model.safetensors); set from_scratch to start from new ones"
        )


def _not_found(what: str, name: str, error: Exception) -> str:
    if Path(name).is_dir():
        return f"{what}={name!r} cannot be loaded from its folder: {first_line(error)}"
    return (
        f"{what}={name!r}: there is no such folder here, and the Hugging Face hub does not give it "
        f"({first_line(error)}); check the path"
    )


@contextlib.contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
