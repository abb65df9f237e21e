"""The built-in demonstration: its shipped model, its texts, its table and its report."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from dpoptim.app import load_tokenizer
from dpoptim.app.demo import demonstration
from dpoptim.app.demo.text import docstrings

PRIVATE = ["post_processing", "bias_correction", "independent_moments", "scale_then_privatize"]


def test_docstrings_of_a_file(tmp_path):
    source = tmp_path / "module.py"
    source.write_text('"""Of the module."""\nx = "no documentation"\n\ndef f():\n    """Of a function."""\n')
    assert list(docstrings(source)) == ["Of the module.", "Of a function."]
    source.write_text("this is not Python")
    assert list(docstrings(source)) == []
    assert list(docstrings(tmp_path / "absent.py")) == []


def test_shipped_model_is_small_and_its_tokenizer_has_common_words():
    assert sum(file.stat().st_size for file in demonstration.MODEL.iterdir()) < 400_000
    tokenizer = load_tokenizer(demonstration.MODEL)
    pieces = tokenizer.tokenize("Return the value of a polynomial")
    assert len(pieces) < 12
    assert "[UNK]" not in pieces


def test_held_out_texts_are_not_private_texts():
    private, test = demonstration.read_texts(demonstration.QUICK)
    assert len(private) == 250
    assert len(test) == 50
    assert not set(private) & set(test)


def test_table_fits_in_80_columns_and_comes_last(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [("none", "the public model"), *demonstration.METHODS.items()]
    scores = {"private": True, "epsilon": 8.0, "loss": 12.345}
    answer = {
        "results": [{"name": name, "idea": idea, **scores} for name, idea in names], "report": "runs/demo/report.html",
        "test_records": 943, "epsilon": 8.0, "delta": 1e-5, "adjacency": "zero_out", "sampling": "Poisson",
        "batch_size": 384, "num_examples": 4721, "steps": 20, "seconds": 60.0,
    }  # fmt: skip
    demonstration.show(answer)
    *table, guarantee, report = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 80
    for name, _ in names:
        assert sum(line.startswith(f"│ {name} ") and "12.345" in line for line in table) == 1
    assert guarantee.startswith("Each private run: ε = 8 at δ = 1e-05, zero-out adjacency, Poisson sampling")
    assert "runs/demo/report.html" in report


@pytest.mark.slow
def test_quick_demonstration(tmp_path, capsys):
    folder, file = tmp_path / "demo", io.StringIO()
    assert demonstration.main(json_wanted=True, quick=True, console=Console(file=file), keep=str(folder)) == 0
    assert len(file.getvalue().splitlines()) == 6
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["results"]] == ["none", *PRIVATE, "not_private"]
    for row in found["results"]:
        assert 1 < row["loss"] < 12
        if row["name"] in PRIVATE:
            assert 7.9 < row["epsilon"] <= 8.0
            assert (folder / row["name"] / "statement.txt").is_file()
    assert found["results"][-1]["epsilon"] is None
    assert "<html" in (folder / "report.html").read_text()


def test_bad_epsilon_is_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match="Expected epsilon > 0, got 0"):
        demonstration.main(json_wanted=False, quick=True, console=Console(), keep=str(tmp_path / "demo"), epsilon=0)
    assert not (tmp_path / "demo").exists()
