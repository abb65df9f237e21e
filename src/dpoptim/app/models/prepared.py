"""Prepare a model and records for a training loop: examples, batches, masks and the loss of each example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
    TextCollate,
    TextExample,
    TokenDataset,
    collate_tensors,
    row_dataset,
)
from dpoptim.app.data.masking import mask_key, masked
from dpoptim.app.data.records import RecordKind, Records
from dpoptim.app.models.loading import CNN_IMAGE_SIZE, load_model, load_pixel_scale, load_tokenizer
from dpoptim.arguments import check_number
from dpoptim.data import PrivateLoader
from dpoptim.integrations.chats import ensure_template, tokenize_chats
from dpoptim.integrations.losses import ExampleLosses, Task, check_is_causal, example_losses
from dpoptim.integrations.padding_check import check_padding
from dpoptim.integrations.released_norms import not_finite
from dpoptim.integrations.token_losses import can_read_targets

_CHUNK = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A model with its examples and their losses.

        loader = dpoptim.private_loader(prepared.dataset, plan, lengths=prepared.lengths, micro_batch_tokens=2**16,
                                        bucket=prepared.bucket, collate_fn=prepared.collate)
        for batch in prepared.batches(loader):
            prepared.loss_per_example(model, batch).sum().backward()
            optimizer.step()

    Guarantee: example i of `dataset` is record i, and loss j depends on example j alone. The masks of masked-lm are a
    function of (seed, step, the record's tokens): new at each step, and the same after a restart.
    """

    task: Task
    model: nn.Module
    tokenizer: Any
    records: Records
    dataset: Dataset[Any]
    collate: Callable[[Sequence[Any]], Batch]
    targets_only: bool  # language models: logits are computed at targets only
    max_length: int | None
    bucket: int
    seed: int
    make_dataset: Callable[[Records], Dataset[Any]]

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """The tokens per example, for `private_loader(lengths=)`; None if all examples have one size."""
        return self.dataset.lengths if isinstance(self.dataset, TokenDataset) else None

    def collated(self, examples: Sequence[Any]) -> Batch:
        """Collate examples on the model's device."""
        where = next(self.model.parameters()).device
        return {name: values.to(where) for name, values in self.collate(examples).items()}

    def batches(self, loader: PrivateLoader) -> Iterator[Batch]:
        """Iterate over the loader's batches on the model's device, each masked for its step."""
        where = next(self.model.parameters()).device
        for batch in loader:
            step = loader.next_step - 1 if loader.step_ends else loader.next_step
            moved = {name: values.to(where, non_blocking=True) for name, values in batch.items()}
            yield self.at_step(moved, step)

    def at_step(self, batch: Batch, step: int) -> Batch:
        """Mask the batch for step `step` (from 0); only masked-lm changes it."""
        return self._masked(batch, mask_key(f"training/{self.seed}/{step}"))

    def loss_per_example(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each example, [examples]: the mean over its targets, or 0 if it has none."""
        return example_losses(self.task, model, batch, targets_only=self.targets_only).losses

    def evaluate(self, model: nn.Module, batch: Batch) -> ExampleLosses:
        """Losses and targets of a batch from `collate`, with each record's fixed evaluation mask.

        The caller sets the mode (`model.eval()`) and turns gradients off. Losses of private records are not private.
        """
        return example_losses(
            self.task, model, self._masked(batch, mask_key("evaluation")), targets_only=self.targets_only
        )

    def on(self, records: Records) -> Prepared:
        """The same model and settings for other records, such as held-out ones.

        Raises:
            ValueError: The records do not fit the task, or have other labels or features. Read them with
                `label_names=` of the training records.
        """
        _check_records(self.task, records)
        if (records.chats is None) != (self.records.chats is None):
            raise ValueError(
                f"data {records.source!r} must have the prompts or messages of the training records, or none"
            )
        for name in ("label_names", "feature_names", "label_scale") if self.task.has_label else ():
            found, expected = getattr(records, name), getattr(self.records, name)
            if found != expected:
                found, expected = (list(part) if isinstance(part, tuple) else part for part in (found, expected))
                raise ValueError(
                    f"data {records.source!r} has {name} {found} and the training records have {expected}; "
                    "they must be the same, in the same order"
                )
        return dataclasses.replace(self, records=records, dataset=self.make_dataset(records))

    def _masked(self, batch: Batch, key: int) -> Batch:
        if self.task is not Task.MASKED_LM:
            return batch
        assert "places" not in batch, "the batch is masked already"
        ids, maskable, is_target, record = (batch[name] for name in ("input_ids", "maskable", "is_target", "record"))
        tokens = {"mask_id": self.tokenizer.mask_token_id, "vocabulary": len(self.tokenizer)}
        ids, places, labels = masked(ids, maskable, is_target, record, key=key, **tokens)
        return {"input_ids": ids, "attention_mask": batch["attention_mask"], "places": places, "labels": labels}


def prepare(
    *,
    task: Task,
    model: str | Path | nn.Module,
    records: Records,
    max_length: int | None = None,
    tokenizer: Any = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora_targets: Sequence[str] | None = None,
    from_scratch: bool = False,
    bucket: int = 64,
    image_size: int | None = None,
    width: int | None = None,
    seed: int = 0,
) -> Prepared:
    """Load the model, turn the records into its inputs, and define the loss of each example.

    Args:
        task: What is predicted.
        model: A folder, a hub name, "mlp" or "small-cnn"; or a module, which is used unchanged, in its own dtype.
        records: What to train on.
        max_length: The number of tokens that texts are cut to. Defaults to 512, for causal-lm to 1024, or to the
            model's limit if that is less. In causal-lm the tokenizer's end-of-text token closes a text.
        tokenizer: A tokenizer. Defaults to the model's own; a module needs one. For chats, one without a chat template
            gets a plain one.
        lora_rank: Train LoRA factors of this rank.
        lora_alpha: Scale the factors by this over the rank; see `add_lora`.
        lora_targets: The layers that get factors.
        from_scratch: Start from new weights.
        bucket: Texts are padded to a multiple of this.
        image_size: Images are resized to this. Defaults to the model's size, or 32.
        width: The hidden units of the model "mlp".
        seed: The seed of new weights and masks.

    Raises:
        ValueError: Records, task and model do not fit; padding changes the model's losses; a causal model sees later
            tokens; or a parameter is not finite.

    Guarantee: record i is example i. Only the label names are taken from all records: no vocabulary, no mean. A text
    without tokens becomes one token of padding with loss 0. The loss of a chat is the mean over the tokens of its
    responses, and 0 if the cut leaves none.

    >>> records = Records(
    ...     kind=RecordKind.TABULAR, source="memory", features=np.eye(3, dtype=np.float32),
    ...     feature_names=("a", "b", "c"), labels=np.array([0, 1, 1]), label_names=("no", "yes"))
    >>> prepared = prepare(task=Task.TABULAR_CLASSIFICATION, model="mlp", records=records)
    >>> batch = prepared.collate([prepared.dataset[i] for i in range(3)])
    >>> prepared.loss_per_example(prepared.model, batch).shape
    torch.Size([3])
    """
    _check_records(task, records)
    name = None if isinstance(model, nn.Module) else str(model)
    if name is None and (lora_rank is not None or from_scratch):
        raise ValueError("lora_rank and from_scratch need the model's folder, not a module; give it, or use add_lora")
    if task.reads_text and tokenizer is None:
        if name is None:
            raise ValueError("tokenizer=None: give the tokenizer of a model that is a module")
        tokenizer = load_tokenizer(name)
    if records.chats is not None:
        ensure_template(tokenizer)
    if task is Task.MASKED_LM and tokenizer.mask_token_id is None:
        raise ValueError(f"tokenizer of {name or 'the model'} has no mask token; masked-lm needs one")
    module = model if isinstance(model, nn.Module) else load_model(
        task, model, label_names=records.label_names, columns=len(records.feature_names), lora_rank=lora_rank,
        lora_alpha=lora_alpha, lora_targets=lora_targets, from_scratch=from_scratch, width=width, seed=seed,
    )  # fmt: skip
    broken = not_finite(module)
    if broken:
        what = name or type(module).__name__
        raise ValueError(f"{len(broken)} parameters of model={what!r} are not finite (first: {broken[0]!r})")
    length = _length(task, module, tokenizer, max_length) if task.reads_text else None
    if length is not None:
        make_dataset, collate = _for_text(task, module, tokenizer, length, bucket)
    elif task is Task.IMAGE_CLASSIFICATION:
        make_dataset, collate = _for_images(module, name, image_size)
    else:
        make_dataset, collate = row_dataset, partial(collate_tensors, name="features")
    prepared = Prepared(
        task=task,
        model=module,
        tokenizer=tokenizer,
        records=records,
        dataset=make_dataset(records),
        collate=collate,
        targets_only=not task.is_classification and can_read_targets(module),
        max_length=length,
        bucket=bucket,
        seed=seed,
        make_dataset=make_dataset,
    )
    if task is Task.CAUSAL_LM:
        check_is_causal(module)
    if length is not None:  # a short text must not have a different loss beside a long one
        texts = _random_texts(prepared, [min(5, length), length])
        check_padding(module, lambda model, batch: prepared.evaluate(model, batch).losses, prepared.collated, texts)
    return prepared


_Inputs = tuple[Callable[[Records], Dataset[Any]], Callable[[Sequence[Any]], Batch]]


def record_kind(task: Task) -> RecordKind:
    """The kind of records that a task reads."""
    if task.is_tabular:
        return RecordKind.TABULAR
    return RecordKind.IMAGE if task is Task.IMAGE_CLASSIFICATION else RecordKind.TEXT


def _check_records(task: Task, records: Records) -> None:
    needs, has = f"{task.value} needs", f"and data {records.source!r} has"
    if records.chats is not None and task is not Task.CAUSAL_LM:
        raise ValueError(f"data {records.source!r} has prompts or messages, which only causal-lm reads")
    if records.kind is not record_kind(task):
        raise ValueError(f"{needs} {record_kind(task).value} records, {has} {records.kind.value} records")
    if task.has_label and records.labels is None:
        raise ValueError(f"{needs} labels, {has} none; set label_column (--label-column)")
    if task.is_classification and len(records.label_names) < 2:
        raise ValueError(f"{needs} at least two labels, {has} {list(records.label_names)}; declare label_names")
    if task is Task.TABULAR_REGRESSION and records.label_scale is None:
        raise ValueError(
            f"{needs} the scale of the label, {has} none. Declare it under [columns], such as {{low = 0, high = 120}}."
        )


def _for_text(task: Task, model: Any, tokenizer: Any, length: int, bucket: int) -> _Inputs:
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if isinstance(table, nn.Embedding) and len(tokenizer) > table.num_embeddings:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {table.num_embeddings} embeddings; give this "
            "model's tokenizer"
        )
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = pad_id  # classifying decoders look for the last token before the padding
    closing = tokenizer.eos_token_id if task is Task.CAUSAL_LM else None

    def make_dataset(records: Records) -> TokenDataset:
        if records.chats is not None:
            chats = tokenize_chats(tokenizer, records.chats, max_length=length, locate=records.locate)
            return TokenDataset(chats, None, filler=pad_id)
        labels = records.labels if task.is_classification else None
        return TokenDataset(_tokenized(tokenizer, records.texts, length, closing), labels, filler=pad_id)

    padding = {"pad_id": pad_id, "bucket": bucket, "max_length": length}
    if task is Task.CAUSAL_LM:
        return make_dataset, CausalCollate(**padding)
    if task is Task.TEXT_CLASSIFICATION:
        return make_dataset, TextCollate(**padding)
    return make_dataset, MaskedCollate(**padding, special_ids=tuple(sorted(tokenizer.all_special_ids)))


def _tokenized(tokenizer: Any, texts: Sequence[str], length: int, closing: int | None) -> Iterator[list[int]]:
    for start in range(0, len(texts), _CHUNK):
        chunk = list(texts[start : start + _CHUNK])
        for row in tokenizer(chunk, truncation=True, max_length=length, return_attention_mask=False)["input_ids"]:
            if closing is not None and len(row) < length and row[-1:] != [closing]:
                row = [*row, closing]
            yield row


def _length(task: Task, model: nn.Module, tokenizer: Any, asked: int | None) -> int:
    """How many tokens a text may have: the number asked for, or the default within what model and tokenizer accept."""
    most = most_tokens(model, tokenizer)
    if asked is None:
        return min(1024 if task is Task.CAUSAL_LM else 512, most)
    check_number("max_length", asked, low=2, high=most, hint="The model has this limit.")
    return asked


def most_tokens(model: nn.Module, tokenizer: Any) -> int:
    """How many tokens model and tokenizer accept."""
    tables = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and name.rpartition(".")[2] in ("position_embeddings", "wpe", "embed_positions")
    ]
    limits = [getattr(tokenizer, "model_max_length", None)]
    # RoBERTa's positions begin after those of the padding.
    limits += [t.num_embeddings if t.padding_idx is None else t.num_embeddings - t.padding_idx - 1 for t in tables]
    if not tables:
        limits.append(getattr(getattr(model, "config", None), "max_position_embeddings", None))
    return min(int(limit or 2**31) for limit in (*limits, 2**31))


def _for_images(model: nn.Module, name: str | None, image_size: int | None) -> _Inputs:
    config = getattr(model, "config", None)
    size = image_size or getattr(config, "image_size", None) or CNN_IMAGE_SIZE
    side = int(size[0] if isinstance(size, list | tuple) else size)
    channels = getattr(config, "num_channels", 3)
    if channels != 3:
        raise ValueError(f"the model needs {channels} colour channels, but images are read as RGB, with 3")
    mean, std = load_pixel_scale(name)
    return partial(ImageDataset, size=side, mean=mean, std=std), partial(collate_tensors, name="pixel_values")


def random_batch(prepared: Prepared, lengths: Sequence[int]) -> Batch:
    """Make a batch of random examples of these lengths; records determine only the size of images or rows."""
    if prepared.lengths is not None:
        return prepared.at_step(prepared.collated(_random_texts(prepared, lengths)), 0)
    dataset: Any = prepared.dataset
    values = torch.randn(len(lengths), *dataset[0][0].shape, generator=torch.Generator().manual_seed(0))
    if prepared.task is Task.TABULAR_REGRESSION:
        return prepared.collated([(one, float(place)) for place, one in enumerate(values)])
    classes = len(prepared.records.label_names)
    return prepared.collated([(one, place % classes) for place, one in enumerate(values)])


def _random_texts(prepared: Prepared, lengths: Sequence[int]) -> list[TextExample]:
    generator = np.random.default_rng(0)
    words = np.setdiff1d(np.arange(len(prepared.tokenizer)), prepared.tokenizer.all_special_ids)
    classes = max(1, len(prepared.records.label_names))
    texts = [generator.choice(words, length).astype(np.int32) for length in lengths]
    halves = [None if prepared.records.chats is None else np.arange(len(text)) >= len(text) // 2 for text in texts]
    return [TextExample(text, place % classes, False, halves[place]) for place, text in enumerate(texts)]
