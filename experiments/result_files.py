"""Files of results: JSON lines, one self-contained line a cell, which an interrupted run leaves whole or not at all.

A line is {"experiment", "scale", "cell", "plan", "epsilon", "adjacency", "note", "result", "setting"}: what was run,
what it guarantees, what came out, and where it was made. `cell` holds all settings, so that a line means the same
wherever it is read.
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
"""What `setting` holds at least."""


class Contents(NamedTuple):
    """The lines of a file, and what is to be said about it (None: nothing)."""

    lines: list[Line]
    note: str | None


def cell_key(cell: Mapping[str, Any]) -> str:
    """One text for one set of settings, whatever the order of their names.

    >>> cell_key({"steps": 2, "lr": 0.5}) == cell_key({"lr": 0.5, "steps": 2})
    True
    """
    return json.dumps(cell, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line in one write, and make sure that it is on the disk.

    Floats keep all their digits. Edge cases: NaN and infinity are refused (ValueError), as JSON has neither; a torn
    last line, which `read` drops, is cut off first; the folder is made.
    """
    if lacking := _lacking(line):
        raise ValueError(f"line has no {lacking}; a line of results holds {', '.join(REQUIRED)}")
    try:
        text = json.dumps(line, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise ValueError(f"line of cell {line['cell']} holds a number that is not finite; write None there") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    _mend_end(path)
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
    """All lines of a file. A torn last line is dropped, with a note; other damage is a ValueError that names the line.

    Edge cases: no file has no lines.

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
            note = f"{path}: line {number} was cut short and is left out; its cell will be run again"
        elif line is None or (lacking := _lacking(line)):
            what = "is no JSON object" if line is None else f"has no {lacking}"
            raise ValueError(
                f"{path}: line {number} is damaged: it {what}; mend or delete it, and its cell will be run again"
            )
        else:
            lines.append(line)
    return Contents(lines, note)


def done(path: Path, *, scale: str | None = None) -> set[str]:
    """The keys of the cells that the file holds, at one scale or at any."""
    return {cell_key(line["cell"]) for line in read(path).lines if scale in (None, line["scale"])}


def start_again(path: Path) -> Path | None:
    """Rename a file to NAME.old, or NAME.old2, NAME.old3, …: none is lost; None where there was none."""
    if not path.exists():
        return None
    names = (path.with_name(f"{path.name}.old{number if number > 1 else ''}") for number in itertools.count(1))
    return path.replace(next(name for name in names if not name.exists()))


def _parsed(text: bytes) -> Line | None:
    """The JSON object, or None where it is none."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _lacking(line: Mapping[str, Any]) -> str | None:
    """What a line ought to hold and does not, the first of it, in words.

    >>> _lacking({name: {"loss": 1.0} for name in REQUIRED})
    "'commit' in its 'setting'"
    """
    if missing := [name for name in REQUIRED if name not in line]:
        return repr(missing[0])
    if not isinstance(line["result"], Mapping) or not line["result"]:
        return "'result'"
    setting = line["setting"] if isinstance(line["setting"], Mapping) else {}
    return next((f"{name!r} in its 'setting'" for name in OF_SETTING if name not in setting), None)


def _mend_end(path: Path) -> None:
    """Make the file end with a newline: a whole last line gets one, a torn one goes."""
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
