"""The notebooks of the documentation run, and their stored outputs are those of their code."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbformat import NotebookNode

from tests.notebooks import NOTEBOOKS, execute, stored

FAST = "table"
COMMAND = "run `make notebooks`"


def shown(notebook: NotebookNode) -> list[list[tuple[str, list[str]]]]:
    """What each cell shows: kinds of outputs, and their words. Words with digits may differ, as noise does.

    In a cell with the tag "random", all words may differ.
    """
    found = []
    for cell in notebook.cells:
        outputs = []
        for output in cell.get("outputs", []):
            data = output.get("data", {output.get("name"): output.get("text", "")})
            text = "" if "random" in cell.metadata.get("tags", []) else str(data.get("stdout", data.get("text/plain")))
            outputs.append((" ".join(sorted(data)), re.sub(r"\S*\d\S*", "#", text).split()))
        found.append(outputs)
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_of_the_code_and_have_no_trace_of_the_machine(path):
    text = path.read_text(encoding="utf-8")
    assert text == stored(nbformat.read(path, as_version=4)), COMMAND
    assert not re.findall(r"/(?:home|root|tmp|Users|var|usr)/\S*", text)
    assert len(text) < 100_000, "keep the repository small"


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=() if p.stem == FAST else pytest.mark.slow, id=p.stem) for p in NOTEBOOKS]
)
def test_the_notebook_runs_and_shows_what_is_stored(path):
    fresh = nbformat.reads(stored(execute(path)), as_version=4)
    assert shown(fresh) == shown(nbformat.read(path, as_version=4)), COMMAND
    *_, last = fresh.cells
    assert last.outputs[0].text.startswith("Differentially private: epsilon = ")
