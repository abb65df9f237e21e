"""Tables and pictures of a file of results: made from the file alone, beside it or into a page of the documentation."""

from __future__ import annotations

from pathlib import Path

from dpoptim.app import plot_style as style
from dpoptim.app.files import write_text
from experiments import result_files
from experiments.experiment import SCALES, Experiment, MissingInput
from experiments.result_files import Line


def lines_of(experiment: Experiment, out: Path, scale: str | None = None) -> list[Line]:
    """The lines of one scale, by default the largest in the file; of cells that are there twice, the last line.

    Edge cases: MissingInput where there is none; ValueError where a line is of no known scale.
    """
    path = out / f"{experiment.file}.jsonl"
    lines = result_files.read(path).lines
    scales = {line["scale"] for line in lines}
    if unknown := scales - set(SCALES):
        raise ValueError(f"{path}: a line is of scale {unknown.pop()!r}; it must be one of {', '.join(SCALES)}")
    scale = scale or max(scales, key=SCALES.index, default="")
    found = {result_files.cell_key(line["cell"]): line for line in lines if line["scale"] == scale}
    if not found:
        others = f" of scale {scale}, only of {', '.join(sorted(scales))}" if scales else ""
        raise MissingInput(f"{path} holds no result{others}; run `python -m experiments {experiment.name} --out {out}`")
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
    begin, end = marks(text, experiment)
    if experiment.table is not None and begin == _begin(f"{experiment.name} table"):
        write_text(document, _replaced(text, begin, end, experiment.table(lines)))
        return [document]
    write_text(document, _replaced(text, begin, end, section(experiment, lines)))
    folder = document.parent / "images"
    return [document, *(_draw(experiment, lines, folder, f"results-{experiment.name}") if pictures else [])]


def section(experiment: Experiment, lines: list[Line]) -> str:
    """The markdown as it stands in the documentation, where names of pictures begin with results-."""
    name = experiment.name
    return experiment.markdown(lines).replace(f"(images/{name}-", f"(images/results-{name}-")


def marks(text: str, experiment: Experiment) -> tuple[str, str]:
    """The marks that a page has for the experiment's table, or else for its section; ValueError where it has not."""
    the_table = experiment.table is not None and _begin(f"{experiment.name} table") in text
    name = f"{experiment.name} table" if the_table else experiment.name
    begin, end = _begin(name), f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page must hold the marks {begin} and {end} once each, in this order; add them")
    return begin, end


def _begin(name: str) -> str:
    return f"<!-- begin {name} -->"


def _replaced(text: str, begin: str, end: str, section: str) -> str:
    """The text with what is between the marks replaced.

    >>> _replaced("a\\n<x>\\nold\\n</x>\\nb", "<x>", "</x>", "new")
    'a\\n<x>\\nnew\\n</x>\\nb'
    """
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{section}\n{end}{rest.partition(end)[2]}"


def _draw(experiment: Experiment, lines: list[Line], folder: Path, begin: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in experiment.pictures(lines).items():
        file = folder / f"{begin}-{name}.png"
        style.save(draw(), file)
        files.append(file)
    return files
