"""The page about private text generation: its programs and commands run in order, with a tiny model named gpt2."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from dpoptim.app.cli import main
from tests.app import tiny

PAGE = Path(__file__).parents[1] / "docs" / "generation.md"


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.saved(tmp_path / "gpt2", tiny.gpt2(tiny.bytepair()), tiny.bytepair())
    commands = 0
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), {})
        elif language == "sh":
            for line in text.splitlines():
                assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
                commands += 1
    assert commands == 3
    printed = capsys.readouterr()
    assert "accuracy of a bag-of-words classifier on 100 real test texts, after" in printed.out
    assert "wrote synthetic.jsonl: 100 rows, 100 of them new" in printed.err
    rows = [json.loads(line) for line in (tmp_path / "synthetic.jsonl").read_text(encoding="utf-8").splitlines()]
    assert Counter(row["label"] for row in rows) == {"good": 50, "bad": 50}
    assert "epsilon = 8.0000" in (tmp_path / "synthetic.statement.txt").read_text(encoding="utf-8")
