"""Prepare a model and records for a training loop: examples, batches, masks and the loss of each example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.app.data.examples import (
    Batch,
    CausalCollate,
    ImageDataset,
    MaskedCollate,
    Padding,
    RowDataset,
    TensorCollate,
    TensorExample,
    TextCollate,
    TextExample,
    TokenDataset,
)
from dpoptim.app.data.masking import evaluation_key, masked, training_key
from dpoptim.app.data.records import RecordKind, Records
from dpoptim.app.models.loading import CNN_IMAGE_SIZE, load_model, load_pixel_scale, load_tokenizer
from dpoptim.data import PrivateLoader
from dpoptim.integrations.losses import ExampleLosses, Task, check_is_causal, example_losses
from dpoptim.integrations.padding_check import check_padding
from dpoptim.integrations.token_losses import IGNORED, can_read_targets

MAX_LENGTH = {Task.MASKED_LM: 512, Task.CAUSAL_LM: 1024, Task.TEXT_CLASSIFICATION: 512}
_CHUNK = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A model with its examples and their losses.

        loader = dpoptim.private_loader(prepared.dataset, plan, lengths=prepared.lengths, micro_batch_tokens=2**16,
                                        bucket=prepared.bucket, collate_fn=prepared.collate)
        for batch in prepared.batches(loader):
            prepared.loss_per_example(model, batch).sum().backward()
            optimizer.step()

    `lengths` are the tokens per example for `private_loader(lengths=)`, None if all examples have one size.

    Guarantee: example i of `dataset` is record i, and loss j depends on example j alone. The masks of masked-lm are a
    function of (seed, step, the record's tokens): new at each step, and the same after a restart.
    """

    task: Task
    model: nn.Module
    tokenizer: Any
    records: Records
    dataset: Dataset[Any]
    lengths: NDArray[np.int64] | None
    collate: Callable[[Sequence[Any]], Batch]
    targets_only: bool  # language models: logits are computed at targets only
    max_length: int | None
    bucket: int
    seed: int
    make_dataset: Callable[[Records], tuple[Dataset[Any], NDArray[np.int64] | None]]

    def batches(self, loader: PrivateLoader) -> Iterator[Batch]:
        """Iterate over the loader's batches on the model's device, each masked for its step."""
        where = next(self.model.parameters()).device
        for batch in loader:
            step = loader.next_step - 1 if loader.step_ends else loader.next_step
            moved = {name: values.to(where, non_blocking=True) for name, values in batch.items()}
            yield self.at_step(moved, step)

    def at_step(self, batch: Batch, step: int) -> Batch:
        """Mask the batch for step `step` (from 0); only masked-lm changes it."""
        return self._masked(batch, training_key(self.seed, step))

    def loss_per_example(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each example, [examples]: the mean over its targets, or 0 if it has none."""
        return example_losses(self.task, model, batch, targets_only=self.targets_only).losses

    def evaluate(self, model: nn.Module, batch: Batch) -> ExampleLosses:
        """Losses and targets of a batch from `collate`, with each record's fixed evaluation mask.

        The caller sets the mode (`model.eval()`) and turns gradients off. Losses of private records are not private.
        """
        return example_losses(self.task, model, self._masked(batch, evaluation_key()), targets_only=self.targets_only)

    def on(self, records: Records) -> Prepared:
        """The same model and settings for other records, such as held-out ones.

        Raises:
            ValueError: The records do not fit the task, or have other labels or features. Read them with
                `label_names=` of the training records.
        """
        _check_records(self.task, records)
        if self.task.is_classification and records.label_names != self.records.label_names:
            raise ValueError(
                f"data {records.source!r} has labels {list(records.label_names)} and the training records have "
                f"{list(self.records.label_names)}; read it with label_names= of the training records"
            )
        if records.feature_names != self.records.feature_names:
            raise ValueError(
                f"data {records.source!r} has features {list(records.feature_names)} and the training records have "
                f"{list(self.records.feature_names)}; give the same columns in the same order"
            )
        dataset, lengths = self.make_dataset(records)
        return dataclasses.replace(self, records=records, dataset=dataset, lengths=lengths)

    def _masked(self, batch: Batch, key: int) -> Batch:
        if self.task is not Task.MASKED_LM:
            return batch
        assert "places" not in batch, "the batch is masked already"
        ids, places, labels = masked(
            batch["input_ids"],
            batch["maskable"],
            batch["is_target"],
            batch["record"],
            key=key,
            mask_id=self.tokenizer.mask_token_id,
            vocabulary=len(self.tokenizer),
        )
        return {
            "input_ids": ids, "attention_mask": batch["attention_mask"], "places": places, "labels": labels
        }  # fmt: skip


def prepare(
    *,
    task: Task,
    model: str | Path | nn.Module,
    records: Records,
    max_length: int | None = None,
    tokenizer: Any = None,
    mask_fraction: float = 0.15,
    lora_rank: int | None = None,
    from_scratch: bool = False,
    dtype: torch.dtype = torch.float32,
    bucket: int = 64,
    image_size: int | None = None,
    seed: int = 0,
) -> Prepared:
    """Load the model, turn the records into its inputs, and define the loss of each example.

    Args:
        task: What is predicted.
        model: A folder, a hub name, "mlp" or "small-cnn"; or a module, which is used as it is, in its own dtype.
        records: What to train on.
        max_length: The number of tokens that texts are cut to. Defaults to 512, for causal-lm to 1024, or to the
            model's limit if that is less. In causal-lm the tokenizer's end-of-text token closes a text.
        tokenizer: A tokenizer or its folder. Defaults to the model's own; a module needs one.
        mask_fraction: The share of tokens that masked-lm masks.
        lora_rank: Train LoRA factors of this rank.
        from_scratch: Start from new weights.
        dtype: The dtype of the parameters.
        bucket: Texts are padded to a multiple of this.
        image_size: Images are resized to this. Defaults to the model's size, or 32.
        seed: The seed of new weights and masks.

    Raises:
        ValueError: Records, task and model do not fit; padding changes the model's losses; a causal model sees later
            tokens; or a parameter is not finite.

    Guarantee: record i is example i. Only the label names are taken from all records: no vocabulary, no mean. A text
    without tokens becomes one token of padding with loss 0.

    >>> records = Records(
    ...     kind=RecordKind.TABULAR, source="memory", features=np.eye(3, dtype=np.float32),
    ...     feature_names=("a", "b", "c"), labels=np.array([0, 1, 1]), label_names=("no", "yes"))
    >>> prepared = prepare(task=Task.TABULAR_CLASSIFICATION, model="mlp", records=records)
    >>> batch = prepared.collate([prepared.dataset[i] for i in range(3)])
    >>> prepared.loss_per_example(prepared.model, batch).shape
    torch.Size([3])
    """
    _check_asked(task, records, mask_fraction)
    name = None if isinstance(model, nn.Module) else str(model)
    if name is None and (lora_rank is not None or from_scratch):
        raise ValueError(
            f"lora_rank={lora_rank} and from_scratch={from_scratch} need the model's folder, not a module; give the "
            "folder, or use add_lora"
        )
    tokenizer = _tokenizer(tokenizer, name, task) if task.reads_text else None
    labels = records.label_names if task.is_classification else None
    module = model if isinstance(model, nn.Module) else load_model(
        task, model, num_labels=None if labels is None else len(labels), label_names=labels,
        columns=len(records.feature_names) or None, lora_rank=lora_rank, from_scratch=from_scratch, dtype=dtype,
        seed=seed,
    )  # fmt: skip
    broken = not_finite(module)
    if broken:
        raise ValueError(
            f"model={name or type(module).__name__!r} has NaN or infinite values in {len(broken)} parameters (first: "
            f"{broken[0]!r}) before any training; give finite weights"
        )
    made = _for_text if task.reads_text else _for_images if task is Task.IMAGE_CLASSIFICATION else _for_rows
    make_dataset, collate, length = made(
        _Settings(
            task=task, name=name, model=module, tokenizer=tokenizer, max_length=max_length, bucket=bucket,
            mask_fraction=mask_fraction, image_size=image_size,
        )
    )  # fmt: skip
    dataset, lengths = make_dataset(records)
    prepared = Prepared(
        task=task,
        model=module,
        tokenizer=tokenizer,
        records=records,
        dataset=dataset,
        lengths=lengths,
        collate=collate,
        targets_only=not task.is_classification and can_read_targets(module),
        max_length=length,
        bucket=bucket,
        seed=seed,
        make_dataset=make_dataset,
    )
    if task is Task.CAUSAL_LM:
        check_is_causal(module)
    if task.reads_text:
        _check_padding(prepared)
    return prepared


def _check_padding(prepared: Prepared) -> None:
    """Refuse a model that gives a short text a different loss beside a long one, on made-up tokens."""
    words = np.setdiff1d(np.arange(len(prepared.tokenizer)), prepared.tokenizer.all_special_ids)
    if len(words) == 0:
        return
    generator = np.random.default_rng(0)
    texts = [
        TextExample(generator.choice(words, length).astype(np.int32), 0, False)
        for length in (min(5, prepared.max_length or 5), prepared.max_length or 5)
    ]
    device = next(prepared.model.parameters()).device
    check_padding(
        prepared.model,
        lambda model, batch: prepared.evaluate(model, batch).losses,
        lambda examples: {name: tensor.to(device) for name, tensor in prepared.collate(examples).items()},
        texts,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Settings:
    """What the inputs depend on besides the records."""

    task: Task
    name: str | None
    model: nn.Module
    tokenizer: Any
    max_length: int | None
    bucket: int
    mask_fraction: float
    image_size: int | None

    @property
    def config(self) -> Any:
        return getattr(self.model, "config", None)


_MakeDataset = Callable[[Records], tuple[Dataset[Any], NDArray[np.int64] | None]]
_Made = tuple[_MakeDataset, Callable[[Sequence[Any]], Batch], int | None]


def _check_asked(task: Task, records: Records, mask_fraction: float) -> None:
    """Check task, records and masks before a model is loaded."""
    _check_records(task, records)
    if task.reads_text and records.empty == len(records):
        raise ValueError(f"every text of data {records.source!r} is empty; there is nothing to train on")
    if not 0 < mask_fraction < 1:
        raise ValueError(f"mask_fraction must be between 0 and 1, got {mask_fraction}")


def _check_records(task: Task, records: Records) -> None:
    kinds = {Task.IMAGE_CLASSIFICATION: RecordKind.IMAGE, Task.TABULAR_CLASSIFICATION: RecordKind.TABULAR}
    wanted = kinds.get(task, RecordKind.TEXT)
    if records.kind is not wanted:
        raise ValueError(
            f"{task.value} needs {wanted.value} records, and data {records.source!r} has {records.kind.value} records"
        )
    if task.is_classification and records.labels is None:
        raise ValueError(
            f"{task.value} needs labels, and data {records.source!r} has none; set label_column (--label-column)"
        )
    if task.is_classification and len(records.label_names) < 2:
        raise ValueError(
            f"{task.value} needs at least two labels, and data {records.source!r} has {list(records.label_names)}; "
            "declare them with label_names"
        )


def _tokenizer(given: Any, name: str | None, task: Task) -> Any:
    """The given tokenizer or the one in the given folder, else the model's own."""
    if given is None and name is None:
        raise ValueError("tokenizer=None: give the tokenizer of a model that is a module")
    named = given is None or isinstance(given, str | Path)
    tokenizer = load_tokenizer(str(name) if given is None else given) if named else given
    if task is Task.MASKED_LM and tokenizer.mask_token_id is None:
        raise ValueError(f"tokenizer of {name or 'the model'} has no mask token; masked-lm needs one")
    return tokenizer


def _for_text(settings: _Settings) -> _Made:
    tokenizer, task = settings.tokenizer, settings.task
    rows = _embedding_rows(settings.model)
    if rows is not None and len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {rows} embeddings; give this model's tokenizer"
        )
    length = _length(settings)
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    if settings.config is not None and getattr(settings.config, "pad_token_id", None) is None:
        settings.config.pad_token_id = pad_id  # classifying decoders look for the last token before the padding
    padding = Padding(pad_id=pad_id, bucket=settings.bucket, max_length=length)
    closing = tokenizer.eos_token_id if task is Task.CAUSAL_LM else None

    def make_dataset(records: Records) -> tuple[TokenDataset, NDArray[np.int64]]:
        labels = records.labels if task.is_classification else None
        dataset = TokenDataset(_tokenized(tokenizer, records.texts, length, closing), labels, filler=pad_id)
        return dataset, dataset.lengths

    if task is Task.CAUSAL_LM:
        return make_dataset, CausalCollate(padding=padding), length
    if task is Task.TEXT_CLASSIFICATION:
        return make_dataset, TextCollate(padding=padding), length
    special = tuple(sorted(tokenizer.all_special_ids))
    return (
        make_dataset,
        MaskedCollate(padding=padding, special_ids=special, mask_fraction=settings.mask_fraction),
        length,
    )


