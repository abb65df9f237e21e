"""Texts as token ids that lie end to end on the device, and parts of a batch gathered, padded and masked there.

Two readers: packed ids (train*.u16.xz: xz of little-endian uint16 token ids of BERT's vocabulary, each text closed by
102, [SEP]), and any texts that `dpoptim.training.read_records` reads, through the tokenizer beside the model.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.training import Kind, load_tokenizer, read_records

PACKED = "train*.u16.xz"


class Marks(NamedTuple):
    """The ids that a tokenizer keeps for itself; these are those of BERT."""

    pad: int = 0
    cls: int = 101
    sep: int = 102
    mask: int = 103


@dataclass(frozen=True)
class Texts:
    """All texts end to end on the device; lengths are also on the host, which plans shapes without asking it."""

    tokens: Tensor  # [tokens of all texts], without [CLS]
    rows: Tensor  # [examples, 3]: where it starts, its length with [CLS], how many places are masked
    lengths: NDArray[np.int64]
    masked: NDArray[np.int64]
    marks: Marks


def read_texts(source: Path, model: Path, longest: int, device: str, files: int | None = None) -> Texts:
    """Packed ids where `source` is a folder with such files (the first `files` of them), else records of text.

    ValueError in one line for a source that is neither, or texts that the tokenizer cannot close and mask.
    """
    packed = sorted(source.rglob(PACKED)) if source.is_dir() else []
    if packed:
        return read_packed(packed[:files], longest, device)
    if source.is_file() and source.suffix == ".xz":
        return read_packed([source], longest, device)
    tokenizer = load_tokenizer(model)
    marks = Marks(
        *(getattr(tokenizer, f"{name}_token_id") for name in Marks._fields)  # None where it has no such token
    )
    if None in marks:
        missing = ", ".join(name for name, value in marks._asdict().items() if value is None)
        raise ValueError(f"the tokenizer of {model} has no token for {missing}; take a BERT's")
    records = read_records(source, kind=Kind.TEXT)
    return laid_out(tokenized(tokenizer, records.texts, marks, longest), marks, longest, device)


def tokenized(tokenizer: Any, texts: Sequence[str], marks: Marks, longest: int) -> NDArray[np.int64]:
    """The ids of all texts, each closed by [SEP]; none is longer than the model takes."""
    parts = []
    for first in range(0, len(texts), 1000):
        some = tokenizer(list(texts[first : first + 1000]), add_special_tokens=False, return_attention_mask=False)
        parts += [np.array([*ids[: longest - 2], marks.sep]) for ids in some["input_ids"]]
    return np.concatenate(parts)


def read_packed(files: list[Path], longest: int, device: str) -> Texts:
    try:
        tokens = np.concatenate([np.frombuffer(lzma.decompress(file.read_bytes()), "<u2") for file in files])
    except lzma.LZMAError as error:
        raise ValueError(f"{files[0]} or one beside it is not xz ({error})") from error
    return laid_out(tokens, Marks(), longest, device)


def laid_out(tokens: NDArray[Any], marks: Marks, longest: int, device: str) -> Texts:
    ends = np.flatnonzero(tokens == marks.sep) + 1
    if not len(ends):
        raise ValueError(f"no text is closed by the id {marks.sep}; there is nothing to train on")
    lengths = np.minimum(np.diff(ends, prepend=0) + 1, longest)
    words = np.maximum(lengths - 2, 0)  # all but [CLS] and [SEP]
    masked = np.minimum(np.maximum(np.rint(0.15 * words).astype(np.int64), 1), words)
    rows = np.stack([np.concatenate([[0], ends[:-1]]), lengths, masked], axis=1)
    on_device = torch.from_numpy(tokens.astype(np.int32)).to(device)
    return Texts(on_device, torch.from_numpy(rows).to(device), lengths, masked, marks)


class Part(NamedTuple):
    ids: Tensor  # [examples, width], masked
    attends: Tensor  # [examples, 1, 1, width], False at padding
    places: Tensor  # [examples, most masked places]
    labels: Tensor  # [examples, most masked places], -100 where an example has fewer
    masked: Tensor  # [examples]


def made_part(
    texts: Texts, indices: Tensor, width: int, most: int, vocabulary: int, generator: torch.Generator
) -> Part:
    """Gather, pad and mask the texts `indices` on their device; no number goes back to the host."""
    device, marks = texts.tokens.device, texts.marks
    start, length, masked = texts.rows[indices.to(device, non_blocking=True)].unbind(1)
    where = torch.arange(width, device=device)
    real = where < length[:, None]
    sources = (start[:, None] + where - 1).clamp_(0, len(texts.tokens) - 1)
    ids = texts.tokens[sources].long().masked_fill_(~real, marks.pad)
    ids[:, 0] = marks.cls
    words = (where > 0) & (where < length[:, None] - 1)
    order = torch.rand(ids.shape, device=device, generator=generator).masked_fill_(~words, -1.0)
    places = order.topk(most, dim=1).indices
    own = ids.gather(1, places)
    counts = torch.arange(most, device=device) < masked[:, None]
    fate = torch.rand(own.shape, device=device, generator=generator)
    other = torch.randint(0, vocabulary, own.shape, device=device, generator=generator)
    shown = torch.where(fate < 0.8, marks.mask, torch.where(fate < 0.9, other, own))
    return Part(
        ids=ids.scatter_(1, places, torch.where(counts, shown, own)),
        attends=real[:, None, None],
        places=places,
        labels=own.masked_fill(~counts, -100),
        masked=masked,
    )
