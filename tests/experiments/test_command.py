"""`python -m experiments` from the command line, at smoke scale."""

from __future__ import annotations

import shutil
import sys

import pytest

from experiments import results_file, theory
from experiments.__main__ import main
from experiments.framework import Experiment, MissingInput


def test_one_smoke_cell(tmp_path, capsys):
    only = ["--only", "quantity=epsilon", "--only", "case=σ = 1"]
    assert main(["theory", "--scale", "smoke", *only, "--out", str(tmp_path)]) == 0
    assert "theory: 1 cells, 1 of them new" in capsys.readouterr().out
    (line,) = results_file.read(tmp_path / "theory.jsonl").lines
    assert line["result"]["predicted"] == pytest.approx(10.0453, abs=1e-4)
    assert "| epsilon | σ = 1 | 10.04529 |" in (tmp_path / "theory.md").read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One smoke run of every experiment, as far as the test of the tables needs."""
    out = tmp_path_factory.mktemp("results")
    assert main(["theory", "--scale", "smoke", "--out", str(out)]) == 0
    assert main(["logistic", "--scale", "smoke", "--out", str(out)]) == 0
    assert main(["claims", "--scale", "smoke", "--out", str(out)]) == 0
    assert main(["quadratic", "--scale", "smoke", "--only", "spread=1.0", "--out", str(out)]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logistic", "quadratic", "claims", "theory"])
def test_makes_lines_tables_and_pictures(made, name):
    lines = results_file.read(made / f"{name}.jsonl").lines
    assert {line["experiment"] for line in lines} == {name}
    assert {line["scale"] for line in lines} == {"smoke"}
    text = (made / f"{name}.md").read_text()
    assert "| --" not in text.split("\n")[0]
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    assert links, "no picture"
    for link in links:
        assert (made / link).read_bytes().startswith(b"\x89PNG"), link


@pytest.mark.slow
def test_private_cells_have_an_epsilon_and_others_have_a_note(made):
    for name in ("logistic", "quadratic"):
        for line in results_file.read(made / f"{name}.jsonl").lines:
            free = "NOT private" in line["note"]
            assert free == (line["epsilon"] is None), line["cell"]
            assert free or (line["epsilon"] > 0 and line["adjacency"] == "zero_out" and line["plan"])


@pytest.mark.slow
def test_running_again_computes_nothing(made, tmp_path, capsys):
    shutil.copytree(made, tmp_path / "r")
    before = (tmp_path / "r" / "theory.jsonl").read_bytes()
    assert main(["theory", "--scale", "smoke", "--out", str(tmp_path / "r")]) == 0
    assert f"{len(before.splitlines())} cells, 0 of them new" in capsys.readouterr().out
    assert (tmp_path / "r" / "theory.jsonl").read_bytes() == before


@pytest.mark.slow
def test_resumes_with_a_truncated_file(made, tmp_path, capsys):
    path = tmp_path / "theory.jsonl"
    whole = (made / "theory.jsonl").read_bytes()
    path.write_bytes(whole[:-30])
    assert main(["theory", "--scale", "smoke", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "1 of them new" in captured.out
    assert "cut short" in captured.err
    results = [[line["result"] for line in results_file.read(p).lines] for p in (path, made / "theory.jsonl")]
    assert results[0] == results[1], "the same cell gives the same numbers"


def test_ctrl_c_explains_how_to_resume(tmp_path, monkeypatch, capsys):
    def interrupted(request, reporter):
        raise KeyboardInterrupt

    broken = Experiment(name="theory", run=interrupted, markdown=lambda lines: "", pictures=lambda lines: {})
    monkeypatch.setattr(theory, "EXPERIMENT", broken)
    assert main(["theory", "--scale", "smoke", "--out", str(tmp_path)]) == 130
    assert "resumes" in capsys.readouterr().err


@pytest.mark.slow
def test_render_runs_nothing_and_fills_a_page(made, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- begin theory -->\n<!-- end theory -->\n")
    before = (made / "theory.jsonl").read_bytes()
    assert main(["theory", "--render", "--out", str(made), "--docs", str(page)]) == 0
    assert (made / "theory.jsonl").read_bytes() == before
    assert "images/theory-agreement.png" in page.read_text()
    assert (tmp_path / "images" / "theory-agreement.png").exists()
    assert "| dense | 1.689404 |" in page.read_text()


@pytest.mark.slow
def test_missing_input_is_skipped_among_others_and_refused_alone(made, tmp_path, monkeypatch, capsys):
    def missing(request, reporter):
        raise MissingInput("no data in nowhere; give --data")

    one = Experiment(name="theory", run=missing, markdown=lambda lines: "", pictures=lambda lines: {})
    monkeypatch.setattr(theory, "EXPERIMENT", one)
    shutil.copytree(made, tmp_path / "r")
    names = ["logistic", "theory", "--scale", "smoke", "--out", str(tmp_path / "r")]
    assert main(names) == 0
    captured = capsys.readouterr()
    assert "theory: skipped: no data" in captured.out
    assert "logistic: 12 cells" in captured.out
    assert main(["theory", "--scale", "smoke", "--out", str(tmp_path / "r")]) == 2
    assert "no data in nowhere" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["theory", "--only", "quantity"], "NAME=VALUE"),
        (["theory", "--only", "quantity=none of them"], "leaves no cell of theory; quantity is dimension limit,"),
        (["theory", "--device", "gpu"], "must be cpu, cuda or cuda:N"),
        (["theory", "--seeds", "0"], "seeds=0 must be more than 0"),
        (["theory", "--time-limit", "-5"], "time_limit=-5.0 must be more than 0"),
        (["tinybert", "--only", "column=bnded"], "columns are banded, banded_10"),
        (["tinybert", "--only", "row=post_processing", "--only", "column=none"], "leaves no cell"),
        (["tinybert", "--only", "colum=banded"], "have no colum; they have batch_size"),
        (["tinybert", "--only", "row=post_processing", "--only", "seed=9"], "leaves no cell to run, and none that was"),
        (["figures", "--only", "row=post_processing"], "leaves no cell to run, and none that was"),
        (["theory", "--render"], "holds no result; run `python -m experiments theory"),
        (["theory", "--docs", "no such page.md"], "is not a file"),
    ],
)
def test_refuses_in_one_line(tmp_path, capsys, arguments, message):
    assert main([*arguments, "--scale", "smoke", "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("logistic", "noise", "dense"),
        ("logistic", "noise", "none"),
        ("quadratic", "variant", "adam"),
        ("quadratic", "variant", "dp_sgd"),
        ("theory", "quantity", "epsilon"),
        ("theory", "quantity", "window"),
        ("theory", "case", "IME"),
    ],
)
def test_some_of_the_cells_can_be_rendered(made, tmp_path, name, setting, value):
    lines = results_file.read(made / f"{name}.jsonl").lines
    kept = [line for line in lines if line["cell"].get(setting) == value]
    assert kept
    for line in kept:
        results_file.append(tmp_path / f"{name}.jsonl", line)
    assert main([name, "--render", "--out", str(tmp_path)]) == 0
    text = (tmp_path / f"{name}.md").read_text()
    assert "|" in text
    assert ("--only variant=ground_truth" in text) == (value == "dense"), "losses are relative to the ground truth"
    for link in [part.split(")")[0] for part in text.split("](")[1:]]:
        assert (tmp_path / link).exists(), "a picture that was not drawn is not linked"


@pytest.mark.slow
def test_two_experiments_that_share_a_file_restart_it_once(tmp_path, capsys):
    row = ["--only", "column=independent_low", "--only", "row=scale_then_privatize"]
    arguments = ["tinybert", "figures", "--scale", "smoke", "--out", str(tmp_path), *row, "--overwrite"]
    for _ in range(2):
        assert main(arguments) == 0
        purposes = [line["cell"]["purpose"] for line in results_file.read(tmp_path / "tinybert.jsonl").lines]
        assert purposes == ["no fine-tuning", "final", "clip norms", "clip norms"]
    assert (tmp_path / "tinybert.jsonl.old").exists()


@pytest.mark.slow
def test_the_exit_code_shows_that_nothing_could_run(tmp_path, capsys):
    assert main(["logistic", "theory", "--only", "nosie=dense", "--out", str(tmp_path)]) == 2
    assert "noise is none, dense, independent" in capsys.readouterr().out


@pytest.mark.slow
def test_the_requested_scale_is_rendered(made, tmp_path, capsys):
    assert main(["theory", "--render", "--scale", "paper", "--out", str(made)]) == 2
    assert "holds no result of scale paper, only of smoke" in capsys.readouterr().err


@pytest.mark.slow
def test_a_line_of_unknown_scale_is_refused(made, tmp_path, capsys):
    text = (made / "theory.jsonl").read_text().replace('"scale": "smoke"', '"scale": "tiny"', 1)
    (tmp_path / "theory.jsonl").write_text(text)
    assert main(["theory", "--render", "--out", str(tmp_path)]) == 2
    assert "a line has scale 'tiny'" in capsys.readouterr().err


@pytest.mark.slow
def test_unwritable_output_is_refused_before_anything_runs(tmp_path, capsys):
    page, out = tmp_path / "page.md", tmp_path / "out"
    page.write_text("<!-- begin theory -->\n<!-- end theory -->\n")
    both = ["theory", "quadratic", "--scale", "smoke"]
    assert main([*both, "--out", str(out), "--docs", str(page)]) == 2
    assert "<!-- begin quadratic -->" in capsys.readouterr().err
    assert main([*both, "--out", str(page)]) == 2
    assert "is a file; it must be a folder" in capsys.readouterr().err
    assert not out.exists()


def test_cells_left_by_the_time_limit_are_reported(tmp_path, capsys):
    assert main(["theory", "--scale", "smoke", "--time-limit", "1e-9", "--out", str(tmp_path)]) == 0
    assert "theory: no cell was run; 36 or more are left" in capsys.readouterr().out


@pytest.mark.slow
def test_tables_are_written_without_matplotlib(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shutil.copy(made / "theory.jsonl", tmp_path)
    assert main(["theory", "--render", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "theory.md").exists()
    assert not (tmp_path / "images").exists()
    assert "matplotlib" in capsys.readouterr().err


def test_help_names_every_experiment(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name in ("logistic", "quadratic", "theory", "all"):
        assert f"\n  {name} " in text
