"""`dpoptim report` as people call it: the file, JSON and mistakes."""

from __future__ import annotations

import json

import pytest

from dpoptim.app.cli import main
from tests.app.report_runs import evaluation_record, records, step_record, write_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return str(write_run(tmp_path / "run", records()))


def test_default_file_is_report_html(run, tmp_path, capsys):
    assert main(["report", run]) == 0
    assert capsys.readouterr().out.startswith("wrote report.html (")
    text = (tmp_path / "report.html").read_text()
    assert "masked-lm · bert-tiny · scale_" in text
    assert not list(tmp_path.glob(".*"))


def test_several_runs_in_a_named_file(run, tmp_path):
    other = str(write_run(tmp_path / "other", records(shift=1.0)))
    assert main(["report", run, other, "-o", "both.html"]) == 0
    assert "<title>2 runs: masked-lm · bert-tiny · scale_then_privatize</title>" in (tmp_path / "both.html").read_text()


def test_folder_of_a_comparison_reports_all_its_runs(run, tmp_path, capsys):
    for variant in ("dp_sgd", "post_processing"):
        for part in (f"trials/{variant}/learning_rate=1", f"runs/{variant}/as-in-recipe/seed-0"):
            write_run(tmp_path / "which" / part, records())
    (tmp_path / "which" / "runs" / "dp_sgd" / "as-in-recipe" / "seed-1").mkdir()
    (tmp_path / "which" / "runs" / "dp_sgd" / "as-in-recipe" / "seed-1" / "log.jsonl").touch()
    assert main(["report", "which", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert [one["name"] for one in found] == ["dp_sgd/as-in-recipe/seed-0", "post_processing/as-in-recipe/seed-0"]
    assert main(["report", ".", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["runs"]] == ["run"]


def test_json_alone_writes_no_file(run, tmp_path, capsys):
    assert main(["report", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]
    assert found["final"]["validation"]["loss"] == evaluation_record(40, 40)["loss"]
    assert found["final"]["epsilon_spent"] == step_record(40, 40, debug=False)["epsilon"]
    assert not list(tmp_path.glob("*.html"))
    assert main(["report", run, "--json", "-o", "too.html"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["runs"][0] == found
    assert "wrote too.html" in captured.err
    assert (tmp_path / "too.html").exists()


def test_truncated_log_is_mentioned(run, tmp_path, capsys):
    with (tmp_path / "run" / "log.jsonl").open("a") as log:
        log.write('{"kind": "step", "st')
    assert main(["report", run]) == 0
    assert "was cut off while it was written, and is ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["folder.html"], "is not a run directory"),
        (["empty"], "log.jsonl is empty"),
        (["run", "-o", "missing/report.html"], "the folder missing does not exist"),
        (["run", "-o", "run/log.jsonl"], "must end in .html"),
        (["run", "-o", "folder.html"], "is a folder"),
        (["run", "-o", "run/log.jsonl/report.html"], "does not exist"),
    ],
)
def test_mistakes_print_one_line(run, tmp_path, refusal, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "log.jsonl").touch()
    (tmp_path / "folder.html").mkdir()
    before = (tmp_path / "run" / "log.jsonl").read_text()
    assert message in refusal("report", *arguments)
    assert (tmp_path / "run" / "log.jsonl").read_text() == before
    assert not (tmp_path / "report.html").exists()


def test_file_that_cannot_be_written_prints_one_line(run, refusal):
    assert "/proc/.report.html" in refusal("report", run, "-o", "/proc/report.html")


@pytest.mark.parametrize("variant", ["scale_then_privatize", "bias_correction"])
def test_report_reads_what_train_writes(tmp_path, monkeypatch, capsys, variant):
    monkeypatch.chdir(tmp_path)
    rows = [f"{i % 7},{i % 5},{'yes' if i % 7 > 3 else 'no'}" for i in range(80)]
    (tmp_path / "data.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    train = ["train", "--model", "mlp", "--data", "data.csv", "--label-column", "label", "--run-dir", "run", "--debug"]
    train += [
        "--columns",
        "a=0:6",
        "b=0:4",
        "--task",
        "tabular-classification",
        "--noise-multiplier",
        "1",
        "--noise",
        "independent",
    ]
    train += ["--steps", "6", "--batch-size", "20", "--log-every", "2", "--variant", variant]
    assert main(train) == 0
    capsys.readouterr()
    assert main(["report", "run", "--json", "-o", "report.html"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [record for record in log if record["kind"] == "step"]
    scores = [record for record in log if record["kind"] == "evaluation"]
    curves = {name: curve["values"] for name, curve in found["curves"].items()}
    assert curves["epsilon"] == [[r["step"], r["epsilon"]] for r in steps]
    assert curves["signal-over-clip"] == [[r["step"], r["released"]["signal_over_clip"]] for r in steps]
    assert curves["clipped-fraction"] == [[r["step"], r["not_private"]["clipped_fraction"]] for r in steps]
    assert curves["validation-loss"] == [[r["step"], r["loss"]] for r in scores]
    assert ("negative-fraction" in curves) is (variant == "bias_correction")
    assert bool(found["scale_quantiles"]) is (variant == "scale_then_privatize")
    assert found["final"]["ending"] == "finished"
    assert found["final"]["private"] is True
    assert found["final"]["epsilon_spent"] == found["final"]["epsilon"] == steps[-1]["epsilon"]
    assert found["notes"] == []
    page = (tmp_path / "report.html").read_text()
    assert f'id="plot-{"scales" if variant == "scale_then_privatize" else "negative-fraction"}"' in page
    assert (tmp_path / "run.secret" / "noise.key").read_text(errors="replace").strip()[:20] not in page
