"""The `dpoptim compare` command: table, JSON, plot, resuming after Ctrl-C, and errors."""

from __future__ import annotations

import json
import signal

import pytest

from dpoptim.app.cli import main
from dpoptim.app.cli.compare import _grid, _interval, _word
from dpoptim.app.comparison import compare as compare_module
from dpoptim.app.progress import ProgressReporter
from tests.app.comparisons import recipe_for, write_rows

TABLE = """
[compare]
variants = ["post_processing", "dp_sgd"]
seeds = 2
references = true
tuning_epsilon = "uncovered"

[compare.grid]
learning_rate = [0.01, 0.1]

[compare.grid.dp_sgd]
learning_rate = [1.0]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, a recipe and a finished comparison."""
    folder = tmp_path_factory.mktemp("compare")
    write_rows(folder / "private.csv")
    (folder / "recipe.toml").write_text(recipe_for(folder).to_toml() + TABLE)
    assert main(["compare", str(folder / "recipe.toml"), "--run-dir", str(folder / "out"), "--json"]) == 0
    return folder


def arguments(place, *more):
    return ["compare", str(place / "recipe.toml"), "--run-dir", str(place / "out"), *more]


def test_table_states_what_it_covers(place, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(arguments(place)) == 0
    out = capsys.readouterr().out
    stored = json.loads((place / "out" / "comparison.json").read_text())
    for row in stored["variants"]:
        line = next(line for line in out.splitlines() if line.startswith(row["variant"]))
        assert f"{row['loss']['mean']:.4f} ± {row['loss']['half_width']:.4f}" in line
    assert "each run: epsilon = 3.0000 at delta = 0.0001" in out
    assert "TUNING IS NOT COVERED" in out
    assert "epsilon of everything in this table" in out
    assert f"{stored['epsilon']['everything']:.2f}"[:-1] in out
    assert "non-private (NOT PRIVATE)" in out
    assert "no fine-tuning" in out
    assert "outside the guarantee" in out
    assert "Student's t over 2 seeds" in " ".join(out.split())
    assert "Two seeds make it very wide" in " ".join(out.split())


def test_json_is_the_only_output(place, capsys):
    assert main(arguments(place, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((place / "out" / "comparison.json").read_text())
    assert found["tuning"]["kind"] == "uncovered"
    assert found["references"][1]["epsilon"] is None  # infinite


def test_plot_is_written(place, tmp_path):
    assert main(arguments(place, "--json", "--plot", str(tmp_path / "plot.png"))) == 0
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_one_seed_has_no_interval(place, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(arguments(place, "--seeds", "1")) == 0
    out = capsys.readouterr().out
    assert "One seed gives no interval" in out
    assert "±" not in out
    assert "ever started in this folder" in out


def test_ctrl_c_prints_how_to_resume(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ProgressReporter, "step", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    given = ["compare", str(place / "recipe.toml"), "--run-dir", str(tmp_path / "out")]
    given += ["--variants", "dp_sgd", "--grid", "learning_rate=0.5"]
    assert main(given) == 130
    printed = capsys.readouterr().err
    assert "run 1 of" in printed
    assert "run the same command again to resume" in printed


def test_ctrl_c_before_the_first_run(place, tmp_path, capsys, monkeypatch):
    def interrupted(*values, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_module, "prepare_run", interrupted)
    assert main(["compare", str(place / "recipe.toml"), "--run-dir", str(tmp_path / "out")]) == 130
    assert "run the same command again to resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--variants", "adam"], "Expected variants to be one of"),
        (["--variants", ","], "variants is empty"),
        (["--grid", "eps=0.1"], "eps cannot be tuned for dp_sgd"),
        (["--grid", "learning_rate"], "must be written as NAME=VALUE"),
        (["--grid", "clip_norm=1", "--grid", "clip_norm=2"], "twice"),
        (["--tuning-epsilon", "public"], "Give tuning_data with"),
        (["--tuning-epsilon", "-1"], "Expected tuning_epsilon > 0, got -1.0"),
        (["--epsilon", "2"], "use a different --run-dir"),
        (["--plot", "picture.txt"], "must end in .png"),
        (["--seeds", "0"], "Expected seeds to be a whole number >= 1, got 0"),
    ],
)
def test_mistakes_print_one_line(place, refusal, more, message):
    assert message in refusal(*arguments(place, *more))


def test_train_does_not_resume_a_comparison_and_report_shows_its_runs(place, tmp_path, capsys):
    assert main(["train", "--resume", str(place / "out")]) == 2
    assert "is a comparison; resume it with the `dpoptim compare` command that made it" in capsys.readouterr().err
    assert main(["report", str(place / "out"), "--json"]) == 0
    names = [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]]
    assert len(names) == 6, "three rows with two seeds each, no trial"
    assert all("seed-" in name for name in names)


def test_grids_are_read_and_shown():
    found = _grid(["learning_rate=0.1,0.2", "dp_sgd.betas=0.9:0.99"])
    assert found == {"learning_rate": [0.1, 0.2], "dp_sgd": {"betas": [[0.9, 0.99]]}}
    assert (_word(0.001), _word([0.9, 0.99])) == ("0.001", "0.9:0.99")
    assert _interval({"mean": 0.5, "half_width": 0.01}, "{:.1f}", times=100) == "50.0 ± 1.0"
