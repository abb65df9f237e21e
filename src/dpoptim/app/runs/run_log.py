"""The log of a run: one JSON object a line, written through at once."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from dpoptim.app.support.files import write_text
from dpoptim.app.support.plain import plain

try:
    import fcntl
except ImportError:  # not a POSIX system: two processes in one run are then not noticed
    fcntl = None  # type: ignore[assignment]


class RunLog:
    """Appends entries; holds the run for this process while it is open.

    Entries have a `kind`: start, step, evaluation, checkpoint, end. Numbers that are not finite are written as null.
    Start and end have the time of day; the others have none, since the time of steps tells of their batches.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                raise ValueError(f"{path.parent} is being trained by another process; wait for it to end") from None

    def write(self, kind: str, **values: Any) -> None:
        entry: dict[str, Any] = {"kind": kind}
        if kind in ("start", "end"):
            entry["time"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry |= values
        self._file.write(json.dumps(plain(entry), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


class LogLine(NamedTuple):
    """One line of a log; `entry` is None where the line is no JSON object."""

    place: int  # from 1
    entry: dict[str, Any] | None
    is_open: bool  # nothing ends the line: it is the file's last, and was cut off where it cannot be read


def log_lines(path: Path) -> list[LogLine]:
    """The lines of a log that are not blank, in order, readable or not."""
    lines = path.read_bytes().split(b"\n")
    return [LogLine(place, _entry(line), place == len(lines)) for place, line in enumerate(lines, 1) if line.strip()]


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log in order; a last line that was cut off by a crash is left out."""
    entries: list[dict[str, Any]] = []
    lines = log_lines(path)
    for line in lines:
        if line.entry is not None:
            entries.append(line.entry)
        elif line is not lines[-1]:
            raise ValueError(f"{path}, line {line.place} is no JSON; was the file changed?")
    return entries


def cut_log(path: Path, step: int) -> None:
    """Drop what lies behind `step`, before the run is taken up there again.

    Steps that are repeated come out the same, and are written once.
    """
    kept = [entry for entry in read_log(path) if entry.get("step", 0) <= step]
    write_text(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept))
