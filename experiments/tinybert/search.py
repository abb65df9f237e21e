"""Tuning as a pure function of what was tried: one knob after the other is turned to its best, until none moves."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.tinybert.table_of_cells import Hyperparameter, Row

Setting = tuple[tuple[str, float], ...]


def first_setting(row: Row, column: str) -> Setting:
    """Where the search begins in a column."""
    starts = row.starts.get(column, {})
    return tuple((knob.name, starts.get(knob.name, knob.start)) for knob in row.knobs)


def wanted(row: Row, column: str, tried: Mapping[Setting, float]) -> list[Setting]:
    """What to try next; nothing where no neighbour on any knob's grid is better than the setting that was reached.

    `tried` has the loss of each setting, infinity where it diverged or was given up. Of settings beside each other on
    a knob's grid both are asked for at once, so that they can be run together.

    >>> row = Row(name="x", label="x", knobs=(Hyperparameter("lr", (1.0, 2.0, 3.0), 2.0), Hyperparameter("eps", (1.0, 2.0), 1.0)))
    >>> tried: dict[Setting, float] = {}
    >>> while settings := wanted(row, "banded", tried):
    ...     tried |= {setting: abs(dict(setting)["lr"] - 3) + dict(setting)["eps"] for setting in settings}
    >>> reached(row, "banded", tried), len(tried)
    ((('lr', 3.0), ('eps', 1.0)), 4)
    """
    return _descend(row, column, tried)[1]


def reached(row: Row, column: str, tried: Mapping[Setting, float]) -> Setting:
    """Where the search stands."""
    return _descend(row, column, tried)[0]


def on_edge(row: Row, setting: Setting) -> list[str]:
    """The knobs that stand at an end of their grid: there a wider grid might do better."""
    values = dict(setting)
    return [k.name for k in row.knobs if len(k.grid) > 2 and values[k.name] in (k.grid[0], k.grid[-1])]


def _descend(row: Row, column: str, tried: Mapping[Setting, float]) -> tuple[Setting, list[Setting]]:
    """Go over the knobs until none moves: (where that ends, what is not known yet and needed to go on)."""
    here = first_setting(row, column)
    if here not in tried:
        return here, [here]
    moved = True
    while moved:
        moved = False
        for knob in row.knobs:
            while True:
                beside = _beside(here, knob)
                if missing := [setting for setting in beside if setting not in tried]:
                    return here, missing
                best = min([here, *beside], key=lambda setting: tried[setting])
                if best == here:
                    break
                here, moved = best, True
    return here, []


def _beside(setting: Setting, knob: Hyperparameter) -> list[Setting]:
    values = dict(setting)
    at = knob.grid.index(values[knob.name])
    others = [knob.grid[i] for i in (at - 1, at + 1) if 0 <= i < len(knob.grid)]
    return [tuple((name, other if name == knob.name else value) for name, value in setting) for other in others]
