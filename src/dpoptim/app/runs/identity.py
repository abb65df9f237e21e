"""What a run is, so that it goes on as itself or not at all: its settings and its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from dpoptim.app.data.records import RecordKind
from dpoptim.app.models.prepared import Prepared
from dpoptim.app.runs.setup import RunSetup
from dpoptim.data import digest_records
from dpoptim.data.record_fingerprint import digest_values
from dpoptim.integrations.modes import without_peft
from dpoptim.noise import NoiseKey
from dpoptim.privacy import PrivacyPlan, RunHeader

_NO_MATTER = (
    "device", "log_every", "checkpoint_every", "evaluate_every", "micro_batch_size", "micro_batch_tokens",
)  # fmt: skip
_BY_CONTENT = ("data", "validation_data", "model")  # where they lie is no matter: their content is compared
_NOT_BUILT = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")  # set when it is saved


def identity_of(setup: RunSetup, key: NoiseKey) -> RunHeader:
    """Of a run that was set up: the complete recipe, the plan, the model's build, digests of all records.

    It reads every record once: 10 s for a million short texts, and every file of a folder of images.
    """
    recipe = setup.recipe.to_dict()
    left_out = {*_NO_MATTER, *_BY_CONTENT}
    records = {"training": digest_records(_examples(setup.prepared), key, what="data").whole}
    if setup.validation is not None:
        records["held-out"] = digest_records(_examples(setup.validation), key, what="validation_data").whole
    return RunHeader(
        key=key,
        settings={
            **{name: value for name, value in recipe.items() if name not in left_out},
            "plan": plan_values(setup.plan),
            "the model's build": build_of(setup.model, key),
        },
        records=records,
    )


def plan_values(plan: PrivacyPlan) -> dict[str, Any]:
    """The plan as it runs, whatever release its optimizer has chosen."""
    return {name: value for name, value in plan.to_dict().items() if name != "release"}


def build_of(model: nn.Module, key: NoiseKey) -> str:
    """A digest of a model's layers and configuration, dropout rates among them; not of weights."""
    inner = without_peft(model)
    config = inner.config.to_dict() if hasattr(getattr(inner, "config", None), "to_dict") else {}
    kept = {name: str(value) for name, value in config.items() if name not in _NOT_BUILT}
    parameters = [[name, str(value.dtype), value.requires_grad] for name, value in model.named_parameters()]
    return digest_values([repr(model), sorted(kept.items()), parameters], key)


class _Pictures:
    """Images as they lie on the disk, with their labels: to be read and not to be opened."""

    def __init__(self, images: Sequence[Any], labels: Any) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        return self._images[place], None if self._labels is None else int(self._labels[place])


def _examples(prepared: Prepared) -> Any:
    """What is trained on: tokens, so that another tokenizer is noticed, numbers, or the bytes of image files."""
    records = prepared.records
    return _Pictures(records.images, records.labels) if records.kind is RecordKind.IMAGE else prepared.dataset
