"""The log of a run: writing it, and reading a run's history and result back."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from dpoptim.app.files import naming, write_text
from dpoptim.app.format import plain
from dpoptim.integrations.optional import first_line
from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.composition import EpsilonSpent

Series = list[tuple[int, float]]
"""(step, value), steps ascending, values finite."""

_LOG = "log.jsonl"


class LogCopy(Protocol):
    """Receives the entries of a log, and first those that a resumed run has kept."""

    def write(self, entry: dict[str, Any]) -> None: ...


class RunLog:
    """Appends entries to a log, one JSON object per line, and to copies of it."""

    def __init__(self, path: Path, *, copies: Sequence[LogCopy] = ()) -> None:
        self._path, self._copies = path, copies
        for entry in read_log(path) if copies else ():
            if entry["kind"] not in ("start", "end"):  # of earlier sessions
                self._copy(entry)

    def write(self, kind: str, **values: Any) -> None:
        entry: dict[str, Any] = {"kind": kind}
        if kind in ("start", "end"):  # the times of steps would reveal the sizes of their batches
            entry["time"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry |= values
        with naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(entry), ensure_ascii=False, allow_nan=False) + "\n")
        self._copy(entry)

    def _copy(self, entry: dict[str, Any]) -> None:
        for copy in self._copies:
            copy.write(entry)


def cut_log(path: Path, step: int) -> None:
    """Drop the entries after `step`, before a run resumes there; repeated steps then appear once."""
    kept = [entry for entry in read_log(path) if entry.get("step", 0) <= step]
    write_text(path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept))


def log_lines(path: Path) -> list[dict[str, Any] | None]:
    """The entries of a log, in order; None for a line that is not a JSON object."""
    entries: list[dict[str, Any] | None] = []
    for line in filter(bytes.strip, path.read_bytes().split(b"\n")):
        entry = None
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
        entries.append(entry if isinstance(entry, dict) else None)
    return entries


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log, in order; a last line that a crash cut off is left out.

    Raises:
        ValueError: Any other line is not JSON.
    """
    lines = log_lines(path)
    if None in lines[:-1]:
        raise ValueError(f"{path}, line {lines.index(None) + 1} is not JSON; the file was changed")
    return [line for line in lines if line is not None]


class RunHistory:
    """A run directory, read back: its settings, its plan, and its log's entries by kind."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder, self.name = folder, name or folder.resolve().name
        log = folder / _LOG
        if not log.is_file():
            is_there = f"{folder} is not a run directory: it has no {_LOG}"
            raise ValueError(is_there if folder.exists() else f"run directory {folder} does not exist")
        entries = read_log(log)
        if not entries:
            raise ValueError(f"{log} is empty; nothing was logged yet")
        self.starts, self.steps, self.evaluations, self.ends = (
            [entry for entry in entries if entry["kind"] == kind] for kind in ("start", "step", "evaluation", "end")
        )
        self.reason = last_reason(folder)  # None: still running, or killed
        cut_off = log_lines(log)[-1] is None
        self.notes = [f"the last line of {_LOG} was cut off while it was written, and is ignored"] if cut_off else []
        self.recipe_text: str = parsed(folder / "recipe.toml", str)
        self.recipe: dict[str, Any] = parsed(folder / "recipe.toml", tomllib.loads)
        self.statement: str = parsed(folder / "statement.txt", str).strip()
        self.plan: PrivacyPlan
        self.plan, self.epsilon = parsed(folder / "plan.json", plan_and_epsilon)

    def setting(self, name: str) -> Any:
        """A value of the last start or the recipe; None if there is none."""
        return {**self.recipe, **(self.starts[-1] if self.starts else {})}.get(name)

    @property
    def last_step(self) -> int:
        """How many steps were taken."""
        return max((entry["step"] for entry in (*self.steps, *self.evaluations, *self.ends)), default=0)

    @property
    def ending(self) -> str:
        """How the run ended, in the words of the log."""
        return self.reason or "still running, or killed"

    @property
    def scores(self) -> dict[str, Any]:
        """The last held-out scores; none if the run diverged."""
        return {} if self.reason == DIVERGED else self.evaluations[-1]

    @property
    def resumed_from(self) -> list[int]:
        """The step of each checkpoint that the run was resumed from."""
        return [start["resumed_from"] for start in self.starts if start.get("resumed_from") is not None]

    @property
    def seconds(self) -> float | None:
        """The seconds of all sessions; if one did not log its end, all steps at their mean time."""
        if self.ends and len(self.ends) >= len(self.starts):
            return math.fsum(end["seconds"] for end in self.ends)
        steps = series(self.steps, "seconds")
        return math.fsum(value for _, value in steps) / len(steps) * self.last_step if steps else None

    @functools.cached_property
    def epsilon_spent(self) -> float:
        """ε of the steps taken: as logged, or recomputed if steps after the last entry count too."""
        if not self.plan.is_private:
            return math.inf
        logged = series(self.steps, "epsilon")
        if logged and logged[-1][0] >= self.last_step:
            return max(value for _, value in logged)
        return self.epsilon if self.last_step >= self.plan.steps else EpsilonSpent(self.plan).at(self.last_step)


def read_runs(folders: Sequence[str | Path]) -> list[RunHistory]:
    """Read runs, and name each by the end of its path that differs; a folder of runs stands for all of them."""
    found = dict.fromkeys(path.resolve() for folder in folders for path in _runs_in(Path(folder).expanduser()))
    parts = [path.parts for path in found]
    length = next(n for n in itertools.count(1) if len({part[-n:] for part in parts}) == len(parts))
    return [RunHistory(path, "/".join(path.parts[-length:])) for path in found]


def _runs_in(folder: Path) -> list[Path]:
    """The run itself, or the runs in a folder, without the trials of a comparison."""
    if (folder / _LOG).is_file():
        return [folder]
    logs = (*folder.glob(f"runs/*/*/seed-*/{_LOG}"), *folder.glob(f"*/{_LOG}"))
    return sorted(log.parent for log in logs if log.stat().st_size) or [folder]  # an empty log has just begun


def plan_and_epsilon(text: str) -> tuple[PrivacyPlan, float]:
    """The plan in a plan.json, and ε of all its steps; ∞ without a guarantee."""
    found = json.loads(text)
    epsilon = math.inf if found["epsilon"] is None else float(found["epsilon"])
    return PrivacyPlan.from_dict(found["plan"]), epsilon


def parsed(file: Path, parse: Callable[[str], Any]) -> Any:
    """The content of a run's file; a ValueError names a file that is missing or broken."""
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read ({first_line(error)}); restore the original") from None


def series(records: Iterable[dict[str, Any]], path: str) -> Series:
    """The values at a dotted path such as "released.update_norm", by step; a log has null for those not finite."""
    found = ((record["step"], value_at(record, path)) for record in records)
    return [(step, value) for step, value in found if value is not None]


def value_at(record: Any, path: str) -> Any:
    """The value at a dotted path of nested dictionaries, or None."""
    for part in path.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


class Diverged(ValueError):
    """Training stopped because parameters are no longer finite."""


def last_reason(folder: Path) -> str | None:
    """How the last session of a run ended, in the words of its log; None if there is no log, or no end in it."""
    entries = read_log(folder / _LOG) if (folder / _LOG).is_file() else []
    sessions = [entry for entry in entries if entry["kind"] in ("start", "end")]
    return sessions[-1].get("reason") if sessions else None


def ending_by(error: BaseException) -> str:
    """How a log records an error: by its type only, because a message may quote records."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {type(error).__name__}"


DIVERGED = ending_by(Diverged())
