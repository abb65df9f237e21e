"""A run directory, read back: what was planned, what was logged, and what could not be read."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpoptim.app.runs.run_log import log_lines
from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.accounting import describe_accountant
from dpoptim.privacy.composition import EpsilonSpent

Series = list[tuple[int, float]]
"""(step, value), steps ascending, values finite."""

_LOG = "log.jsonl"

UNKNOWN_END = "still running, or killed"
"""How a run ended whose log does not say."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What the plan promises for all its steps; a part that no file tells is None.

    `epsilon` is the accountant's number as it stands in plan.json, ∞ where there is no guarantee.
    """

    epsilon: float | None
    delta: float | None
    adjacency: str | None
    sampling: str | None
    accountant: str | None

    @property
    def is_private(self) -> bool | None:
        """Whether a finite ε is promised; None where the files do not say."""
        return None if self.epsilon is None else math.isfinite(self.epsilon)


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """One run directory: its settings, its log's records by kind, and notes on what is missing or was ignored.

    `steps` and `evaluations` are sorted by step and hold each step once: after a resume the later record stands.
    """

    name: str
    folder: Path
    recipe: dict[str, Any]
    recipe_text: str
    plan: dict[str, Any]
    statement: str
    starts: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    ends: list[dict[str, Any]]
    notes: list[str]

    def setting(self, name: str) -> Any:
        """A value of the run: as the last start logged it, or of the recipe, or of the plan; None if nowhere."""
        for place in (self.starts[-1] if self.starts else {}, self.recipe, self.plan):
            if place.get(name) is not None:
                return place[name]
        return None

    @property
    def last_step(self) -> int:
        """How many steps are known to have been taken."""
        ended = [step for step in map(_step_of, self.ends) if step is not None]
        return max([0, *(row["step"] for row in (*self.steps, *self.evaluations)), *ended])

    @property
    def planned_steps(self) -> int | None:
        """How many steps the guarantee covers."""
        found = self.plan.get("steps") or self.setting("steps")
        return found if isinstance(found, int) else None

    @property
    def ending(self) -> str:
        """How the run ended, as the log says it."""
        if not self.ends or (self.starts and self.ends[-1]["_line"] < self.starts[-1]["_line"]):
            return UNKNOWN_END
        return str(self.ends[-1].get("reason", "ended"))

    @property
    def resumes(self) -> int:
        """How often the run was taken up again."""
        return sum(start.get("resumed_from") is not None for start in self.starts)

    @property
    def seconds(self) -> float | None:
        """How long it worked: what its sessions logged at their ends, else its steps at their mean time."""
        logged = [number(end.get("seconds")) for end in self.ends]
        if logged and len(logged) >= len(self.starts) and None not in logged:
            return math.fsum(value for value in logged if value is not None)
        steps = series(self.steps, "seconds")
        return math.fsum(value for _, value in steps) / len(steps) * self.last_step if steps else None

    @functools.cached_property
    def privacy_plan(self) -> PrivacyPlan | None:
        """The plan in plan.json; None where it is not there, or is none."""
        names = {field.name for field in dataclasses.fields(PrivacyPlan)}
        try:
            return PrivacyPlan.from_dict({name: value for name, value in self.plan.items() if name in names})
        except (ValueError, TypeError, KeyError):
            return None

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """The promise, from plan.json alone: the accountant's ε that stands there, and what the plan says of itself."""
        plan = self.privacy_plan
        epsilon = _positive(self.plan.get("epsilon"))
        if self.plan.get("noise_multiplier") == 0 or (plan is not None and not plan.is_private):
            epsilon = math.inf
        sampling = self.plan.get("sampling")
        return Guarantee(
            epsilon=epsilon,
            delta=number(self.plan.get("delta")),
            adjacency=_text(self.plan.get("adjacency")),
            sampling=_text(sampling.get("kind") if isinstance(sampling, dict) else sampling),
            accountant=None if plan is None else describe_accountant(plan.run),
        )

    @functools.cached_property
    def epsilon_spent(self) -> float | None:
        """ε of `last_step` steps: as the log says, else the accountant, else the whole run's, which is no less."""
        guarantee = self.guarantee
        if not guarantee.is_private:
            return guarantee.epsilon
        logged = series(self.steps, "epsilon")
        if logged and logged[-1][0] >= self.last_step:
            return max(value for _, value in logged)
        return self._accounted() if self.last_step < (self.planned_steps or 0) else guarantee.epsilon

    def _accounted(self) -> float | None:
        """Steps behind the last record have cost ε too, which no record tells."""
        plan = self.privacy_plan
        return self.guarantee.epsilon if plan is None else EpsilonSpent(plan).at(self.last_step)


def read_runs(folders: Sequence[str | Path]) -> list[RunHistory]:
    """Read each folder; names are the folders' own, with as much of the path before them as tells them apart.

    A folder that holds runs, as `dpoptim compare` and the demonstration make one, stands for all of them (for those
    that are compared, and not for the trials).
    Edge cases: a folder that is no run and holds none, or whose log is empty, is a ValueError that says so.
    """
    paths = [path for folder in folders for path in _runs_in(Path(folder).expanduser())]
    return [read_run(path, name=name) for path, name in zip(paths, _names(paths), strict=True)]


