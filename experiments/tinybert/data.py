"""Abstracts: read or made up, as token ids that lie end to end on the device, gathered and masked there.

A corpus is a folder of packed ids, the public arXiv metadata file, or a text file. Packed ids are files train*.u16.xz,
validation.u16.xz and test.u16.xz: xz of little-endian uint16 token ids of BERT's vocabulary, each text closed by 102
([SEP]). Other texts are tokenized once, by the model's tokenizer, and kept as packed ids in a folder next to the
results.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from experiments.framework import MissingInput

MASKED_SHARE = 0.15


class Marks(NamedTuple):
    """The special token ids; the defaults are BERT's."""

    pad: int = 0
    cls: int = 101
    sep: int = 102
    mask: int = 103


@dataclass(frozen=True)
class Texts:
    """All texts end to end on the device. Lengths are also on the host, which plans shapes without synchronizing."""

    tokens: Tensor  # one padding, all texts without [CLS], then padding of the length of the longest text
    rows: Tensor  # [examples, 3]: the place before its first token, its length with [CLS], the number of masked places
    lengths: NDArray[np.int64]
    masked: NDArray[np.int64]
    marks: Marks

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, indices: NDArray[np.int64], *, bucket: int, longest: int) -> tuple[Tensor, int, int, int]:
        """What `make_part` needs, found on the host: indices, width, most masked places; and the number of tokens."""
        lengths = self.lengths[indices]
        width = -(-int(lengths.max()) // bucket) * bucket
        return torch.from_numpy(indices), min(width, longest), int(self.masked[indices].max()), int(lengths.sum())


def laid_out(tokens: NDArray[Any], marks: Marks, longest: int, device: str) -> Texts:
    """Lay out texts from an array of token ids, where each ends with `marks.sep`; truncated at `longest` with [CLS].

    15 % of the tokens of each text (at least one) will be masked.

    >>> texts = laid_out(np.array([7, 8, 102, 9, 102]), Marks(), 512, "cpu")
    >>> texts.lengths.tolist(), texts.masked.tolist()
    ([4, 3], [1, 1])
    """
    ends = np.flatnonzero(tokens == marks.sep) + 1
    if not len(ends):
        raise ValueError(f"no text ends with the id {marks.sep}; there is nothing to train on")
    lengths = np.minimum(np.diff(ends, prepend=0) + 1, longest)
    words = np.maximum(lengths - 2, 0)  # all but [CLS] and [SEP]
    masked = np.minimum(_masked_of(words), words)
    rows = np.stack([np.concatenate([[0], ends[:-1]]), lengths, masked], axis=1)
    padded = np.full(1 + len(tokens) + longest, marks.pad, np.int32)
    padded[1 : 1 + len(tokens)] = tokens
    return Texts(torch.from_numpy(padded).to(device), torch.from_numpy(rows).to(device), lengths, masked, marks)


def fingerprint(texts: Texts) -> str:
    """Twelve hexadecimal digits of the tokens' digest, which identify the texts of a results file."""
    return hashlib.sha256(texts.tokens.cpu().numpy().tobytes()).hexdigest()[:12]


def _masked_of(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """15 % of the words, at least one."""
    return np.maximum(np.rint(MASKED_SHARE * words).astype(np.int64), 1)


class Indices(torch.utils.data.Dataset[int]):
    """The numbers 0 … count − 1, a batch at a time; the texts themselves are gathered on the device."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Part(NamedTuple):
    """Some examples, as the model expects them."""

    ids: Tensor  # [examples, width], masked
    attends: Tensor  # [examples, 1, 1, width], False at padding
    places: Tensor  # [examples, masked places of a text of this width]
    labels: Tensor  # the same shape, -100 where an example has fewer
    masked: Tensor  # [examples]


def make_part(
    texts: Texts, indices: Tensor, width: int, most: int, vocabulary: int, generator: torch.Generator
) -> Part:
    """Gather, pad and mask the texts `indices` on their device, without synchronizing with the host.

    Of the chosen tokens 80 % become [MASK], 10 % a random token, 10 % stay. Shapes depend only on the number of texts
    and the width, so there are few of them.
    """
    device, marks = texts.tokens.device, texts.marks
    start, length, masked = texts.rows[indices.to(device, non_blocking=True)].unbind(1)
    where = torch.arange(width, device=device)
    padding = where >= length[:, None]
    ids = texts.tokens[start[:, None] + where].long().masked_fill_(padding, marks.pad)
    ids[:, 0] = marks.cls  # replaces the token before the text
    order = torch.rand(ids.shape, device=device, generator=generator).masked_fill_(where >= length[:, None] - 1, -1.0)
    order[:, 0] = -1.0
    places = order.topk(most, dim=1).indices
    own = ids.gather(1, places)
    beyond = torch.arange(most, device=device) >= masked[:, None]
    choice = torch.rand(own.shape, device=device, generator=generator)
    other = torch.randint(0, vocabulary, own.shape, device=device, generator=generator)
    shown = torch.where(choice < 0.8, marks.mask, torch.where(choice < 0.9, other, own))
    room = max(int(_masked_of(np.array(width - 2))) - most, 0)
    return Part(
        ids=ids.scatter_(1, places, torch.where(beyond, own, shown)),
        attends=~padding[:, None, None],
        places=F.pad(places, (0, room)),
        labels=F.pad(own.masked_fill(beyond, -100), (0, room), value=-100),
        masked=masked,
    )


HELD_OUT = 20_000
_PART = 1000  # texts to tokenize at a time

Tokens = NDArray[Any]


@dataclass(frozen=True)
class Corpus:
    """Token ids of three sets of texts, each text ending with [SEP]."""

    train: Tokens
    validation: Tokens
    test: Tokens
    marks: Marks


def read_corpus(data: str, model: str | Path, *, longest: int, cache: Path, files: int | None = None) -> Corpus:
    """Read a folder of packed ids, the arXiv metadata file, or a text file with one text per line.

    `files` limits the number of packed train files.
    """
    path = Path(data)
    if path.is_dir() and list(path.rglob("train*.u16.xz")):
        return _packed(path, files)
    state = path.stat() if path.is_file() else None
    as_it_is = f"{path.resolve()} {state and (state.st_size, state.st_mtime_ns)} {model} {longest}"
    folder = cache / f"tokens-{hashlib.sha256(as_it_is.encode()).hexdigest()[:12]}"
    if not (folder / "test.u16.xz").exists():
        _pack(path, str(model), longest, folder)
    return _packed(folder, files)


def _packed(folder: Path, files: int | None) -> Corpus:
    train = sorted(folder.rglob("train*.u16.xz"))[:files]
    held_out = [next(folder.rglob(f"{name}.u16.xz"), None) for name in ("validation", "test")]
    if None in held_out:
        raise MissingInput(f"{folder} has train*.u16.xz but lacks validation.u16.xz or test.u16.xz")
    with ThreadPoolExecutor() as pool:  # lzma releases the lock
        *parts, validation, test = pool.map(_unpacked, [*train, *(file for file in held_out if file is not None)])
    return Corpus(np.concatenate(parts), validation, test, _marks(folder))


def _unpacked(file: Path) -> Tokens:
    try:
        return np.frombuffer(lzma.decompress(file.read_bytes()), "<u2")
    except lzma.LZMAError as error:
        raise ValueError(f"{file} is not xz ({error})") from error


def _marks(folder: Path) -> Marks:
    file = folder / "marks.json"
    return Marks(**json.loads(file.read_text())) if file.exists() else Marks()


def _pack(source: Path, model: str, longest: int, folder: Path) -> None:
    """Tokenize distinct texts in a fixed random order; the last ones are held out."""
    from transformers import AutoTokenizer

    if not source.is_file():
        raise ValueError(f"{source} is neither a folder of packed ids nor a file of texts")
    tokenizer = AutoTokenizer.from_pretrained(model)
    marks = Marks(*(getattr(tokenizer, f"{name}_token_id") for name in Marks._fields))
    if None in marks:
        missing = ", ".join(name for name, value in marks._asdict().items() if value is None)
        raise ValueError(f"the tokenizer of {model} has no token for {missing}; use one of BERT")
    if len(tokenizer) > 2**16:
        raise ValueError(f"the tokenizer of {model} has {len(tokenizer)} tokens, and packed ids hold at most 65,536")
    texts = list(dict.fromkeys(text.strip() for text in _texts(source) if text.strip()))
    held_out = min(HELD_OUT, len(texts) // 10)
    if not held_out:
        raise ValueError(f"{source} has {len(texts)} distinct texts; at least ten are needed")
    order = np.random.default_rng(0).permutation(len(texts))
    cuts = {"test": order[:held_out], "validation": order[held_out : 2 * held_out], "train-0": order[2 * held_out :]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "marks.json").write_text(json.dumps(marks._asdict()))
    for name in ("train-0", "validation", "test"):  # the test file last: if it exists, all do
        ids = np.concatenate(list(_tokenized(tokenizer, [texts[i] for i in cuts[name]], marks, longest)))
        temporary = folder / f"{name}.tmp"
        temporary.write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=1))
        temporary.replace(folder / f"{name}.u16.xz")


def _texts(source: Path) -> Iterable[str]:
    """Abstracts of the arXiv metadata file (one JSON object per line), or the lines of a text file."""
    if source.is_file() and source.suffix in (".json", ".jsonl"):
        with source.open(encoding="utf-8") as file:
            first = file.readline()
            if first.startswith("{") and "abstract" in json.loads(first):
                return _abstracts(source)
    return source.read_text(encoding="utf-8").splitlines()


def _abstracts(source: Path) -> Iterator[str]:
    with source.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield " ".join(json.loads(line)["abstract"].split())
            except (ValueError, KeyError) as error:
                raise ValueError(f"{source}: line {number} is not a JSON object with an abstract") from error


def _tokenized(tokenizer: Any, texts: list[str], marks: Marks, longest: int) -> Iterator[Tokens]:
    for first in range(0, len(texts), _PART):
        some = tokenizer(texts[first : first + _PART], add_special_tokens=False, return_attention_mask=False)
        for ids in some["input_ids"]:
            # A text that contains [SEP] would become two.
            kept = [token for token in ids[: longest - 2] if token != marks.sep]
            yield np.array([*kept, marks.sep])


def synthetic_corpus(*, vocabulary: int, examples: int, seed: int = 0) -> Corpus:
    """Synthetic texts in which each token determines the next, for tests.

    >>> corpus = synthetic_corpus(vocabulary=150, examples=3)
    >>> int((corpus.train == 102).sum())
    3
    """
    generator = np.random.default_rng(seed)
    words = np.arange(104, vocabulary)
    follows = generator.permutation(len(words))

    def texts(count: int) -> Tokens:
        parts = []
        for length in generator.integers(6, 30, size=count):
            chain = [int(generator.integers(len(words)))]
            while len(chain) < length:
                chain.append(int(follows[chain[-1]]))
            parts.append(np.append(words[chain], Marks().sep))
        return np.concatenate(parts)

    return Corpus(texts(examples), texts(examples // 2 + 1), texts(examples // 2 + 1), Marks())
