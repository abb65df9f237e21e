"""How far a run has ever got, in a file beside its key, written before a step is released.

Noise and batches are functions of (key, run, step). A step that was released may be computed again only if everything
in it is the same, bit for bit: then nothing new is told. With other records, other settings or other rounding, the
difference of the two releases would have no noise in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

try:
    import fcntl
except ImportError:  # not a POSIX system: two processes in one run are then not noticed
    fcntl = None  # type: ignore[assignment]

_DIGITS = 20
_AHEAD = 16
_NEW_RUN = "or begin a new run, which has a new key and an epsilon of its own"


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What must stay the same while a run goes on.

    `settings` are all public values that change a release (rates, schedule, seeds, clip norm, model, plan), `records`
    keyed digests of the data: "training", and held-out parts, which may be left out or added, but not changed.
    `surroundings` change a release in its last bits alone: device,
    versions, how a batch is cut; they may change where no step is repeated. `key` is the noise key's fingerprint.
    """

    key: str
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

    The file: the count, then a line of JSON for settings and records, then a line wherever the surroundings changed.
    """

    def __init__(self, path: Path, handle: int, count: int) -> None:
        self.path, self.count = path, count
        self._handle: int | None = handle
        self._on_disk = count

    @classmethod
    def begin(cls, path: str | os.PathLike[str], identity: RunIdentity, *, count: int = 0) -> Self:
        """A new file for a run that has released nothing, or `count` steps; FileExistsError where there is one."""
        path = Path(path)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        header = {"key": identity.key, "settings": identity.settings, "records": identity.records}
        lines = [f"{count:0{_DIGITS}d}", _json(header), _json({"from": 0, "surroundings": identity.surroundings})]
        os.write(handle, "".join(line + "\n" for line in lines).encode())
        os.fsync(handle)
        _lock(handle, path)
        return cls(path, handle, count)

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
            found = _read(handle, path)
            _check(found, identity, step=step, path=path)
            if dict(found.segments[-1][1]) != _plain(identity.surroundings):
                line = _json({"from": step, "surroundings": identity.surroundings}) + "\n"
                os.ftruncate(handle, found.size)
                os.lseek(handle, found.size, os.SEEK_SET)
                os.write(handle, line.encode())
                os.fsync(handle)
        except BaseException:
            os.close(handle)
            raise
        return cls(path, handle, found.count)

    def note(self, step: int) -> None:
        """Step `step` (from 0) is about to be released: the disk counts it first."""
        if self._handle is None:
            raise ValueError(f"{self.path} was closed, and step {step} cannot be counted; take the run up again")
        if step >= self._on_disk:
            self._write(step + _AHEAD)
        self.count = max(self.count, step + 1)

    def _write(self, count: int) -> None:
        assert self._handle is not None
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.write(self._handle, f"{count:0{_DIGITS}d}".encode())
        getattr(os, "fdatasync", os.fsync)(self._handle)
        self._on_disk = count

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
    size: int  # bytes of whole lines


def _read(handle: int, path: Path) -> _Found:
    data = b""
    while part := os.read(handle, 1 << 20):
        data += part
    whole = data[: data.rfind(b"\n") + 1]  # a line that a crash cut off had no step behind it
    try:
        first, second, *rest = whole.decode("utf-8").splitlines()
        header, segments = json.loads(second), [json.loads(line) for line in rest]
        return _Found(
            count=int(first),
            key=header["key"],
            settings=header["settings"],
            records=header["records"],
            segments=[(part["from"], part["surroundings"]) for part in segments],
            size=len(whole),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}); put the run's own back, {_NEW_RUN}"
        ) from error


def _check(found: _Found, identity: RunIdentity, *, step: int, path: Path) -> None:
    if found.key != identity.key:
        raise ValueError(
            f"{path} is of a run with another noise key ({found.key}, and this one is {identity.key}); put the run's "
            f"own back, {_NEW_RUN}"
        )
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
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"{path.parent} is being trained by another process; wait for it to end") from None