def _tokenized(
    tokenizer: Any, texts: Sequence[str], length: int, closing: int | None
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Per chunk of texts: all their tokens in one array, and how many each text has."""
    for start in range(0, len(texts), _CHUNK):
        chunk = list(texts[start : start + _CHUNK])
        rows = tokenizer(chunk, truncation=True, max_length=length, return_attention_mask=False)["input_ids"]
        if closing is not None:
            rows = [[*row, closing] if len(row) < length and row[-1:] != [closing] else row for row in rows]
        counts = np.array([len(row) for row in rows], dtype=np.int64)
        yield np.fromiter((token for row in rows for token in row), dtype=np.int32, count=int(counts.sum())), counts


def _length(settings: _Settings) -> int:
    """How many tokens a text may have."""
    most = _positions(settings)
    if settings.max_length is None:
        return min(MAX_LENGTH[settings.task], most)
    if not 2 <= settings.max_length <= most:
        raise ValueError(f"max_length={settings.max_length} must be between 2 and {most}, the model's limit")
    return settings.max_length


def _positions(settings: _Settings) -> int:
    """The most tokens that model and tokenizer accept; 2^31 if neither has a limit."""
    tables = [
        (module.num_embeddings, module.padding_idx)
        for name, module in settings.model.named_modules()
        if isinstance(module, nn.Embedding)
        and name.rpartition(".")[2] in ("position_embeddings", "wpe", "embed_positions")
    ]
    # RoBERTa's positions begin after those of the padding.
    limits = [rows if padding is None else rows - padding - 1 for rows, padding in tables]
    limits.append(int(getattr(settings.tokenizer, "model_max_length", None) or 2**31))
    if not tables:
        limits.append(int(getattr(settings.config, "max_position_embeddings", None) or 2**31))
    return min(*limits, 2**31)


def _embedding_rows(model: Any) -> int | None:
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _for_images(settings: _Settings) -> _Made:
    size = settings.image_size or getattr(settings.config, "image_size", None) or CNN_IMAGE_SIZE
    if isinstance(size, list | tuple):
        size = size[0]
    if getattr(settings.config, "num_channels", 3) != 3:
        raise ValueError(
            f"the model needs {settings.config.num_channels} colour channels, and images are read as RGB, with 3"
        )
    half = (0.5, 0.5, 0.5)
    has_file = settings.name is not None and settings.name != "small-cnn"
    mean, std = load_pixel_scale(str(settings.name)) if has_file else (half, half)

    def make_dataset(records: Records) -> tuple[ImageDataset, None]:
        assert records.labels is not None  # checked with the task
        return ImageDataset(records.images, records.labels, size=int(size), mean=mean, std=std), None

    return make_dataset, TensorCollate(name="pixel_values"), None


def _for_rows(settings: _Settings) -> _Made:
    def make_dataset(records: Records) -> tuple[RowDataset, None]:
        assert records.features is not None  # checked with the task
        assert records.labels is not None
        return RowDataset(records.features, records.labels), None

    return make_dataset, TensorCollate(name="features"), None


# -- checks and examples that touch no record -----------------------------------------------------------------------


def random_batch(prepared: Prepared, lengths: Sequence[int]) -> Batch:
    """Make a batch of random examples of these lengths (images and rows: of this number) on the model's device.

    Guarantee: the batch contains nothing of a record except the size that all images or rows have.
    """
    generator = np.random.default_rng(0)
    examples: list[Any] = []
    classes = max(1, len(prepared.records.label_names))
    dataset: Any = prepared.dataset
    shape = None if prepared.lengths is not None else dataset[0].values.shape
    for length in lengths:
        label = int(generator.integers(classes)) if prepared.task.is_classification else IGNORED
        if shape is not None:
            values = torch.from_numpy(generator.normal(size=tuple(shape)).astype(np.float32))
            examples.append(TensorExample(values, label))
            continue
        words = np.setdiff1d(np.arange(len(prepared.tokenizer)), prepared.tokenizer.all_special_ids)
        examples.append(TextExample(generator.choice(words, int(length)).astype(np.int32), label, False))
    device = next(prepared.model.parameters()).device
    batch = {name: values.to(device) for name, values in prepared.collate(examples).items()}
    return prepared.at_step(batch, 0)


def not_finite(model: nn.Module) -> list[str]:
    """The names of the parameters that hold a NaN or an infinity."""
    named = list(model.named_parameters())
    if not named:
        return []
    fine = torch.stack([parameter.detach().isfinite().all() for _, parameter in named]).tolist()  # one wait for a GPU
    return [name for (name, _), finite in zip(named, fine, strict=True) if not finite]
