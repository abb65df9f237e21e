"""Tuning as a pure function of what was tried: go to the best setting, try its neighbours, until none is better."""

from __future__ import annotations

from collections.abc import Mapping

from dpoptim.reproduce.tinybert.table_of_cells import Knob, Row

Setting = tuple[tuple[str, float], ...]


def first_setting(row: Row) -> Setting:
    """Where the search begins."""
    return tuple((knob.name, knob.start) for knob in row.knobs)


def wanted(row: Row, tried: Mapping[Setting, float]) -> list[Setting]:
    """What to try next; nothing where the best setting's neighbours are all worse.

    A neighbour is one step away on the grid of one knob. `tried` has the loss of each, infinity where it diverged.

    >>> row = Row(name="x", label="x", knobs=(Knob("lr", (1.0, 2.0, 3.0), 2.0),))
    >>> wanted(row, {})
    [(('lr', 2.0),)]
    >>> wanted(row, {(("lr", 2.0),): 5.0})
    [(('lr', 1.0),), (('lr', 3.0),)]
    >>> wanted(row, {(("lr", 2.0),): 5.0, (("lr", 1.0),): 6.0, (("lr", 3.0),): 6.0})
    []
    """
    if not tried:
        return [first_setting(row)]
    best = best_of(tried)
    return [setting for knob in row.knobs for setting in _beside(best, knob) if setting not in tried]


def best_of(tried: Mapping[Setting, float]) -> Setting:
    """The setting of least loss; the first tried of several."""
    return min(tried, key=lambda setting: tried[setting])


def on_edge(row: Row, setting: Setting) -> list[str]:
    """The knobs that stand at an end of their grid: there a wider grid might do better."""
    values = dict(setting)
    return [k.name for k in row.knobs if len(k.grid) > 2 and values[k.name] in (k.grid[0], k.grid[-1])]


def _beside(setting: Setting, knob: Knob) -> list[Setting]:
    values = dict(setting)
    at = knob.grid.index(values[knob.name])
    others = [knob.grid[i] for i in (at - 1, at + 1) if 0 <= i < len(knob.grid)]
    return [tuple((name, other if name == knob.name else value) for name, value in setting) for other in others]
