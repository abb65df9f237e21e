"""The page about private text generation: its programs and commands run in order, with a tiny model named gpt2."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.app import tiny
from tests.pages import run_page

PAGE = Path(__file__).parents[1] / "docs" / "generation.md"


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.saved(tmp_path / "gpt2", tiny.gpt2(tiny.bytepair()), tiny.bytepair())
    assert run_page(PAGE) == 3
    printed = capsys.readouterr()
    assert "accuracy of a bag-of-words classifier on 100 real test texts, after" in printed.out
    assert "wrote synthetic.jsonl: 100 rows, 100 of them new" in printed.err
    rows = [json.loads(line) for line in (tmp_path / "synthetic.jsonl").read_text(encoding="utf-8").splitlines()]
    assert Counter(row["label"] for row in rows) == {"good": 50, "bad": 50}
    assert "epsilon = 8.0000" in (tmp_path / "synthetic.statement.txt").read_text(encoding="utf-8")
