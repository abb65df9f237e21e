"""Results files: JSON lines, one self-contained line per cell, written whole or not at all.

A line is {"experiment", "scale", "cell", "plan", "epsilon", "adjacency", "note", "result", "setting"}: what was run,
what it guarantees, its result, and where it was made. `cell` holds all settings, so that a line explains itself.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
REQUIRED = ("experiment", "scale", "cell", "plan", "epsilon", "adjacency", "note", "result", "setting")
OF_SETTING = ("commit", "machine", "versions", "made", "seconds")
"""What `setting` must hold."""


class Contents(NamedTuple):
    """The lines of a file, and a remark about it (None if there is nothing to report)."""

    lines: list[Line]
    note: str | None


def cell_key(cell: Mapping[str, Any]) -> str:
    """One text per set of settings, whatever the order of their names.

    >>> cell_key({"steps": 2, "lr": 0.5}) == cell_key({"lr": 0.5, "steps": 2})
    True
    """
    return json.dumps(cell, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line in one write and flush it to disk.

    Floats keep all digits. NaN and infinity are refused, because JSON has neither. A torn last line, which `read`
    ignores, is cut off first.
    """
    if missing := _missing(line):
        raise ValueError(f"line has no {missing}; a line of results holds {', '.join(REQUIRED)}")
    try:
        text = json.dumps(line, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise ValueError(f"line of cell {line['cell']} holds a number that is not finite; write None there") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    _repair_end(path)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        data = (text + "\n").encode()
        written = os.write(handle, data)
        if written != len(data):
            raise OSError(f"{path}: only {written} of {len(data)} bytes could be written; is the disk full?")
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> Contents:
    """Read all lines. A torn last line is dropped with a note; other damage is a ValueError that names the line.

    >>> read(Path("no such file"))
    Contents(lines=[], note=None)
    """
    if not path.exists():
        return Contents([], None)
    texts = path.read_bytes().split(b"\n")
    lines, note = [], None
    for number, text in enumerate(texts, start=1):
        last = number == len(texts)
        if last and not text:
            continue
        line = _parsed(text)
        if line is None and last:
            note = f"{path}: line {number} was cut short and is ignored; its cell will be run again"
        elif line is None or (missing := _missing(line)):
            what = "is not a JSON object" if line is None else f"has no {missing}"
            raise ValueError(f"{path}: line {number} is damaged: it {what}; fix or delete it to run its cell again")
        else:
            lines.append(line)
    return Contents(lines, note)


def done(path: Path, *, scale: str | None = None) -> set[str]:
    """The keys of the cells in the file, at one scale or at any."""
    return {cell_key(line["cell"]) for line in read(path).lines if scale in (None, line["scale"])}


def start_over(path: Path) -> Path | None:
    """Rename a file to NAME.old, or NAME.old2, NAME.old3, …; returns the new name, None if there was no file."""
    if not path.exists():
        return None
    names = (path.with_name(f"{path.name}.old{number if number > 1 else ''}") for number in itertools.count(1))
    return path.replace(next(name for name in names if not name.exists()))


def _parsed(text: bytes) -> Line | None:
    """The JSON object, or None if it is not one."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _missing(line: Mapping[str, Any]) -> str | None:
    """The first required entry that a line lacks, in words.

    >>> _missing({name: {"loss": 1.0} for name in REQUIRED})
    "'commit' in its 'setting'"
    """
    if missing := [name for name in REQUIRED if name not in line]:
        return repr(missing[0])
    if not isinstance(line["result"], Mapping) or not line["result"]:
        return "'result'"
    setting = line["setting"] if isinstance(line["setting"], Mapping) else {}
    return next((f"{name!r} in its 'setting'" for name in OF_SETTING if name not in setting), None)


def _repair_end(path: Path) -> None:
    """Make the file end with a newline: a whole last line gets one, a torn one is removed."""
    if not path.exists():
        return
    data = path.read_bytes()
    if not data or data.endswith(b"\n"):
        return
    start = data.rfind(b"\n") + 1
    with path.open("r+b") as file:
        if _parsed(data[start:]) is None:
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
