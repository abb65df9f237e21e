"""A model's inputs: datasets of single examples, and functions that collate examples into a batch."""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, StackDataset

from dpoptim.app.data.masking import record_hash, target_counts
from dpoptim.app.data.records import Records
from dpoptim.data import pad_to_bucket
from dpoptim.integrations.chats import ChatTokens, next_tokens
from dpoptim.integrations.optional import require
from dpoptim.integrations.token_losses import IGNORED

MASK_FRACTION = 0.15  # of the tokens of a text, as in BERT
Batch = dict[str, Tensor]
"""What a model and its loss get: tensors with the examples on their first axis."""


class TextExample(NamedTuple):
    """One text as token ids."""

    tokens: NDArray[np.int32]
    label: int  # IGNORED if there is none
    is_empty: bool  # the text has no tokens; the one token here is padding and not a target
    is_response: NDArray[np.bool_] | None = None  # of a chat: the tokens that are targets


class TokenDataset(Dataset[TextExample]):
    """Tokenized texts or chats, stored in one array; a text without tokens becomes one token `filler`."""

    def __init__(
        self, texts: Iterable[Sequence[int] | ChatTokens], labels: NDArray[np.int64] | None, *, filler: int
    ) -> None:
        tokens, counts, flags = array.array("i"), array.array("q"), bytearray()
        for text in texts:
            ids = text.ids if isinstance(text, ChatTokens) else text
            flags.extend((text.is_response or [False]) if isinstance(text, ChatTokens) else ())
            tokens.extend(ids or [filler])
            counts.append(len(ids))
        self._tokens, self._labels = np.frombuffer(tokens, np.int32), labels
        self._is_response = np.frombuffer(bytes(flags), np.bool_) if flags else None
        self._empty = np.frombuffer(counts, np.int64) == 0
        self.lengths = np.maximum(np.frombuffer(counts, np.int64), 1)
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TextExample:
        own = slice(self._ends[index] - self.lengths[index], self._ends[index])
        label = IGNORED if self._labels is None else int(self._labels[index])
        is_response = None if self._is_response is None else self._is_response[own]
        return TextExample(self._tokens[own], label, bool(self._empty[index]), is_response)

    def untaught(self) -> int:
        """How many chats have no response within their tokens; their loss is 0."""
        if self._is_response is None:
            return 0
        return int((np.add.reduceat(self._is_response, self._ends - self.lengths) == 0).sum())


def row_dataset(records: Records) -> Dataset[tuple[Tensor, float]]:
    """Rows of numbers, each with a label: a class, or a number."""
    columns: Any = torch.from_numpy(records.contents), np.asarray(records.labels).tolist()
    return StackDataset(*columns)


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Images, opened when needed: RGB, resized to a square of `size`, (pixel / 255 − mean) / std."""

    def __init__(self, records: Records, *, size: int, mean: Sequence[float], std: Sequence[float]) -> None:
        require("PIL.Image", "reading images")
        self._images, self._labels, self._size = records.images, np.asarray(records.labels), size
        self._mean, self._std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pillow = require("PIL.Image", "reading images")
        image = self._images[index]
        try:
            with image if isinstance(image, pillow.Image) else pillow.open(image) as opened:
                resized = opened.convert("RGB").resize((self._size, self._size), pillow.Resampling.BILINEAR)
        except OSError as error:
            raise ValueError(f"{image} is not a readable image ({error}); fix or remove it before training") from error
        values = torch.from_numpy(np.array(resized, dtype=np.float32)).permute(2, 0, 1) / 255
        return (values - self._mean) / self._std, int(self._labels[index])


@dataclass(frozen=True, kw_only=True)
class _PaddedCollate:
    """Pads texts on the right to a multiple of `bucket`, at most to `max_length`."""

    pad_id: int
    bucket: int
    max_length: int

    def _pad(self, rows: Sequence[Any], value: int) -> Tensor:
        return pad_to_bucket(rows, value=value, bucket=self.bucket)[:, : self.max_length]

    def _tokens(self, examples: Sequence[TextExample]) -> Batch:
        ids = self._pad([example.tokens for example in examples], self.pad_id)
        lengths = torch.tensor([len(example.tokens) for example in examples])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


@dataclass(frozen=True, kw_only=True)
class MaskedCollate(_PaddedCollate):
    """Makes input_ids (not masked yet), attention_mask, maskable, is_target [examples, most targets], record (hash)."""

    special_ids: tuple[int, ...]

    def __call__(self, examples: Sequence[TextExample]) -> Batch:
        batch = self._tokens(examples)
        has_text = torch.tensor([not example.is_empty for example in examples])[:, None]
        special = torch.isin(batch["input_ids"], torch.tensor(self.special_ids))
        maskable = batch["attention_mask"].bool() & has_text & ~special
        counts = target_counts(maskable.sum(1).numpy(), MASK_FRACTION)
        return {
            **batch,
            "maskable": maskable,
            "is_target": torch.arange(max(int(counts.max()), 1)) < torch.from_numpy(counts)[:, None],
            "record": torch.tensor([record_hash(example.tokens) for example in examples]),
        }


class CausalCollate(_PaddedCollate):
    """Makes input_ids, attention_mask and labels: at each position the next token, if it is a target."""

    def __call__(self, examples: Sequence[TextExample]) -> Batch:
        following = [next_tokens(example.tokens, example.is_response) for example in examples]
        return {**self._tokens(examples), "labels": self._pad(following, IGNORED)}


class TextCollate(_PaddedCollate):
    """Makes input_ids, attention_mask and labels [examples]."""

    def __call__(self, examples: Sequence[TextExample]) -> Batch:
        return {**self._tokens(examples), "labels": torch.tensor([example.label for example in examples])}


def collate_tensors(examples: Sequence[tuple[Tensor, float]], *, name: str) -> Batch:
    """Make the values under the model's name for them, and labels [examples]."""
    values, labels = zip(*examples, strict=True)
    return {name: torch.stack(values), "labels": torch.tensor(labels)}
