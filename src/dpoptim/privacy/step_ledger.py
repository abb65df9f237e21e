"""The step ledger: a file beside the noise key with a keyed digest of every step that a run has released.

Noise is a function of (key, run, step), so a resumed run repeats the same noise. Releasing a step twice with different
content would cancel the noise and reveal the difference. The ledger therefore stores a digest of a step's un-noised
content before its noise is made, and refuses to release that step again with different content.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from dpoptim.noise import NoiseKey, Strategy, strategy_state

try:
    import fcntl
except ImportError:  # Windows has no flock: two processes in one run go unnoticed there
    fcntl = None  # type: ignore[assignment]

_DIGEST_BYTES = 16
_LINE = 2 * _DIGEST_BYTES + 1
_BINARY = getattr(os, "O_BINARY", 0)  # stops Windows from writing two characters per line end
_CHECKSUM_WIDTH = 1024
_FIELDS = {  # in the order in which they are compared
    "key": "the noise key",
    "run_id": "run_id",
    "plan": "plan",
    "strategy": "the noise strategy",
    "settings": "setting",
    "data": "the training data",
}
_OTHERWISE = "or start a new run, which has its own key and its own epsilon"


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """What must not change while a run is paused and resumed; the first line of its ledger.

    Args:
        key: The noise key. The file stores its fingerprint only.
        run_id: The run whose noise is used.
        plan: The privacy plan, as plain values.
        strategy: `strategy_digest` of the noise strategies.
        settings: Other public values that must stay the same, such as learning rates.
        data: A keyed digest of the training records in their order, or None.
    """

    key: NoiseKey
    run_id: str
    plan: Mapping[str, Any]
    strategy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The header as JSON reads it back."""
        values = {name: getattr(self, name) for name in _FIELDS} | {"key": self.key.fingerprint()}
        return dict(json.loads(json.dumps(values)))


class StepLedger:
    """The released steps of one run, in a file of mode 0600 that is locked while it is open.

        ledger = StepLedger.open(path, header, step=optimizer.mechanism.step)
        optimizer.mechanism.before_step = ledger.before_step

    Guarantee: the digest of a step is on disk before its noise is made. A recorded step is released again only with the
    same content, whatever has changed since.
    Limit: the ledger must be the newest. If key, ledger and checkpoint are restored together from a backup, it
    goes unnoticed that later steps were already released.
    Cost per step: checksums of the sums, a write of 33 bytes and an fdatasync.
    """

    def __init__(self, path: Path, handle: int, start: int, digests: list[bytes], secret: bytes) -> None:
        self.path = path
        self._handle: int | None = handle
        self._start, self._digests, self._secret = start, digests, secret

    @property
    def count(self) -> int:
        """How many steps have been released."""
        return len(self._digests)

    @classmethod
    def open(cls, path: str | os.PathLike[str], header: RunHeader, *, step: int | None = None) -> Self:
        """Open the ledger of a run.

        Args:
            path: The file, beside the noise key.
            header: What must be the same as when the run started.
            step: The number of steps in the checkpoint to resume from; None for a new run, which creates the file, or
                replaces one without steps.

        Raises:
            ValueError: The run may not continue: the file is missing, unreadable, in use, behind the checkpoint, or its
                header differs; or a new run would repeat released steps.
        """
        path = Path(path)
        try:
            handle = os.open(path, os.O_RDWR | _BINARY | (os.O_CREAT if step is None else 0), 0o600)
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing, so it is unknown which steps were released. Restore the file, {_OTHERWISE}."
            ) from None
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            start, digests = _begin(handle, header, path) if step is None else _resume(header, path, step)
        except BaseException as error:
            os.close(handle)
            if isinstance(error, BlockingIOError):
                line = "Wait for it to end; under torchrun, open the ledger in process 0 only."
                raise ValueError(f"another process is training the run of {path}. {line}") from None
            raise
        return cls(path, handle, start, digests, header.key.subkey("digest", "released steps"))

    def before_step(self, step: int, content: bytes) -> None:
        """Record step `step` (from 0), or compare it with its record; the mechanism calls this before it makes noise.

        `content` is what is released, without its noise. Only a keyed digest of it is kept.
        """
        digest = blake2b(b"%d " % step + content, key=self._secret, digest_size=_DIGEST_BYTES).hexdigest().encode()
        if step > self.count:
            raise ValueError(f"step {step + 1} cannot follow step {self.count}. Release steps in order.")
        if step < self.count:
            if digest != self._digests[step]:
                raise ValueError(
                    f"step {step + 1} was released before with different gradients, so its noise would cancel out. "
                    f"Undo the change (data, code, versions, micro-batches), resume at step {self.count}, {_OTHERWISE}."
                )
            return
        assert self._handle is not None, "the ledger is closed"
        os.lseek(self._handle, self._start + step * _LINE, os.SEEK_SET)  # overwrites a line that a crash cut off
        _write(self._handle, digest + b"\n", self.path)
        getattr(os, "fdatasync", os.fsync)(self._handle)
        self._digests.append(digest)

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._handle is not None:
            if fcntl is not None:
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # forked workers may still have the file open
            os.close(self._handle)
            self._handle = None


