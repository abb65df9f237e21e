"""examples/which_library.py runs end to end, prints its guarantee, and reports bad input in one line."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "which_library.py"
PRIVATE = ["dp_sgd", "post_processing", "bias_correction", "scale_then_privatize"]


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a new process, on one core."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )


@pytest.fixture(scope="module")
def script() -> Any:
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("which_library", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_quick_run_prints_one_json_object():
    finished = run_script("--quick", "--json", "--steps", "4", "--epsilon", "2.5", "--delta", "1e-5")
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["delta"] == 1e-5
    assert answer["steps"] == 4
    assert answer["noise_multiplier"] > 0
    assert 2.4 < answer["epsilon"] <= 2.5
    assert answer["num_examples"] + answer["held_out"] == sum(answer["libraries"].values())
    assert {"python", "torch", "scipy", "numpy"} <= set(answer["libraries"])
    first_line = answer["statement"].splitlines()[0]
    assert first_line == "Differentially private: epsilon = 2.5000 at delta = 1e-05"

    results = answer["results"]
    assert [row["name"] for row in results] == ["no training", *PRIVATE, "Adam, not private"]
    assert [row["name"] for row in results if row["private"]] == PRIVATE
    for row in results:
        assert 0.0 <= row["accuracy"] <= 1.0
        # An accuracy times the number of held-out records is a whole number.
        count = row["accuracy"] * answer["held_out"]
        assert math.isclose(count, round(count), abs_tol=1e-3)
        assert row["seconds"] > 0 or row["name"] == "no training"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--epsilon", "-1"], "epsilon"),
        (["--epsilon", "nan"], "epsilon"),
        (["--epsilon", "inf"], "epsilon"),
        (["--delta", "2"], "delta"),
        (["--steps", "0"], "steps"),
        (["--steps", "many"], "steps"),
        (["--seed", "-3"], "seed"),
        (["--colour", "red"], "colour"),
    ],
)
def test_bad_input_is_reported_in_one_line(script, monkeypatch, capsys, arguments, named):
    monkeypatch.setattr(sys, "argv", ["which_library.py", "--quick", *arguments])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert named in printed.err


@pytest.mark.slow
def test_bad_input_ends_the_process_with_exit_code_2():
    finished = run_script("--epsilon", "0")
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert "Traceback" not in finished.stderr


def test_word_ids_leave_out_library_names(script):
    assert script.word_ids("Return a NumPy array") == script.word_ids("return a array")
    assert script.word_ids("torch.numpy np sympy") == []
    ids = script.word_ids("word " * 1000)
    assert len(ids) == script.WORDS
    assert 0 < ids[0] < script.BUCKETS
    assert script.word_ids("gradient") == [5977], "the hash must be the same on every machine"


def test_padding_does_not_change_the_output(script):
    torch = script.torch
    model = script.WordAverage(3)
    words = torch.tensor([[5, 6, 7, 0, 0]])
    before = model(words)
    with torch.no_grad():
        model.embedding.weight[0] += 100.0  # the padding row gets noise like every other parameter
    assert torch.equal(model(words), before)
    assert torch.allclose(model(words[:, :3]), before, atol=1e-6)