def _runs_in(folder: Path) -> list[Path]:
    """The folder itself, or the runs in it where it is none: one level below, or as a comparison keeps them."""
    if (folder / _LOG).is_file():
        return [folder]
    compared = folder.glob(f"runs/*/*/seed-*/{_LOG}")
    logs = (*compared, *folder.glob(f"*/{_LOG}"))
    return sorted(log.parent for log in logs if log.stat().st_size) or [folder]  # an empty one has just begun


def read_run(folder: str | Path, *, name: str | None = None) -> RunHistory:
    """Read one run directory; of its files only log.jsonl must be there, and the noise key is never opened.

    Edge cases: a line of the log that is no JSON (the last one, if the run crashed while it wrote) is left out and
    noted; records behind the step that a later start resumed from are superseded; a log without any readable record
    is refused.
    """
    folder = Path(folder)
    log = folder / _LOG
    if not folder.exists():
        raise ValueError(f"RUN {folder} does not exist; give a folder that `dpoptim train` wrote")
    if not log.is_file():
        raise ValueError(
            f"RUN {folder} is no run directory and holds none (no log.jsonl); give a folder that `dpoptim train` or "
            "`dpoptim compare` wrote"
        )
    notes: list[str] = []
    records = _records(log, notes)
    if not records:
        raise ValueError(f"RUN {folder} has an empty log.jsonl; nothing was logged yet, so train first")
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    starts, ends = [], []
    for record in records:
        kind, step = record.get("kind"), _step_of(record)
        if kind == "start":
            starts.append(record)
            since = record.get("resumed_from")
            if isinstance(since, int):
                for kept in (steps, evaluations):
                    for late in [step for step in kept if step > since]:
                        del kept[late]
        elif kind == "end":
            ends.append(record)
        elif kind in ("step", "evaluation") and step is not None:
            (steps if kind == "step" else evaluations)[step] = record
    recipe_text = _content(folder / "recipe.toml", notes) or ""
    return RunHistory(
        name=name or _names([folder])[0],
        folder=folder,
        recipe=_parsed(recipe_text, tomllib.loads, "recipe.toml", notes),
        recipe_text=recipe_text,
        plan=_plan(_parsed(_content(folder / "plan.json", notes), json.loads, "plan.json", notes)),
        statement=(_content(folder / "statement.txt", notes) or "").strip(),
        starts=starts,
        steps=[steps[step] for step in sorted(steps)],
        evaluations=[evaluations[step] for step in sorted(evaluations)],
        ends=ends,
        notes=notes,
    )


def series(records: Iterable[dict[str, Any]], path: str) -> Series:
    """The finite values at a dotted path, by step; records without one are left out.

    >>> series([{"step": 1, "released": {"update_norm": 2.0}}, {"step": 2}], "released.update_norm")
    [(1, 2.0)]
    """
    found = ((record["step"], number(value_at(record, path))) for record in records)
    return [(step, value) for step, value in found if value is not None]


def value_at(record: Any, path: str) -> Any:
    """What lies at a dotted path of nested dictionaries; None where nothing does."""
    for part in path.split("."):
        record = record.get(part) if isinstance(record, dict) else None
    return record


def number(value: Any) -> float | None:
    """A finite number as float; None for everything else, such as NaN, a text or True.

    >>> number(2), number(float("nan")), number("2"), number(True)
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _records(log: Path, notes: list[str]) -> list[dict[str, Any]]:
    lines = log_lines(log)
    broken = [line.place for line in lines if line.entry is None]
    if lines and lines[-1].is_open and lines[-1].entry is None:
        notes.append(f"log.jsonl: its last line ({broken.pop()}) was cut off while it was written, and is ignored")
    if broken:
        some = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
        notes.append(f"log.jsonl: {len(broken)} unreadable line(s) ignored: {some}")
    return [{**line.entry, "_line": line.place} for line in lines if line.entry is not None]


def _content(file: Path, notes: list[str]) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        notes.append(f"{file.name} is missing")
        return None


def _parsed(text: str | None, parse: Callable[[str], Any], file: str, notes: list[str]) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = parse(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{file} could not be read")
    return {}


def _plan(found: dict[str, Any]) -> dict[str, Any]:
    """The plan's fields and the accountant's side by side; nothing where the file is none of a run."""
    inner = found.get("plan")
    if not isinstance(inner, dict):
        return {}
    return {**inner, **{key: value for key, value in found.items() if key != "plan" and value is not None}}


def _names(paths: Sequence[Path]) -> list[str]:
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{place}: {path}" for place, path in enumerate(paths, 1)]


def _step_of(record: dict[str, Any]) -> int | None:
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def _positive(value: Any) -> float | None:
    """ε as a float; an "inf" that JSON could only write as text counts as infinite."""
    if isinstance(value, str):
        return math.inf if value.lower() in ("inf", "infinity", "∞") else None
    if isinstance(value, float) and math.isinf(value):
        return math.inf
    found = number(value)
    return found if found is not None and found >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
