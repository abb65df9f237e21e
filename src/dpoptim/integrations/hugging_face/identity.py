"""What a run of PrivateTrainer is, so that it goes on as itself or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dpoptim.app.runs.identity import build_of, plan_values
from dpoptim.data import RecordDigests
from dpoptim.data.record_fingerprint import digest_values
from dpoptim.integrations.hugging_face.arguments import PrivacyArguments
from dpoptim.integrations.hugging_face.secret_folder import RunSecrets
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import RunHeader

_SETTINGS = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "seed", "bf16",
)  # fmt: skip
_NO_MATTER = ("key_file", "log_norms", "debug_loss")


def identity_for(
    *,
    secrets: RunSecrets,
    args: Any,
    privacy: PrivacyArguments,
    optimizer: PrivateOptimizer,
    model: nn.Module,
    records: Mapping[str, RecordDigests],
) -> RunHeader:
    """Of a run whose optimizer was just made: settings, the model's build, frozen weights.

    Frozen parameters (LoRA) are not in a checkpoint, so they are read, a gigabyte a second. Code (loss, collator,
    schedule, callbacks) is not compared: what it changes shows in the gradients of a step that is repeated.
    """
    key = secrets.key
    own = {name: _plain(getattr(args, name, None)) for name in _SETTINGS}
    asked = {name: _plain(value) for name, value in vars(privacy).items() if name not in _NO_MATTER}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    settings = {
        **own,
        **asked,
        "plan": plan_values(optimizer.plan),
        "the run": secrets.name,
        "the model's build": build_of(model, key),
        "the frozen weight": digest_values(frozen, key),
        "the optimizer": digest_values(_optimizer(optimizer), key),
    }
    return RunHeader(key=key, settings=settings, records={name: found.whole for name, found in records.items()})


def _optimizer(optimizer: PrivateOptimizer) -> Any:
    slots = [repr(part) for part in (optimizer.rule, optimizer.geometry, optimizer.second_moment)]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return [type(optimizer).__name__, slots, [_plain(group) for group in groups]]


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
