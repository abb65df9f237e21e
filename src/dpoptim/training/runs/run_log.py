"""The log of a run: one JSON object a line, written through at once."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dpoptim.training.support.files import write_text
from dpoptim.training.support.plain import plain

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


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log in order; a last line that was cut off by a crash is left out."""
    entries: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is no JSON; was the file changed?") from None
        entries.append(entry)
    return entries


def cut_log(path: Path, step: int) -> None:
    """Drop what lies behind `step`, before the run is taken up there again.

    Steps that are repeated come out the same, and are written once.
    """
    kept = [entry for entry in read_log(path) if entry.get("step", 0) <= step]
    write_text(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept))
