"""How far a run has ever got, in a file beside its key, written before a step is released.

Noise and batches are functions of (key, run, step). A step that was released may be computed again only if everything
in it is the same, bit for bit: then nothing new is told. With other records, other settings or other rounding, the
difference of the two releases would have no noise in it.
"""

from __future__ import annotations

import dataclasses
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

_DIGITS = 20
_DIGEST_BYTES = 16
_BEFORE_BODY = _DIGITS + 1 + 2 * _DIGEST_BYTES + 1
_AHEAD = 16
CANNOT_BE_COMPARED = "which cannot be compared"
_NEW_RUN = "or begin a new run, which has a new key and an epsilon of its own"


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What must stay the same while a run goes on.

    `settings` are all public values that change a release (rates, schedule, seeds, clip norm, model, plan), `records`
    keyed digests of the data: "training", and held-out parts, which may be left out or added, but not changed.
    `surroundings` change a release in its last bits alone: device,
    versions, how a batch is cut; they may change where no step is repeated. What cannot be compared is there as well,
    under a name that ends in CANNOT_BE_COMPARED and with a new value each time, so that no step is repeated. Of `key`,
    the noise key, the file has the fingerprint.
    """

    key: NoiseKey
    settings: Mapping[str, Any]
    records: Mapping[str, str]
    surroundings: Mapping[str, Any]


class ReleasedSteps:
    """The number of steps that were released, kept in a file of mode 0600.

        steps = ReleasedSteps.resume(path, identity, step=checkpoint)   # refused unless the run may go on from there
        optimizer.release.before_release = steps.note                   # called before the noise of a step is made

    Guarantee: when a step's noisy values exist, the file on the disk counts it. `resume` refuses other records or
    settings, and, where steps would be repeated, other surroundings than they had. While the object is open, no other
    process can open it.
    Edge cases: a step that is repeated is not written again. The file counts up to 16 steps ahead, so that the disk is
    waited for (a write of 20 bytes and an fdatasync) once in 16 steps; `close` makes the count exact. After a crash it
    is too large by less than 16, which allows nothing that should be refused.

    The file: the count, a digest of the rest keyed by the noise key, then a line of JSON for settings and records, then
    a line wherever the surroundings changed. A file that was edited is refused.
    """

    def __init__(self, path: Path, handle: int, count: int, *, secret: bytes, body: bytes) -> None:
        self.path, self.count = path, count
        self._handle: int | None = handle
        self._on_disk = count
        self._secret, self._body = secret, body

    @classmethod
    def begin(cls, path: str | os.PathLike[str], identity: RunIdentity) -> Self:
        """A new file for a run that has released nothing.

        Edge cases: one that is there is replaced if it counts no step (it is of an attempt that released nothing), and
        is one ValueError line otherwise.
        """
        path = Path(path)
        if released_count(path):
            raise ValueError(
                f"{path} counts steps that were released with this noise key and run_id, and a new run would release "
                "them again over the same noise; go on from the run's checkpoint, or begin a run with a new key"
            )
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _lock(handle, path)
        header = {"key": identity.key.fingerprint(), "settings": identity.settings, "records": identity.records}
        lines = [_json(header), _json({"from": 0, "surroundings": identity.surroundings})]
        body = "".join(line + "\n" for line in lines).encode()
        made = cls(path, handle, 0, secret=_secret(identity), body=body)
        os.write(handle, made._head(0) + body)
        os.fsync(handle)
        return made

    @classmethod
    def resume(cls, path: str | os.PathLike[str], identity: RunIdentity, *, step: int) -> Self:
        """The file of a run that goes on after `step` steps; one ValueError line where it may not."""
        path = Path(path)
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            raise ValueError(
                f"{path} is missing, so nobody knows which steps of the run were released, and over what; put it back, "
                f"{_NEW_RUN}"
            ) from None
        try:
            _lock(handle, path)
            found = _read(handle, path, identity)
            _check(found, identity, step=step, path=path)
            made = cls(path, handle, found.count, secret=_secret(identity), body=found.body)
            if dict(found.segments[-1][1]) != _plain(identity.surroundings):
                made._add({"from": step, "surroundings": identity.surroundings})
        except BaseException:
            os.close(handle)
            raise
        return made

    def note(self, step: int) -> None:
        """Step `step` (from 0) is about to be released: the disk counts it first."""
        if self._handle is None:
            raise ValueError(f"{self.path} was closed, and step {step} cannot be counted; take the run up again")
        if step >= self._on_disk:
            self._write(step + _AHEAD)
        self.count = max(self.count, step + 1)

    def _add(self, segment: Mapping[str, Any]) -> None:
        """One more line; until the digest follows, it counts as one that a crash cut off."""
        assert self._handle is not None
        start = _BEFORE_BODY + len(self._body)
        line = (_json(segment) + "\n").encode()
        os.ftruncate(self._handle, start)
        os.lseek(self._handle, start, os.SEEK_SET)
        os.write(self._handle, line)
        os.fsync(self._handle)
        self._body += line
        self._write(self._on_disk)

    def _write(self, count: int) -> None:
        assert self._handle is not None
        _check_is_in_place(self._handle, self.path)
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.write(self._handle, self._head(count))
        getattr(os, "fdatasync", os.fsync)(self._handle)
        self._on_disk = count

    def _head(self, count: int) -> bytes:
        first = f"{count:0{_DIGITS}d}"
        return f"{first}\n{_digest(first, self._body, self._secret)}\n".encode()

    def close(self) -> None:
        """Make the count exact, and let others open the file."""
        if self._handle is None:
            return
        try:
            if self._on_disk != self.count:
                self._write(self.count)
        finally:
            os.close(self._handle)
            self._handle = None


@dataclass(frozen=True, kw_only=True)
class _Found:
    count: int
    key: str
    settings: dict[str, Any]
    records: dict[str, str]
    segments: list[tuple[int, dict[str, Any]]]  # from which step on, in which surroundings
    body: bytes  # all behind the digest, in whole lines


def released_count(path: Path) -> int:
    """How many steps a file counts; 0 where there is none, or where a crash came before its first line was whole."""
    try:
        first = path.read_bytes()[:_DIGITS]
    except FileNotFoundError:
        return 0
    try:
        return int(first or b"0")
    except ValueError:
        raise ValueError(f"{path} cannot be read; put the run's own back, {_NEW_RUN}") from None


def _read(handle: int, path: Path, identity: RunIdentity) -> _Found:
    data = b""
    while part := os.read(handle, 1 << 20):
        data += part
    whole = data[: data.rfind(b"\n") + 1]  # a line that a crash cut off had no step behind it
    try:
        first, digest, second, *rest = whole.decode("utf-8").splitlines()
        header, segments = json.loads(second), [json.loads(line) for line in rest]
        found = _Found(
            count=int(first),
            key=header["key"],
            settings=header["settings"],
            records=header["records"],
            segments=[(part["from"], part["surroundings"]) for part in segments],
            body=whole[_BEFORE_BODY:],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}); put the run's own back, {_NEW_RUN}"
        ) from error
    if found.key != identity.key.fingerprint():
        raise ValueError(
            f"{path} is of a run with another noise key ({found.key}, and this one is {identity.key.fingerprint()}); "
            f"put the run's own back, {_NEW_RUN}"
        )
    secret = _secret(identity)
    if hmac.compare_digest(_digest(first, found.body, secret), digest):
        return found
    shorter = found.body[: found.body[:-1].rfind(b"\n") + 1]  # the last line came, and its digest did not
    if len(found.segments) > 1 and hmac.compare_digest(_digest(first, shorter, secret), digest):
        return dataclasses.replace(found, segments=found.segments[:-1], body=shorter)
    raise ValueError(f"{path} was edited, so nobody knows what was released; put the run's own back, {_NEW_RUN}")


def _secret(identity: RunIdentity) -> bytes:
    return identity.key.subkey("digest", "released steps")


def _digest(first: str, body: bytes, secret: bytes) -> str:
    return blake2b(f"{first}\n".encode() + body, key=secret, digest_size=_DIGEST_BYTES).hexdigest()


def _check(found: _Found, identity: RunIdentity, *, step: int, path: Path) -> None:
    for name in ("training", *(name for name in identity.records if name != "training")):
        if found.records.get(name) != identity.records.get(name) and (name == "training" or name in found.records):
            raise ValueError(
                f"the {name} records are not those that the run was begun with (edited, moved, replaced or tokenised "
                f"otherwise), and over others its noise would cancel out; put them back, {_NEW_RUN}"
            )
    if changed := _difference(found.settings, _plain(identity.settings)):
        raise ValueError(f"{changed}: a run keeps the settings it was begun with; undo the change, {_NEW_RUN}")
    if step > found.count:
        raise ValueError(
            f"the checkpoint is of step {step} and {path} counts {found.count} steps: it is not the run's own, or an "
            f"old copy; put the run's own back, {_NEW_RUN}"
        )
    ends = [start for start, _ in found.segments[1:]] + [found.count]
    for (_, surroundings), end in zip(found.segments, ends, strict=True):
        changed = _difference(surroundings, _plain(identity.surroundings))
        if step < end and changed:
            raise ValueError(
                f"the checkpoint is of step {step} and the run has released {found.count}: what lies between may only "
                f"be repeated as it was, and {changed}; undo that, go on from a checkpoint of step {found.count}, "
                f"{_NEW_RUN}"
            )


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first value that changed, in words, those of digests ("the …") last; nothing where none did."""
    for name in sorted({*then, *now}, key=lambda name: (name.startswith("the "), name == "plan", name)):
        if then.get(name) != now.get(name):
            if name.endswith(CANNOT_BE_COMPARED):
                return name
            old, new = (_short(values.get(name)) for values in (then, now))
            told = not name.startswith("the ") and old != new
            return f"{name} was {old} and is {new}" if told else f"{name} has changed"
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else "…"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As the file gives them back."""
    found: dict[str, Any] = json.loads(_json(dict(values)))
    return found


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
