"""Tables and pictures of a file of results: made from the file alone, beside it or into a page of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

from dpoptim.reproduce import result_files
from dpoptim.reproduce.experiment import SCALES, Experiment
from dpoptim.reproduce.result_files import Line
from dpoptim.theory import picture_style as style
from dpoptim.training.support.files import write_text


def lines_of(experiment: Experiment, out: Path, scale: str | None = None) -> list[Line]:
    """The lines of one scale, by default the largest in the file; of cells that are there twice, the last line.

    Edge cases: ValueError where there is none.
    """
    path = out / f"{experiment.file}.jsonl"
    lines = result_files.read(path).lines
    scale = scale or max((line["scale"] for line in lines), key=SCALES.index, default="")
    found = {result_files.cell_key(line["cell"]): line for line in lines if line["scale"] == scale}
    if not found:
        raise ValueError(f"{path} holds no result; run `dpoptim reproduce {experiment.name} --out {out}`")
    return list(found.values())


def render(experiment: Experiment, out: Path, *, scale: str | None = None, pictures: bool = True) -> list[Path]:
    """Write OUT/NAME.md and OUT/images/NAME-PICTURE.png; the files written, in that order."""
    lines = lines_of(experiment, out, scale)
    page = out / f"{experiment.name}.md"
    write_text(page, experiment.markdown(lines) + "\n")
    return [page, *(_draw(experiment, lines, out / "images", experiment.name) if pictures else [])]


def render_into(
    document: Path, experiment: Experiment, out: Path, *, scale: str | None = None, pictures: bool = True
) -> list[Path]:
    """Put the section between its marks in a page, and its pictures as images/results-NAME-PICTURE.png beside it.

    A page that has only the marks of NAME's table gets that table and no pictures.
    """
    lines = lines_of(experiment, out, scale)
    text = document.read_text(encoding="utf-8")
    the_table = f"{experiment.name} table"
    if experiment.table is not None and f"<!-- begin {the_table} -->" in text:
        write_text(document, replaced(text, the_table, experiment.table(lines)))
        return [document]
    write_text(document, replaced(text, experiment.name, section(experiment, lines)))
    folder = document.parent / "images"
    return [document, *(_draw(experiment, lines, folder, f"results-{experiment.name}") if pictures else [])]


def section(experiment: Experiment, lines: list[Line]) -> str:
    """The markdown as it stands in the documentation, where names of pictures begin with results-."""
    name = experiment.name
    return experiment.markdown(lines).replace(f"(images/{name}-", f"(images/results-{name}-")


def replaced(text: str, name: str, section: str) -> str:
    """The text with what is between the marks of that name replaced.

    >>> replaced("a\\n<!-- begin x -->\\nold\\n<!-- end x -->\\nb", "x", "new")
    'a\\n<!-- begin x -->\\nnew\\n<!-- end x -->\\nb'
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page must hold the marks {begin} and {end} once each, in this order; add them")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{section}\n{end}", text)


def _draw(experiment: Experiment, lines: list[Line], folder: Path, begin: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in experiment.pictures(lines).items():
        file = folder / f"{begin}-{name}.png"
        style.save(draw(), file)
        files.append(file)
    return files
