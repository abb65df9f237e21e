"""Where the abstracts come from: packed token ids, the public arXiv metadata file, any texts, or made-up ones.

Packed ids are files train*.u16.xz, validation.u16.xz and test.u16.xz: xz of little-endian uint16 token ids of BERT's
vocabulary, each text closed by 102 ([SEP]). Other texts are cut into tokens once, by the tokenizer beside the model,
and kept as packed ids in a folder beside the results.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.app import RecordKind, load_tokenizer, read_records
from experiments.experiment import MissingInput
from experiments.tinybert.texts import Marks

HELD_OUT = 20_000
_PART = 1000  # texts that are tokenized together

Tokens = NDArray[Any]


@dataclass(frozen=True)
class Corpus:
    """Token ids of three sets of texts, each text closed by [SEP]."""

    train: Tokens
    validation: Tokens
    test: Tokens
    marks: Marks


def read_corpus(data: str, model: str | Path, *, longest: int, cache: Path, files: int | None = None) -> Corpus:
    """The corpus that `data` names: a folder of packed ids, the arXiv metadata file, or any source of texts.

    `files` takes only so many of the packed train files. MissingInput where a part is missing, ValueError where it cannot
    be read.
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
        raise MissingInput(f"{folder} has train*.u16.xz and not both of validation.u16.xz and test.u16.xz beside it")
    validation, test = (_unpacked([file]) for file in held_out if file is not None)
    return Corpus(np.concatenate([_unpacked([file]) for file in train]), validation, test, _marks(folder))


def _unpacked(files: list[Path]) -> Tokens:
    try:
        return np.concatenate([np.frombuffer(lzma.decompress(file.read_bytes()), "<u2") for file in files])
    except lzma.LZMAError as error:
        raise ValueError(f"{files[0]} is not xz ({error})") from error


def _marks(folder: Path) -> Marks:
    file = folder / "marks.json"
    return Marks(**json.loads(file.read_text())) if file.exists() else Marks()


def _pack(source: Path, model: str, longest: int, folder: Path) -> None:
    """Tokenize distinct texts in a fixed random order; the last ones are held out."""
    tokenizer = load_tokenizer(model)
    marks = Marks(*(getattr(tokenizer, f"{name}_token_id") for name in Marks._fields))
    if None in marks:
        missing = ", ".join(name for name, value in marks._asdict().items() if value is None)
        raise ValueError(f"the tokenizer of {model} has no token for {missing}; take a BERT's")
    if len(tokenizer) > 2**16:
        raise ValueError(f"the tokenizer of {model} has {len(tokenizer)} tokens, and packed ids hold at most 65,536")
    texts = list(dict.fromkeys(text.strip() for text in _texts(source) if text.strip()))
    held_out = min(HELD_OUT, len(texts) // 10)
    if not held_out:
        raise ValueError(f"{source} has {len(texts)} distinct texts; ten are needed at least")
    order = np.random.default_rng(0).permutation(len(texts))
    cuts = {"test": order[:held_out], "validation": order[held_out : 2 * held_out], "train-0": order[2 * held_out :]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "marks.json").write_text(json.dumps(marks._asdict()))
    for name in ("train-0", "validation", "test"):  # the test file last: where it is there, all are
        ids = np.concatenate(list(_tokenized(tokenizer, [texts[i] for i in cuts[name]], marks, longest)))
        temporary = folder / f"{name}.tmp"
        temporary.write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=1))
        temporary.replace(folder / f"{name}.u16.xz")


def _texts(source: Path) -> Iterable[str]:
    """Abstracts of the arXiv metadata file (a JSON object a line), or the texts of anything that training reads."""
    if source.is_file() and source.suffix in (".json", ".jsonl"):
        with source.open(encoding="utf-8") as file:
            first = file.readline()
            if first.startswith("{") and "abstract" in json.loads(first):
                return _abstracts(source)
    return read_records(source, kind=RecordKind.TEXT).texts


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
            # a text that spells [SEP] itself would be two
            kept = [token for token in ids[: longest - 2] if token != marks.sep]
            yield np.array([*kept, marks.sep])


def made_up_corpus(*, vocabulary: int, examples: int, seed: int = 0) -> Corpus:
    """Made-up texts in which each token tells the next, so that there is something to learn: for trying things out.

    >>> corpus = made_up_corpus(vocabulary=150, examples=3)
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
