"""`dpoptim train` as people call it: output, JSON, dry run, resuming and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dpoptim.app import progress
from dpoptim.app.cli import main
from tests.app.runs import COLUMN_FLAGS, write_bert, write_rows

FEW = ["--steps", "4", "--batch-size", "16", "--noise", "independent", "--sampling", "shuffled"]


@pytest.fixture
def base(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.csv")
    return ["train", "--model", "mlp", "--data", "rows.csv", "--epsilon", "4", *COLUMN_FLAGS, *FEW]


def test_run_prints_guarantee_and_folder_and_resumes(base, capsys):
    assert main([*base, "--run-dir", "out"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "", "progress goes to standard error"
    assert "Differentially private: epsilon = 4.0000" in printed.err
    assert "outside the guarantee" in printed.err
    assert "model: out/model; statement and log: out" in printed.err
    assert "training loss" not in printed.err
    steps = [line for line in printed.err.splitlines() if line.startswith("step ")]
    assert steps[0].startswith("step 0/4: held-out loss")
    assert "epsilon" not in steps[0], "nothing is spent before the first step"
    assert "epsilon 4.0000 so far" in steps[-1]
    Path("out.secret/noise.key").unlink()
    assert main(["train", "--resume", "out"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("already finished: all 4 steps were taken\n")
    assert "model: out/model;" in printed.err


def test_model_with_an_infinite_loss_gets_advice(base, capsys):
    assert main([*base, "--run-dir", "run"]) == 0
    assert "useless" not in capsys.readouterr().err
    assert main([*base, "--run-dir", "wild", "--learning-rate", "1e30"]) == 0
    assert "after:  held-out loss not finite" in (shown := capsys.readouterr().err)
    assert "the model diverged and is useless; train a new run with a smaller --learning-rate" in shown


def test_json_is_the_summary_and_nothing_else(base, capsys):
    assert main([*base, "--json", "--debug"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["reason"] == "finished"
    assert found["epsilon"] <= 4.0
    directory = Path(found["run"])
    assert directory.parent == Path("runs"), "the default"
    assert json.loads((directory / "summary.json").read_text()) == found
    losses = [line for line in printed.err.splitlines() if "training loss" in line]
    assert losses
    assert all("(not private: for debugging)" in line for line in losses)


def test_flags_override_a_recipe(tmp_path, base, capsys):
    (tmp_path / "recipe.toml").write_text('model = "mlp"\ndata = "rows.csv"\nepsilon = 9\nsteps = 3\nbatch_size = 16\n')
    over = ["--epsilon", "2", "--noise", "independent", "--sampling", "shuffled", "--adjacency", "replace"]
    assert main(["train", "recipe.toml", *COLUMN_FLAGS, *over, "--betas", "0.8", "0.9", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recipe"]["steps"], round(found["epsilon"], 2)) == (3, 2.0)
    assert found["plan"]["adjacency"] == "replace"
    assert found["recipe"]["betas"] == [0.8, 0.9]


def test_dry_run_prints_the_answer_first_and_writes_nothing(tmp_path, base, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    before, base = set(tmp_path.rglob("*")), [*base, "--width", "256"]
    assert main([*base, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Differentially private: epsilon = 4.0000")
    assert len(text.splitlines()) <= 24, "one screenful"
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[1].startswith("outlook    hopeless: the noise")
    for words in (
        "multiplier",
        "memory     about",
        "parameters 9.22 kB",
        "s per step",
        "--verbose",
    ):
        assert words in text
    assert main([*base, "--dry-run", "--verbose", "--validation-fraction", "0"]) == 0
    printed = capsys.readouterr()
    for words in ("Assumptions:", "Noise:", "variant = "):
        assert words in printed.out
        assert words not in text
    assert "note: no records are held out" in printed.err
    assert main([*base, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] <= 4.0
    assert found["recipe"]["batch_size"] == 16
    assert found["noise_to_signal"] > 1
    estimate = found["estimate"]
    assert estimate["parameter_bytes"] == 4 * 2306
    assert estimate["optimizer_bytes"] == 3 * 4 * 2306, "two moments and a scale"
    assert 0 < estimate["step_seconds"] < 60
    assert estimate["run_seconds"] == pytest.approx(4 * estimate["step_seconds"])
    assert set(tmp_path.rglob("*")) == before


def test_dry_run_notes_a_large_epsilon_and_counts_one_record(base, capsys):
    assert main([*base, "--epsilon", "50", "--validation-fraction", "0.01", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "note: epsilon above 20 protects very little" in printed.err
    assert "1 more record is held out for scores" in " ".join(printed.out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", "0"], "Expected epsilon > 0, got 0.0"),
        (["--delta", "-1e-5"], "Expected delta > 0 and < 1, got -1e-05"),
        (["--epsilon", "nan"], "Expected epsilon > 0, got nan"),
        (["--noise-multiplier", "1"], "give one of them"),
        (["--data", "absent.csv"], "does not exist"),
        (["--label-column", "colour"], "colour"),
        (["--batch-size", "5000"], "batch_size <= num_examples"),
        (["--delta", "0.1"], "delta=0.1 is not below 1/114"),
        (["--noise", "pink"], "noise='pink'"),
        (["--device", "mps"], "device='mps'"),
        (["--sampling", "odd"], "sampling='odd'"),
        (["--run-dir", "rows.csv"], "rows.csv"),
        (["--resume", "somewhere"], "--resume uses the run's own recipe and takes no --model"),
        (["--quick"], "--quick"),
        (["--model", "./absent"], "does not exist: it is not a folder here\n"),
        (["--report-to", "none", "wandb"], "combines none with other names"),
        (["--adjacency", "add-remove", "--num-examples", "114"], "Set sampling to poisson"),
    ],
)
def test_mistakes_print_one_line_and_exit_with_status_2(tmp_path, base, refusal, arguments, words):
    before = set(tmp_path.rglob("*"))
    assert words in refusal(*base, *arguments)
    assert set(tmp_path.rglob("*")) == before


def test_mistyped_flags_suggest_the_right_one(base, capsys):
    for arguments, words in (
        (["--lr", "1"], "dpoptim train: there is no --lr; did you mean --learning-rate?\n"),
        (["--batch_size=3"], "dpoptim train: there is no --batch_size; did you mean --batch-size?\n"),
        (["--quick", "--varant", "dp_sgd"], "dpoptim train: there is no --varant; did you mean --variant?\n"),
        (["recipe.toml", "more.toml"], "dpoptim train: unexpected argument 'more.toml'; see dpoptim train --help"),
        (["--eps", "8"], "dpoptim train: there is no --eps; did you mean --epsilon?\n"),
        (["--learn", "8"], "dpoptim train: there is no --learn; did you mean --learning-rate?\n"),
        (["--zzzz"], "dpoptim train: there is no --zzzz; see dpoptim train --help\n"),
    ):
        assert main([*base, *arguments]) == 2
        assert capsys.readouterr().err.startswith(words)
    for arguments, words in (
        (["--epochs", "many"], "argument --epochs: invalid float value: 'many'; see dpoptim train --help"),
        (["--seed", "1.5"], "argument --seed: '1.5' is not a whole number"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*base, *arguments])
        assert capsys.readouterr().err.startswith(f"dpoptim train: {words}")


def test_missing_settings_are_named(base, refusal):
    for arguments, words in (
        (["--data", "rows.csv", "--epsilon", "1"], "model is missing; add --model"),
        (["--model", "mlp", "--data", "rows.csv"], "epsilon is missing"),
        ([".", "--epsilon", "1"], "Is a directory"),
        (["rows.csv", "--epsilon", "1"], "to train on a data file, use --data"),
        (["recipe.toml"], "does not exist"),
        (["--resume", "."], "not a run directory"),
        (["--resume", "absent"], "run directory absent does not exist"),
        (["--dry-run"], "--dry-run needs a recipe"),
    ):
        printed = refusal("train", *arguments)
        assert words in printed
        assert "None" not in printed


def test_log_is_never_silent_for_long(base, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", 0.0)
    assert main([*base, "--run-dir", "out", "--validation-fraction", "0", "--json"]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    steps = [line for line in printed.err.splitlines() if line.startswith("step ")]
    assert [line.partition(";")[0] for line in steps] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert "epsilon 4.0000 so far" in steps[-1]


def test_texts_are_described_or_refused(tmp_path, monkeypatch, capsys, refusal):
    """The column and the length of texts are printed before the first step; unusable texts are refused."""
    monkeypatch.chdir(tmp_path)
    write_bert(tmp_path / "bert")
    base = ["train", "--model", "bert", "--epsilon", "3"]
    Path("notes.jsonl").write_text('{"body": "private training adds noise"}\n' * 60)
    Path("empty.jsonl").write_text('{"text": " "}\n{"text": ""}\n' * 20)
    Path("few.jsonl").write_text('{"text": "noise"}\n' * 5)
    Path("labelled.jsonl").write_text('{"text": "noise", "kind": 1}\n{"text": "fox", "kind": 0}\n' * 20)
    for arguments, words in (
        (["--data", "empty.jsonl"], "empty.jsonl"),
        (["--data", "few.jsonl"], "has 5 training records"),
        (["--data", "labelled.jsonl", "--label-column", "kind"], "text-classification"),
        (["--data", "notes.jsonl", "--task", "causal-lm"], "both directions"),
    ):
        assert words in refusal(*base, *FEW, "--run-dir", "out", *arguments)
        assert not Path("out").exists()
    assert main([*base, "--data", "notes.jsonl", "--max-length", "32", *FEW, "--run-dir", "out"]) == 0
    lines = capsys.readouterr().err.splitlines()
    at = lines.index("texts from column 'body', cut at 32 tokens")
    assert at < next(place for place, line in enumerate(lines) if line.startswith("step 0/"))


@pytest.mark.slow
def test_retries_of_the_hub_are_silent():
    """In a separate process, because the hub's library reads its settings when it is imported."""
    finished = subprocess.run(
        [sys.executable, "-c", "from dpoptim.app.cli.options import silence_libraries; silence_libraries()\n"
         "from huggingface_hub.utils import _http; _http.logger.warning('Retrying in 1s [Retry 1/5].')"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert finished.stderr == ""
