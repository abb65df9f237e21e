"""The bar of a long run on a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from experiments.progress import BarReporter


@pytest.mark.parametrize(
    "cell", ["sparse, dense", "sparse, independent_moments_for_free, independent", "x" * 200], ids=len
)
def test_numbers_and_times_are_never_cut_and_nothing_wraps(cell):
    console = Console(width=80, force_terminal=True, color_system=None)
    reporter = BarReporter(console)
    reporter.begin("quadratic", total=411, done=96)
    reporter.doing(cell)
    with console.capture() as shown:
        console.print(reporter._progress.get_renderable())
    (line,) = shown.get().splitlines()
    found = re.fullmatch(r"quadratic [━╸╺ ]{12,}  96/411 0:00:0\d -:--:-- (.*)", line)
    assert found, line
    assert found[1][:20].rstrip() == cell[:20], "as much of the cell as there is room for"
    assert len(line) <= 80
