"""What a run of PrivateTrainer is, so that it goes on as itself or not at all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import RecordDigests, RunIdentity
from dpoptim.privacy.record_digests import digest_values
from dpoptim.training.hugging_face.arguments import PrivacyArguments
from dpoptim.training.runs.identity import build_of, plan_values, surroundings_of

_SETTINGS = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "seed", "bf16",
)  # fmt: skip
_ROUNDING = ("per_device_train_batch_size", "dataloader_num_workers", "gradient_checkpointing", "tf32")
_NO_MATTER = ("key_file", "log_norms", "debug_loss")


def identity_for(
    *,
    key: NoiseKey,
    args: Any,
    privacy: PrivacyArguments,
    optimizer: PrivateOptimizer,
    scheduler: Any,
    model: nn.Module,
    loss: Any,
    collator: Any,
    records: Mapping[str, RecordDigests],
) -> RunIdentity:
    """Of a run whose optimizer and scheduler were just made: settings, code of loss and schedule, frozen weights.

    Frozen parameters (LoRA) are not in a checkpoint, so they are read, a gigabyte a second. Functions are known by
    their source; what they read from elsewhere is not noticed, nor what callbacks do to the learning rate.
    """
    own = {name: _plain(getattr(args, name, None)) for name in _SETTINGS}
    asked = {name: _plain(value) for name, value in vars(privacy).items() if name not in _NO_MATTER}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    settings = {
        **own,
        **asked,
        "plan": plan_values(optimizer.plan),
        "the model's build": build_of(model, key),
        "the frozen weight": digest_values(frozen, key),
        "the optimizer": digest_values(_optimizer(optimizer), key),
        "the scheduler": digest_values(_described(scheduler), key),
        "the loss": digest_values(_described(loss), key),
        "the collator": digest_values(_described(collator), key),
    }
    surroundings = {**surroundings_of(args.device), **{name: _plain(getattr(args, name, None)) for name in _ROUNDING}}
    if args.dataloader_num_workers:  # workers start anew at each checkpoint, and what they draw with them
        surroundings |= {name: _plain(getattr(args, name)) for name in ("save_strategy", "save_steps")}
    digests = {name: found.whole for name, found in records.items()}
    return RunIdentity(key=key.fingerprint(), settings=settings, records=digests, surroundings=surroundings)


def _optimizer(optimizer: PrivateOptimizer) -> Any:
    slots = [repr(part) for part in (optimizer.rule, optimizer.geometry, optimizer.second_moment)]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return [type(optimizer).__name__, slots, [_plain(group) for group in groups]]


def _described(value: Any, depth: int = 3) -> Any:
    """Functions by their source and what they hold, objects by class and plain attributes."""
    if isinstance(value, functools.partial):
        return ["partial", _described(value.func, depth), _plain(value.args), _plain(value.keywords)]
    if inspect.ismethod(value):
        return ["method", _described(value.__func__, depth), _described(value.__self__, depth - 1)]
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        held = [_described(cell, depth - 1) for cell in cells] if depth else []
        return ["function", value.__module__, value.__qualname__, _source(value), _plain(value.__defaults__), held]
    if isinstance(value, torch.optim.lr_scheduler.LambdaLR):
        return ["schedule", _plain(value.state_dict()), [_described(part, depth - 1) for part in value.lr_lambdas]]
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return ["schedule", type(value).__qualname__, _plain(value.state_dict())]
    if isinstance(value, nn.Module | type):
        return repr(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return [kind, _plain(getattr(value, "__dict__", {})) or _plain(value)]


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _source(function: Any) -> Any:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # made where there is no file
        return [function.__code__.co_code, [str(part) for part in function.__code__.co_consts]]


def _plain(value: Any) -> Any:
    """Numbers, texts, and lists and dicts of them; what is none of these is left out."""
    if isinstance(value, bool | int | float | str) or value is None:
        return getattr(value, "value", value)
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items() if _is_plain(part)}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value if _is_plain(part)]
    return str(getattr(value, "value", "")) or None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | Mapping)
