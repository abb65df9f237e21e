"""The first program of the README and of guides runs as pasted, and all documented commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dpoptim.app.cli import command_line
from tests.distributed.launch import torchrun
from tests.pages import blocks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("README.md", r"^accuracy (0\.9|1)"),
        ("docs/users.md", r"^Protected: +one user \(all records with one id\)"),
        pytest.param("docs/tables.md", r"^(0\.9|1)", marks=pytest.mark.slow),
    ],
)
def test_the_first_program_runs_as_pasted(page, shown, tmp_path):
    program, *_ = blocks(ROOT / page, "python")
    finished = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "Differentially private: epsilon = 3.0000 at delta = 1e-05" in finished.stdout
    assert re.search(shown, finished.stdout, re.MULTILINE)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_first_program_runs_in_two_processes(tmp_path):
    """Unchanged: on a CPU there is no device to choose. Both processes end with the same model."""
    (tmp_path / "train.py").write_text(blocks(ROOT / "README.md", "python")[0], encoding="utf-8")
    finished = torchrun("train.py", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("Differentially private: epsilon = 3.0000 at delta = 1e-05") == 2
    first, second = re.findall(r"^accuracy (\S+)$", finished.stdout, re.MULTILINE)
    assert first == second
    assert float(first) > 0.9


def commands(page: Path) -> list[str]:
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("dpoptim ") and "..." not in line]


@pytest.mark.parametrize("line", [line for page in PAGES for line in commands(page)])
def test_documented_commands_exist(line):
    parser, _ = command_line()
    _, unknown = parser.parse_known_args(shlex.split(line, comments=True)[1:])
    assert not unknown
