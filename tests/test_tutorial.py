"""The tutorial: every command and program in it runs, in order, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dpoptim.app.cli import main
from dpoptim.app.recipes.recipe import Recipe

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = 0
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, str(TUTORIAL), "exec"), {})
        elif language == "toml":
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif language == "sh":
            for line in text.splitlines():
                name, *arguments = shlex.split(line)
                assert name == "dpoptim"
                assert main(arguments) == 0, capsys.readouterr().err
                commands += 1
    assert commands == 7
    printed = capsys.readouterr()
    assert "Differentially private: epsilon = 3.0000 at delta = 1e-05" in printed.out
    assert printed.out.count("outside the guarantee: True") == 11
    assert "nothing contradicts the claim" in printed.out
    assert "already finished: all" in printed.err
    assert "predicted: ['well', 'ill']" in printed.out
    for run in ("first", "second", "third"):
        assert (tmp_path / "runs" / run / "model" / "model.pt").is_file()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("Differentially private:") >= 3
    accuracies = [float(found) for found in re.findall(r"accuracy ([0-9.]+) %", printed.err)]
    assert max(accuracies) > 75, "the model of the tutorial learns"


@pytest.mark.parametrize("setting", ["delta", "batch_size", "steps", "noise", "sampling", "variant", "clip_norm"])
def test_the_table_of_defaults_names_settings(setting):
    assert f"| `{setting}` |" in TUTORIAL.read_text(encoding="utf-8")
    assert setting in Recipe.__dataclass_fields__


@pytest.mark.parametrize("path", sorted((TUTORIAL.parents[1] / "examples" / "recipes").glob("*.toml")), ids=str)
def test_example_recipes_are_recipes(path):
    from dpoptim.app import read_recipe

    assert read_recipe(path).model