def released_count(path: Path) -> int:
    """Return how many steps a ledger records; 0 if there is none, or if a crash cut off its header."""
    try:
        return len(read_ledger(path)[2]) if b"\n" in path.read_bytes() else 0
    except FileNotFoundError:
        return 0


def strategy_digest(strategies: Mapping[str, Strategy], noise_bits: int) -> str:
    """Digest the strategy of each noise stream: equal sums under two strategies would reveal the normals."""
    digest = blake2b(b"%d" % noise_bits, digest_size=_DIGEST_BYTES)
    for stream, strategy in sorted(strategies.items()):
        for name, value in sorted(strategy_state(strategy).items()):
            if isinstance(value, Tensor):
                digest.update(f"{stream} {name} {tuple(value.shape)} ".encode() + value.numpy().tobytes())
            else:
                digest.update(f"{stream} {name} {value!r} ".encode())
    return digest.hexdigest()


def checksums(vectors: Iterable[Tensor]) -> bytes:
    """Sum the bits of fp32 or fp64 vectors over rows and columns of 1024 words, 1/2000 of the vectors' size.

    Integer sums modulo 2^64 do not depend on their order, so they are the same on every device.
    Guarantee: a change in one place changes the checksums; several changes do, unless they cancel in every row and
    every column. The checksums are NOT private: they are functions of the vectors.
    """
    return b"".join(torch.cat(_row_and_column_sums(vector)).cpu().numpy().tobytes() for vector in vectors)


def _row_and_column_sums(vector: Tensor) -> list[Tensor]:
    halves = vector.contiguous().view(torch.int32)
    if halves.storage_offset() % 2:
        halves = halves.clone()
    whole = len(halves) // (2 * _CHECKSUM_WIDTH) * (2 * _CHECKSUM_WIDTH)
    words = halves[:whole].view(torch.int64).view(-1, _CHECKSUM_WIDTH)
    # numpy sums columns ten times as fast as torch on a CPU
    down = torch.from_numpy(words.numpy().sum(0)) if words.device.type == "cpu" else words.sum(0)
    return [down, words.sum(1), halves[whole:].to(torch.int64)]


def _begin(handle: int, header: RunHeader, path: Path) -> tuple[int, list[bytes]]:
    """Write the header of a new run; return where its steps begin, and no digests."""
    if count := released_count(path):
        raise ValueError(
            f"{path} records {count} released steps, and a new run would release them again with the same noise. "
            f"Resume from the run's checkpoint, {_OTHERWISE}."
        )
    line = json.dumps(header.to_dict()).encode() + b"\n"
    os.ftruncate(handle, 0)
    _write(handle, line, path)
    os.fsync(handle)
    return len(line), []


def _resume(header: RunHeader, path: Path, step: int) -> tuple[int, list[bytes]]:
    """Compare the header and the number of steps; return where the steps begin, and their digests."""
    then, start, digests = read_ledger(path)
    check_unchanged(then, header.to_dict())
    if step > len(digests):
        raise ValueError(
            f"{path} records {len(digests)} steps, but the checkpoint is of step {step}. Restore the newest ledger of "
            f"the run, {_OTHERWISE}."
        )
    return start, digests


def check_unchanged(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a run whose header has changed; `now` may have some of its fields only."""
    for name, words in _FIELDS.items():
        if name in now and then[name] != now[name]:
            raise ValueError(f"{_difference(words, then[name], now[name])}. Undo the change, {_OTHERWISE}.")


def _difference(words: str, then: Any, now: Any) -> str:
    """Describe what changed; for two mappings, name the first entry that differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        name = next(name for name in sorted({*then, *now}) if then.get(name) != now.get(name))
        return _difference(f"{words} {name}", then.get(name), now.get(name))
    old, new = json.dumps(then, ensure_ascii=False), json.dumps(now, ensure_ascii=False)
    if words.startswith("the ") or max(len(old), len(new)) > 60:
        return f"{words} has changed since the run started"
    return f"{words} was {old} when the run started and is {new} now"


def read_ledger(path: Path) -> tuple[dict[str, Any], int, list[bytes]]:
    """Return the header, where the steps begin, and their digests; a last line that a crash cut off is left out."""
    whole = path.read_bytes()
    first, *digests = whole[: whole.rfind(b"\n") + 1].splitlines() or [b""]
    try:
        header = json.loads(first)
    except (ValueError, RecursionError):
        header = None
    is_complete = all(len(digest) == _LINE - 1 for digest in digests)
    if not (isinstance(header, dict) and header.keys() == _FIELDS.keys() and is_complete):
        raise ValueError(f"{path} cannot be read. Restore the run's own file, {_OTHERWISE}.")
    return header, len(first) + 1, digests


def _write(handle: int, line: bytes, path: Path) -> None:
    try:
        if os.write(handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        error.filename = str(path)
        raise
