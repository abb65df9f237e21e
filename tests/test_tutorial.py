"""The tutorial: every command and program on the page runs, in order, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpoptim.app import Recipe, read_recipe
from tests.pages import run_page

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_page(TUTORIAL) == 8
    printed = capsys.readouterr()
    assert "Differentially private: epsilon = 3.0000 at delta = 1e-05" in printed.out
    assert printed.out.count("outside the guarantee: True") == 11
    assert "nothing contradicts the claim" in printed.out
    assert "already finished: all" in printed.err
    assert re.findall(r'"prediction": "(\w+)"', printed.out) == ["well", "ill"]
    for run in ("first", "second", "third"):
        assert (tmp_path / "runs" / run / "model" / "model.pt").is_file()
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("Differentially private:") >= 3
    accuracies = [float(found) for found in re.findall(r"accuracy ([0-9.]+) %", printed.err)]
    assert max(accuracies) > 75, "the model learns"


def test_the_table_of_defaults_lists_real_settings():
    table = TUTORIAL.read_text(encoding="utf-8").split("| setting | default |")[1].split("\n\n")[0]
    settings = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(settings) == 10
    assert set(settings) <= Recipe.__dataclass_fields__.keys()


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "recipes").glob("*.toml")), ids=lambda path: path.name)
def test_example_recipes_can_be_read(path):
    assert read_recipe(path).model
