"""`dpoptim train` from the outside: output, JSON, dry run, mistakes and help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dpoptim.app import progress
from dpoptim.app.cli import main
from dpoptim.integrations.named_settings import noise_words
from tests.app.cli.arguments import changed
from tests.app.runs import write_bert, write_rows

FEW = ["--steps", "4", "--batch-size", "16", "--noise", "independent", "--sampling", "shuffled"]


@pytest.fixture
def base(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.csv")
    return ["train", "--model", "mlp", "--data", "rows.csv", "--epsilon", "4", *FEW]


def test_a_run_says_what_it_guarantees_and_where_it_is(base, capsys):
    assert main([*base, "--run-dir", "out"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "", "logs go to standard error"
    assert "Differentially private: epsilon = 4.0000" in printed.err
    assert "outside the guarantee" in printed.err
    assert "model: out/model; statement and log: out" in printed.err
    assert "training loss" not in printed.err


def test_json_is_the_summary_alone(base, capsys):
    assert main([*base, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reason"] == "finished"
    assert found["epsilon"] <= 4.0
    directory = Path(found["run"])
    assert directory.parent == Path("runs"), "a name of its own, where none is given"
    assert json.loads((directory / "summary.json").read_text()) == found


def test_the_training_loss_is_shown_only_in_debugging(base, capsys):
    assert main([*base, "--run-dir", "out", "--debug"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "training loss" in line]
    assert lines
    assert all("(not private: for debugging)" in line for line in lines)


def test_a_recipe_with_flags_over_it(tmp_path, base, capsys):
    (tmp_path / "recipe.toml").write_text('model = "mlp"\ndata = "rows.csv"\nepsilon = 9\nsteps = 3\nbatch_size = 16\n')
    over = ["--epsilon", "2", "--noise", "independent", "--sampling", "shuffled", "--json"]
    assert main(["train", "recipe.toml", *over]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], round(found["epsilon"], 2)) == (3, 2.0)


def test_a_dry_run_tells_everything_and_writes_nothing(tmp_path, base, capsys):
    before = set(tmp_path.rglob("*"))
    assert main([*base, "--dry-run"]) == 0
    text = capsys.readouterr().out
    words = (
        "epsilon = 4.0000",
        "Assumptions:",
        "Noise:",
        "RMSE",
        "memory   parameters 35.6 kB",
        "s a step",
        "variant = ",
    )
    for told in words:
        assert told in text
    assert main([*base, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] <= 4.0
    assert found["recipe"]["batch_size"] == 16
    estimate = found["estimate"]
    assert estimate["parameter_bytes"] == 4 * 8898
    assert estimate["optimizer_bytes"] == 3 * 4 * 8898, "two moments and a scale"
    assert 0 < estimate["step_seconds"] < 60
    assert estimate["run_seconds"] == pytest.approx(4 * estimate["step_seconds"])
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--epsilon", "0"], "epsilon=0.0 must be a finite number above 0"),
        (["--delta", "-1e-5"], "delta=-1e-05 must be a finite number above 0 and below 1"),
        (["--epsilon", "nan"], "epsilon=nan"),
        (["--noise-multiplier", "1"], "give one of the two"),
        (["--data", "absent.csv"], "does not exist"),
        (["--label-column", "colour"], "colour"),
        (["--batch-size", "5000"], "batch_size=5000 is larger"),
        (["--delta", "2"], "delta=2.0"),
        (["--delta", "0.1"], "delta=0.1 is not below 1/114"),
        (["--noise", "pink"], "noise='pink'"),
        (["--device", "mps"], "device='mps' is not supported"),
        (["--device", "nonsense"], "device='nonsense' is no device"),
        (["--sampling", "odd"], "sampling='odd'"),
        (["--run-dir", "rows.csv"], "is there already"),
        (["--run-dir", "rows.csv/run"], "not a folder"),
        (["--run-dir", "/proc/run"], "not a folder one may write to"),
        (["--resume", "somewhere"], "--resume goes on with the run's own recipe"),
        (["--quick"], "--quick"),
        (["--model", "./absent"], "does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(tmp_path, base, capsys, arguments, told):
    before = set(tmp_path.rglob("*"))
    assert main(changed(base, arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert told in printed.err
    assert set(tmp_path.rglob("*")) == before


def test_a_gpu_that_is_not_there_is_one_line(base, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(changed(base, ["--device", "cuda:7"])) == 2
    assert capsys.readouterr().err == ("dpoptim: device='cuda:7': there is no such GPU here; there is cuda:0 alone\n")


def test_mistyped_flags_say_what_was_meant(base, capsys):
    for arguments, told in (
        (["--lr", "1"], "dpoptim train: there is no --lr; did you mean --learning-rate?\n"),
        (["--batch_size=3"], "dpoptim train: there is no --batch_size; did you mean --batch-size?\n"),
        (["--quick", "--varant", "dp_sgd"], "dpoptim train: there is no --varant; did you mean --variant?\n"),
        (["recipe.toml", "more.toml"], "dpoptim train: 'more.toml' is one argument too many; dpoptim train --help"),
        (["--eps", "8"], "dpoptim train: there is no --eps; did you mean --epsilon or --adam-eps?\n"),
        (["--learn", "8"], "dpoptim train: there is no --learn; did you mean --learning-rate?\n"),
        (["--zzzz"], "dpoptim train: there is no --zzzz; dpoptim train --help lists what there is\n"),
    ):
        assert main([*base, *arguments]) == 2
        assert capsys.readouterr().err.startswith(told)
    for again in (["--data", "other.csv"], ["--data=other.csv"]):
        with pytest.raises(SystemExit) as left:
            main([*base, *again])
        assert left.value.code == 2
        assert capsys.readouterr().err.startswith("dpoptim train: --data is given twice; give it once")
    with pytest.raises(SystemExit) as left:
        main([*base, "--epochs", "many"])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error == "dpoptim train: argument --epochs: invalid float value: 'many'; see dpoptim train --help\n"


def test_without_a_command_the_commands_are_shown(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(name in shown for name in ("plan", "advise", "train", "compare", "report"))


def test_what_was_left_out_is_asked_for_in_words(base, capsys):
    for arguments, told in (
        (["--data", "rows.csv", "--epsilon", "1"], "dpoptim: model is not given; add --model NAME_OR_PATH"),
        (["--model", "mlp", "--data", "rows.csv"], "dpoptim: epsilon is not given: say how private"),
        ([".", "--epsilon", "1"], "dpoptim: RECIPE '.' is a folder, and must be a TOML file; for records: --data ."),
        (["rows.csv", "--epsilon", "1"], "dpoptim: recipe 'rows.csv' is no TOML file"),
    ):
        assert main(["train", *arguments]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(told)
        assert "None" not in printed


def test_a_finished_run_needs_no_key_to_say_so(base, capsys):
    assert main([*base, "--run-dir", "out"]) == 0
    capsys.readouterr()
    Path("out/noise.key").unlink()
    assert main(["train", "--resume", "out"]) == 0
    printed = capsys.readouterr().err
    assert printed.startswith("already finished: all 4 steps were taken\n")
    assert "model: out/model;" in printed


def test_nothing_is_said_to_be_spent_before_the_first_step(base, capsys):
    assert main([*base, "--run-dir", "out"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert lines[0].startswith("step 0/4: held-out loss")
    assert "epsilon" not in lines[0]
    assert all("; epsilon " in line for line in lines[1:])
    assert "; epsilon 4.0000 so far" in lines[-1]


def test_a_log_is_never_silent_for_long(tmp_path, base, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", 0.0)
    assert main([*base, "--run-dir", "out", "--validation-fraction", "0", "--json"]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    steps = [line for line in printed.err.splitlines() if line.startswith("step ")]
    assert [line.partition(";")[0] for line in steps] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    assert steps[-1].startswith("step 4/4; epsilon 4.0000 so far")


def test_a_person_is_told_where_nothing_is_held_out(tmp_path, base, capsys):
    assert main([*base, "--run-dir", "out", "--validation-fraction", "0"]) == 0
    assert "note: nothing is held out, so no scores will be shown: validation_fraction is 0" in capsys.readouterr().err
    assert main([*base, "--validation-fraction", "0", "--dry-run"]) == 0
    assert "note: nothing is held out" in capsys.readouterr().err


def test_texts_without_a_word_and_columns_for_another_task_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_bert(tmp_path / "bert")
    Path("empty.jsonl").write_text('{"text": " "}\n{"text": ""}\n' * 20)
    some = [{"text": "noise"}, {"text": None}, {"other": 1}, {"text": " "}]
    Path("some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some * 20))
    Path("few.jsonl").write_text('{"text": "noise"}\n' * 5)
    Path("labelled.jsonl").write_text('{"text": "noise", "kind": 1}\n{"text": "fox", "kind": 0}\n' * 20)
    for arguments, told in (
        (["--data", "empty.jsonl"], "/empty.jsonl', line 1); remove them"),
        (["--data", "some.jsonl"], "/some.jsonl', line 2); remove them"),
        (["--data", "few.jsonl"], "leaves 5 training records; at least 8 are needed"),
        (["--data", "labelled.jsonl", "--label-column", "kind"], "--task text-classification"),
    ):
        capsys.readouterr()
        assert main(["train", "--model", "bert", "--epsilon", "3", "--run-dir", "out", *arguments]) == 2
        printed = capsys.readouterr().err
        assert told in printed
        assert printed.count("\n") == 1
        assert not Path("out").exists()


def test_what_is_read_and_where_it_is_cut_is_said_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_bert(tmp_path / "bert")
    Path("notes.jsonl").write_text('{"body": "private training adds noise"}\n' * 60)
    arguments = ["train", "--model", "bert", "--data", "notes.jsonl", "--epsilon", "3", "--max-length", "32"]
    assert main([*arguments, *FEW, "--run-dir", "out"]) == 0
    lines = capsys.readouterr().err.splitlines()
    said = lines.index("texts from column 'body', cut at 32 tokens")
    assert said < next(place for place, line in enumerate(lines) if line.startswith("step 0/"))
    assert main([*arguments, *FEW, "--task", "causal-lm", "--run-dir", "other"]) == 2
    assert "reads both directions" in capsys.readouterr().err
    assert not Path("other").exists()


def test_a_hub_that_is_out_of_reach_is_one_line(base):
    """In a process of its own, as a person has it: the hub's library tells each retry unless it is kept quiet."""
    finished = subprocess.run(
        [sys.executable, "-c", "from dpoptim.app.cli.quiet import silence_libraries; silence_libraries()\n"
         "from huggingface_hub.utils import _http; _http.logger.warning('Retrying in 1s [Retry 1/5].')"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert finished.stderr == ""


def test_resuming_what_is_no_run(tmp_path, capsys):
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err
    assert main(["train", "recipe.toml"]) == 2
    assert "recipe 'recipe.toml' does not exist" in capsys.readouterr().err


def test_help_reads_well(capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for told in ("model and data:", "privacy:", "optimizer:", "the run:", "examples:", "noise.key", "NOT private"):
        assert told in text
    for kind in noise_words():
        assert kind in text
