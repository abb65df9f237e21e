"""Which steps a run has released, and a keyed digest of each, in a file beside its key, written before the release.

Noise and batches are functions of (key, run, step). A step that was released may be computed again only if it comes
out the same, bit for bit: then nothing new is told. With other records, other code, other settings or other rounding,
the difference of the two releases would have no noise in it. So each step's un-noised sums leave a digest behind, and
a step that is repeated is held against it before its noise is made.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from dpoptim.noise import NoiseKey

try:
    import fcntl
except ImportError:  # not a POSIX system: two processes in one run are then not noticed
    fcntl = None  # type: ignore[assignment]

_DIGEST_BYTES = 16
_LINE = 2 * _DIGEST_BYTES + 1
_BINARY = getattr(os, "O_BINARY", 0)  # Windows would write two characters for the end of a line
_NEW_RUN = "or begin a new run, which has a new key and an epsilon of its own"


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """What must stay the same while a run goes on.

    `settings` are public values (rates, schedule, seeds, clip norm, model, plan), `records` keyed digests of the data:
    "training", and held-out parts, which may be left out or added, but not changed. Of `key`, the noise key, the file
    has the fingerprint.
    """

    key: NoiseKey
    settings: Mapping[str, Any]
    records: Mapping[str, str]


class StepLedger:
    """The steps that were released, kept in a file of mode 0600.

        steps = StepLedger.resume(path, identity, step=checkpoint)   # refused unless the run may go on from there
        optimizer.mechanism.before_step = steps.note                   # called before the noise of a step is made

    Guarantee: when a step's noisy values exist, the file on the disk has the digest of its un-noised ones, and a step
    that is there is released again only with the same digest, whatever has changed since. `resume` refuses other
    records or settings before anything is computed. While the object is open, no other process can open it.
    Edge cases: where sums come out otherwise each time (another device or version, operations that are not
    deterministic), a run goes on from a checkpoint of its last step alone, which repeats nothing.
    Cost: checksums of the sums, a write of 33 bytes and an fdatasync a step.

    The file: a line of JSON with settings and records, its digest keyed by the noise key, a line for each step. Of a
    file whose last lines somebody took away nobody can tell that they were there.
    """

    def __init__(self, path: Path, handle: int, header: bytes, digests: list[bytes], *, secret: bytes) -> None:
        self.path, self._start = path, len(header) + 1
        self._handle: int | None = handle
        self._digests, self._secret = digests, secret

    @property
    def count(self) -> int:
        """How many steps were released."""
        return len(self._digests)

    @classmethod
    def begin(cls, path: str | os.PathLike[str], identity: RunHeader) -> Self:
        """A new file for a run that has released nothing.

        Edge cases: one that is there is replaced if it has no step (it is of an attempt that released nothing), and is
        one ValueError line otherwise.
        """
        path = Path(path)
        if released_count(path):
            raise ValueError(
                f"{path} has steps that were released with this noise key and run_id, and a new run would release "
                "them again over the same noise; go on from the run's checkpoint, or begin a run with a new key"
            )
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o600)
        _lock(handle, path)
        values = {"key": identity.key.fingerprint(), "settings": identity.settings, "records": identity.records}
        header = json.dumps(values, sort_keys=True).encode()
        secret = _secret(identity.key)
        header += b"\n" + _digest(header, secret)
        _write(handle, header + b"\n", path)
        os.fsync(handle)
        return cls(path, handle, header, [], secret=secret)

    @classmethod
    def resume(cls, path: str | os.PathLike[str], identity: RunHeader, *, step: int) -> Self:
        """The file of a run that goes on after `step` steps; one ValueError line where it may not."""
        path = Path(path)
        try:
            handle = os.open(path, os.O_RDWR | _BINARY)
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing, so nobody knows which steps of the run were released, and over what; put it back, "
                f"{_NEW_RUN}"
            ) from None
        try:
            _lock(handle, path)
            header, digests = _read(path)
            _check(header, identity, path)
            if step > len(digests):
                raise ValueError(
                    f"the checkpoint is of step {step} and {path} has {len(digests)} steps: it is not the run's own, "
                    f"or an old copy; put the run's own back, {_NEW_RUN}"
                )
        except BaseException:
            os.close(handle)
            raise
        return cls(path, handle, header, digests, secret=_secret(identity.key))

    def note(self, step: int, content: bytes) -> None:
        """Step `step` (from 0) is about to be released: its digest is on the disk first, or is the one there.

        `content` stands for what is released, without its noise; it is not kept.
        """
        if self._handle is None:
            raise ValueError(f"{self.path} was closed, and step {step} cannot be counted; take the run up again")
        _check_is_in_place(self._handle, self.path)
        digest = _digest(b"%d " % step + content, self._secret)
        if step < self.count:
            if not hmac.compare_digest(digest, self._digests[step]):
                raise ValueError(
                    f"step {step + 1} was released before, and its gradients come out otherwise now, so that its noise "
                    "would cancel out; records, code, versions, micro-batches or the device are not what they were, "
                    f"or operations are not deterministic: undo the change, go on from a checkpoint of step "
                    f"{self.count}, {_NEW_RUN}"
                )
            return
        if step > self.count:
            raise ValueError(f"step {step + 1} comes after step {self.count}; steps are released one after the other")
        os.lseek(self._handle, self._start + step * _LINE, os.SEEK_SET)  # over a line that a crash cut off
        _write(self._handle, digest + b"\n", self.path)
        getattr(os, "fdatasync", os.fsync)(self._handle)
        self._digests.append(digest)

    def close(self) -> None:
        """Let others open the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _write(handle: int, line: bytes, path: Path) -> None:
    if os.write(handle, line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def released_settings(path: Path, key: NoiseKey) -> dict[str, Any]:
    """The settings that a run was begun with, as its key vouches for them; one ValueError line where it does not."""
    return _verified(_read(path)[0], key, path)[0]


def released_count(path: Path) -> int:
    """How many steps a file has; 0 where there is none, or where a crash came before its header was whole."""
    try:
        return len(_read(path)[1]) if path.read_bytes().count(b"\n") > 2 else 0
    except FileNotFoundError:
        return 0


def _read(path: Path) -> tuple[bytes, list[bytes]]:
    """The header with its digest, and the digests of the steps."""
    whole = path.read_bytes()
    lines = whole[: whole.rfind(b"\n") + 1].splitlines()
    if len(lines) < 2 or any(len(line) != _LINE - 1 for line in lines[1:]):
        raise ValueError(f"{path} cannot be read; put the run's own back, {_NEW_RUN}")
    return b"\n".join(lines[:2]), lines[2:]


def _check(header: bytes, identity: RunHeader, path: Path) -> None:
    settings, records = _verified(header, identity.key, path)
    for name in ("training", *(name for name in identity.records if name != "training")):
        if records.get(name) != identity.records.get(name) and (name == "training" or name in records):
            raise ValueError(
                f"the {name} records are not those that the run was begun with (edited, moved, replaced or tokenised "
                f"otherwise), and over others its noise would cancel out; put them back, {_NEW_RUN}"
            )
    if changed := _difference(settings, json.loads(json.dumps(dict(identity.settings)))):
        raise ValueError(f"{changed}: a run keeps the settings it was begun with; undo the change, {_NEW_RUN}")


def _verified(header: bytes, key: NoiseKey, path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings and records of the run, as its key vouches for them."""
    text, digest = header.split(b"\n")
    try:
        found = json.loads(text)
        fingerprint, settings, records = found["key"], found["settings"], found["records"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}); put the run's own back, {_NEW_RUN}"
        ) from error
    if fingerprint != key.fingerprint():
        raise ValueError(
            f"{path} is of a run with another noise key ({fingerprint}, and this one is {key.fingerprint()}); "
            f"put the run's own back, {_NEW_RUN}"
        )
    if not hmac.compare_digest(_digest(text, _secret(key)), digest):
        raise ValueError(f"{path} was edited, so nobody knows what was released; put the run's own back, {_NEW_RUN}")
    return settings, records


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first value that changed, in words, those of digests ("the …") last; nothing where none did."""
    for name in sorted({*then, *now}, key=lambda name: (name.startswith("the "), name == "plan", name)):
        if then.get(name) != now.get(name):
            old, new = (_short(values.get(name)) for values in (then, now))
            told = not name.startswith("the ") and old != new
            return f"{name} was {old} and is {new}" if told else f"{name} has changed"
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else "…"


def _secret(key: NoiseKey) -> bytes:
    return key.subkey("digest", "released steps")


def _digest(content: bytes, secret: bytes) -> bytes:
    return blake2b(content, key=secret, digest_size=_DIGEST_BYTES).hexdigest().encode()


def _lock(handle: int, path: Path) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{path.parent} is being trained by another process; wait for it to end") from None
    _check_is_in_place(handle, path)


def _check_is_in_place(handle: int, path: Path) -> None:
    """The file that is open and locked must be the one that others find under its name."""
    try:
        named = path.stat()
    except FileNotFoundError:
        named = None
    if os.name == "posix" and (named is None or not os.path.samestat(named, os.fstat(handle))):
        raise ValueError(f"{path} was moved or replaced while it was open; put the run's own back, {_NEW_RUN}")
