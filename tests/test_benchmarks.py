"""benchmarks/trainer.py and processes.py run on tiny sizes, time what they should, and write tables they can reread."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState

from dpoptim.app.demo import demonstration

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the script as a module that starts no new process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    module: Any = importlib.import_module("trainer")

    def in_this_process(case: Any, way: str, *, profile: bool) -> dict[str, Any]:
        return module.profiles(case, way) if profile else module.start(case, way)

    monkeypatch.setattr(module, "in_new_process", in_this_process)
    yield module
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def run(trainer: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["trainer.py", "--device", "cpu", *map(str, arguments)])
    status: int = trainer.main()
    return status


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(p.stem for p in BENCHMARKS.glob("*.py") if "__main__" in p.read_text()))
def test_scripts_start_outside_the_tests(script, tmp_path):
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.slow
def test_trainers_are_timed_and_profiled(trainer, monkeypatch, tmp_path):
    record, table, again = tmp_path / "trainer.json", tmp_path / "trainer.md", tmp_path / "again.md"
    options = ["--only", "bert tiny", "--repeats", 2, "--profile", "--json", record, "--write", table]
    assert run(trainer, monkeypatch, *options) == 0
    (case,) = json.loads(record.read_text())["cases"]
    assert list(case["ways"]) == ["stock", "private", "independent", "command"]
    for found in case["ways"].values():
        assert found["first_s"] > 0
        assert found["low_ms"] <= found["ms"] <= found["high_ms"]
    assert case["ratios"]["private/stock"] == case["ways"]["private"]["ms"] / case["ways"]["stock"]["ms"]
    for when in ("first step", "steady step"):
        host = case["host"][when]
        assert all(host["groups"][group] > 0 for group in ("dpoptim", "torch", "transformers", "other"))
        assert len(host["rows"]) == trainer.TOP
    assert run(trainer, monkeypatch, "--from", record, "--write", again) == 0
    assert again.read_text() == table.read_text()
    assert "| BERT tiny trainer, 4 × 2 texts × 16 tokens |" in table.read_text()


@pytest.mark.slow
def test_loops_are_timed(trainer, monkeypatch, tmp_path):
    record = tmp_path / "loops.json"
    assert run(trainer, monkeypatch, "--only", "llama", "--ways", "plain,scaled", "--repeats", 2, "--json", record) == 0
    found = {case["name"]: case["ratios"] for case in json.loads(record.read_text())["cases"]}
    kinds = ("", " checkpointed", " LoRA", " LoRA checkpointed")
    assert list(found) == [f"Llama tiny{kind} 4x16" for kind in kinds]
    assert all("scaled/plain" in ratios for ratios in found.values())


def test_cases_are_added_to_results_of_the_same_setting(trainer, monkeypatch, tmp_path, capsys):
    record = tmp_path / "record.json"
    monkeypatch.setattr(trainer, "measured", lambda case, ways, repeats, profile: fake_case(case.name, ways))
    for only in ("llama tiny lora", "gpt-2 tiny trainer", "gpt-2 tiny trainer"):
        run(trainer, monkeypatch, "--only", only, "--append", "--json", record)
    names = [case["name"] for case in json.loads(record.read_text())["cases"]]
    assert names == ["GPT-2 tiny trainer 4x2x16", "Llama tiny LoRA 4x16", "Llama tiny LoRA checkpointed 4x16"]
    with pytest.raises(SystemExit):
        run(trainer, monkeypatch, "--only", "bert", "--append", "--json", record, "--commit", "abc")
    assert "not abc. Write to a new file." in capsys.readouterr().err


def fake_case(name: str, ways: list[str]) -> dict[str, Any]:
    return {"name": name, "kind": "loop", "ways": {way: {"ms": 1.0} for way in ways}, "ratios": {}}


def test_steps_of_the_warm_up_are_not_timed(trainer, monkeypatch):
    case = trainer.TrainerCase(
        model_name="none", device="cpu", model=None, sizes=(1, 1, 1), vocabulary=2, warm=3, block=2
    )
    now = 0.0

    def train(case: Any, way: str, steps: int, after_step: Callable[[int], None]) -> None:
        nonlocal now
        for step in range(1, steps + 1):
            now += 100.0 if step <= 3 else {"stock": 1.0, "private": 2.0}[way]
            after_step(step)

    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    found = trainer.steady(case, ["stock", "private"], 4, lambda line: None)
    assert found["stock"] == {"ms": 1e3, "low_ms": 1e3, "high_ms": 1e3}
    assert found["private"]["ms"] == 2e3


def test_a_method_that_fails_keeps_the_others(trainer, monkeypatch):
    def train(case: Any, way: str, steps: int, after_step: Callable[[int], None]) -> None:
        if way == "private":
            raise RuntimeError("no memory left")
        for step in range(1, steps + 1):
            after_step(step)

    monkeypatch.setattr(trainer, "train", train)
    found = trainer.steady(trainer.cases("cpu")[0][0], ["private", "stock"], 2, lambda line: None)
    assert found["private"] == {"error": "RuntimeError: no memory left"}
    assert "ms" in found["stock"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "gpt-5"], "no case matches --only gpt-5; choose from GPT-2 tiny trainer 4x2x16; "),
        (["--ways", "stock,fast"], "unknown method 'fast' in --ways; choose from stock, "),
        (["--only", "llama", "--ways", "stock"], "no case that matches --only llama has the methods stock"),
        (["--from", __file__], "is not JSON"),
    ],
)
def test_wrong_options_are_one_line_errors(trainer, monkeypatch, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        run(trainer, monkeypatch, *options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_new_process_measures_the_first_step(trainer, monkeypatch):
    monkeypatch.undo()  # the real `in_new_process`
    found = trainer.in_new_process(trainer.cases("cpu")[0][0], "private", profile=False)
    assert found["first_s"] > 0
    assert found["constructed_s"] > 0


@pytest.mark.slow
def test_processes_are_timed_and_their_bytes_counted(tmp_path):
    record, table, again = tmp_path / "processes.json", tmp_path / "processes.md", tmp_path / "again.md"
    script = [sys.executable, str(BENCHMARKS / "processes.py")]
    sizes = ["--most", "2", "--rounds", "1", "--repeats", "2", "--examples", "4", "--tokens", "16"]
    subprocess.run([*script, *sizes, "--json", str(record), "--write", str(table)], check=True)
    alone, pair = json.loads(record.read_text())["groups"]
    assert not any(alone["sent"].values())
    gradients = 4 * json.loads(record.read_text())["parameters"]  # a ring of two sends each vector once
    checks = {"all_gather": 4 * 8, "broadcast": 1}
    assert pair["sent"]["scale_then_privatize"] == {**checks, "all_reduce": gradients}
    assert pair["sent"]["joint_moments"] == {**checks, "all_reduce": 2 * gradients}
    text = table.read_text()
    assert re.search(r"^\| 1 \| \d+ \(.+\) \| \d+–\d+ \| 1\.00 \| 1\.00 \|$", text, re.M)
    assert re.search(r"^\| 2 \| \d+ \(.+\) \| \d+–\d+ \| \d\.\d\d \| \d\.\d\d \|$", text, re.M)
    for noise in ("`Independent()`", "`BufferedToeplitz(buffers=3)`"):
        assert f"| 1 | {noise} | " in text
        assert re.search(rf"^\| 2 \| {re.escape(noise)} \|.+\| (all|slices|unclear) \|$", text, re.M)
    subprocess.run([*script, "--from", str(record), "--write", str(again)], check=True)
    assert again.read_text() == text


@pytest.mark.slow
def test_tables_are_trained_with_the_defaults(monkeypatch, tmp_path):
    """Without diffprivlib and the flights, which `make` does not install."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tables: Any = importlib.import_module("tables")
    monkeypatch.setattr(tables, "PACKAGES", {})
    monkeypatch.setattr(tables, "with_diffprivlib", lambda table, epsilon, seed: {"loss": 1.0, "score": 0.5})
    record, table = tmp_path / "tables.json", tmp_path / "tables.md"
    options = ["--tasks", "breast cancer", "--seeds", "1", "--epsilons", "8", "--json", record, "--write", table]
    monkeypatch.setattr(sys, "argv", ["tables.py", *map(str, options)])
    tables.main()
    found = json.loads(record.read_text())["tasks"]["breast cancer"]
    assert (found["rows"], found["held_out"], found["columns"]) == (427, 142, 30)
    for model in ("mlp", "linear"):
        (run,) = found["private"][model]["8"]
        assert run["score"] > 0.85
        assert run["loss"] < 1.5 * run["best"], "a run does not train too long"
    assert found["without privacy"]["linear"]["score"] > 0.95
    assert "| breast cancer | dpoptim, linear |" in table.read_text()
    again = tmp_path / "again.md"
    monkeypatch.setattr(sys, "argv", ["tables.py", "--from", str(record), "--write", str(again)])
    tables.main()
    assert again.read_text() == table.read_text()


@pytest.mark.slow
def test_synthetic_abstracts_are_written_and_compared(tmp_path):
    record, page, again = tmp_path / "record.json", tmp_path / "page.md", tmp_path / "again.md"
    command = [sys.executable, str(BENCHMARKS / "synthetic_abstracts.py")]
    sizes = [
        "--tiny",
        "--pretraining-steps",
        "4",
        "--each",
        "40",
        "--epsilons",
        "8",
        "--lora-rank",
        "2",
        "--epochs",
        "1",
    ]
    places = ["--tokenizer", str(demonstration.MODEL), "--work", str(tmp_path / "work"), "--device", "cpu"]
    subprocess.run([*command, *sizes, *places, "--json", str(record), "--write", str(page)], check=True, timeout=300)
    (run,) = json.loads(record.read_text())["runs"]
    assert run["scores"]["accuracy"]["training"] > run["scores"]["accuracy"]["most common label"]
    rows = (tmp_path / "work" / "synthetic_8.jsonl").read_text().splitlines()
    assert len(rows) == run["texts"] == 40 * len({json.loads(row)["label"] for row in rows})
    subprocess.run([*command, "--from", str(record), "--write", str(again)], check=True, timeout=60)
    assert again.read_text() == page.read_text()
