"""The report of runs: one self-contained HTML file, made from their run directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpoptim.app.files import write_text
from dpoptim.app.report.page import page
from dpoptim.app.runs.run_log import RunHistory


def write_report(runs: Sequence[RunHistory], output: str | Path) -> Path:
    """Write the report of runs that `read_runs` read to `output`, whole or not at all.

    Guarantee: what the page shows of private data is a release, or is marked as not private or as outside the
    guarantee; the noise key is not read. The file loads nothing from anywhere.
    Edge cases: no run at all, or an output that does not end in .html, is a ValueError; a place that cannot be written
    to is an OSError, and leaves an older report as it was.
    """
    if not runs:
        raise ValueError("runs is empty; give one run or more")
    output = Path(output)
    check_output(output)
    text = page(runs)
    try:
        write_text(output, text)
    except OSError as error:
        raise OSError(f"--output {output} cannot be written: {error.strerror or error}") from error
    return output


def check_output(output: Path) -> None:
    """Refuse what is no name for a report, so that no key, log or recipe is overwritten by one."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--output {output} must end in .html")
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; give the name of a file")
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}; make it first")
