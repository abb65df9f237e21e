"""Numbers and tables as markdown text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from dpoptim.app.comparison.intervals import Interval
from dpoptim.privacy.statement import format_epsilon
from experiments.results_file import Line


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first `left` columns are text; the others are numbers, aligned right.

    >>> print(table(["name", "loss"], [["a", "1.0"]]))
    | name | loss |
    |---|---:|
    | a | 1.0 |
    """
    for row in rows:
        if len(row) != len(titles):
            raise ValueError(f"a row has {len(row)} cells and the table {len(titles)} titles: {row}")
    marks = ["---" if index < left else "---:" for index in range(len(titles))]
    body = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(titles) + " |", "|" + "|".join(marks) + "|", *body])


def number(value: float | None, digits: int = 4) -> str:
    """A number with that many significant digits, or a dash for None; in powers of ten if far from 1.

    >>> number(0.00012345, 2), number(187547.0, 3), number(None), number(0.0), number(12.5, 2), number(22.0, 3)
    ('1.2e-4', '1.88e5', '–', '0', '12', '22')
    """
    if value is None:
        return "–"
    text = f"{value:.{digits}g}"
    if "e" not in text and value and not 1e-3 <= abs(value) < 1e5:
        text = f"{value:.{digits - 1}e}"
    if "e" not in text:
        return text
    mantissa, power = text.split("e")
    return f"{mantissa}e{int(power)}"


def spread(found: Interval) -> str:
    """The mean, and half the width of the interval if there is one.

    >>> spread(Interval(mean=0.5, half_width=0.1)), spread(Interval(mean=-0.5, half_width=None))
    ('0.500 ± 0.100', '−0.500')
    """
    return thousandths(found.mean) + ("" if found.half_width is None else f" ± {found.half_width:.3f}")


def thousandths(value: float) -> str:
    """Three decimals, with a proper minus sign.

    >>> thousandths(-0.02), thousandths(-0.0004)
    ('−0.020', '0.000')
    """
    return f"{value:z.3f}".replace("-", "−")


def epsilon_shown(epsilon: float | None) -> str:
    """ε rounded up, or a dash if nothing is guaranteed.

    >>> epsilon_shown(261.23821), epsilon_shown(None)
    ('261.2383', '–')
    """
    return "–" if epsilon is None else format_epsilon(epsilon)


def percent(value: float) -> str:
    """A whole number of percent.

    >>> percent(0.123)
    '12 %'
    """
    return f"{100 * value:.0f} %"


def made_by(lines: Sequence[Line], command: str) -> str:
    """A sentence about where the lines come from."""
    commits = sorted({line["setting"]["commit"] for line in lines})
    machines = sorted({line["setting"]["machine"] for line in lines})
    days = sorted({line["setting"]["made"][:10] for line in lines})
    seconds, busy = sum(line["setting"]["seconds"] for line in lines), _seconds_of_the_machine(lines)
    took = f"{seconds:.0f} s"
    if busy < 0.9 * seconds:
        took += f" (several at a time, {busy:.0f} s in total)"
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"Made by `{command}`: {len(lines)} cells, {took} on {' and '.join(machines)}; {when}, commit "
        f"{', '.join(commits)}."
    )


def _seconds_of_the_machine(lines: Sequence[Line]) -> float:
    """The time during which at least one cell was running; several may have shared the machine.

    >>> made = ("2026-01-01T00:00:09+00:00", "2026-01-01T00:00:10+00:00", "2026-01-01T00:01:00+00:00")
    >>> _seconds_of_the_machine([{"setting": {"made": at, "seconds": 5.0}} for at in made])
    11.0
    """
    spans = []
    for line in lines:
        end = datetime.fromisoformat(line["setting"]["made"]).timestamp()
        spans.append((end - line["setting"]["seconds"], end))
    total, last = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, last), 0.0)
        last = max(last, end)
    return total
