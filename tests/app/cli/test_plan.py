"""`dpoptim plan` as people call it: table, JSON, plot and mistakes."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import dpoptim
from dpoptim import BandedToeplitz, PrivacyPlan
from dpoptim.app.cli import main

SMALL = ["plan", "--steps", "60", "--batch-size", "100", "--num-examples", "2000", "--epsilon", "4", "--delta", "1e-6"]
NUMBERS: Any = {"num_examples": 2000, "batch_size": 100, "steps": 60}
PAPER = ["plan", "--steps", "2000", "--batch-size", "2048", "--num-examples", "1700000"]
PAPER += ["--epsilon", "10", "--delta", "1e-7"]


def printed(capsys, arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_json_for_the_setting_of_the_paper(capsys):
    found = json.loads(printed(capsys, [*PAPER, "--json", "--parameters", "1M"]))
    assert (found["epsilon"], found["delta"]) == (10.0, 1e-7)
    rows = {row["name"]: row for row in found["mechanisms"]}
    for row in rows.values():
        assert {"noise_multiplier", "sensitivity", "rmse_mean", "rmse_max", "memory_bytes", "epsilon"} < row.keys()
        assert 10 - 1e-4 <= row["epsilon"] <= 10
        assert row["rmse_mean"] <= row["rmse_max"]
    banded, independent = rows["BandedToeplitz(bands=128)"], rows["Independent()"]
    assert banded["rmse_mean"] / independent["rmse_mean"] == pytest.approx(0.1345, abs=5e-5)
    assert banded["memory_bytes"] == 127 * 4 * 1_000_000
    assert found["chosen"] in rows
    # The same by hand, for one row: noise multiplier and sensitivity of one participation, over the batch.
    strategy = BandedToeplitz(bands=128).optimize(steps=2000)
    product = banded["noise_multiplier"] * banded["sensitivity"] * strategy.mean_error() / 2048
    assert banded["rmse_mean"] == pytest.approx(product, rel=1e-9)
    total = strategy.sensitivity(max_participations=3, min_separation=830)
    assert banded["total_sensitivity"] == pytest.approx(total, rel=1e-12)
    plan = PrivacyPlan(num_examples=1_700_000, batch_size=2048, steps=2000, noise=BandedToeplitz(bands=128))
    assert banded["noise_multiplier"] == plan.calibrate(epsilon=10.0, delta=1e-7).noise_multiplier


def test_answer_comes_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, PAPER).splitlines()
    assert lines[0].startswith("Use BufferedToeplitz(buffers=")
    assert sum(-(-len(line) // 80) or 1 for line in lines) <= 24, "one screenful"
    assert any(line.split()[:2] == ["BandedToeplitz(bands=128)", "1.0039"] for line in lines), "numbers are not cut"
    text = " ".join(" ".join(lines).split())
    assert "0.1345" in text
    assert "noise=BufferedToeplitz(buffers=" in text
    assert "3 participations at least 830 steps apart" in text


def test_a_hopeless_plan_is_called_so(capsys):
    text = " ".join(printed(capsys, [*SMALL, "--parameters", "4.4M"]).split())
    assert "Outlook for 4,400,000 parameters: hopeless: the noise of the whole run is" in text
    assert "Outlook" not in printed(capsys, [*SMALL, "--parameters", "10"])


def test_cost_per_gpu(capsys):
    asked = [*SMALL, "--parameters", "1e9", "--gpus", "4", "--noise-bits", "16"]
    found = json.loads(printed(capsys, [*asked, "--json"]))["per_gpu"]
    whole, sharded = found["whole"], found["sharded"]
    for cost in (whole, sharded):
        assert cost["memory"] == sum(cost[name] for name in ("weights", "optimizer", "sums", "noise"))
    assert whole["optimizer"] == 10 * 10**9  # two moments in float32, and the remainders of bf16 weights
    assert sharded["optimizer"] == 14 * 10**9 // 4  # and the scale
    assert (whole["sent"], whole["sent_without_privacy"]) == (6 * 10**9, 3 * 10**9)  # 2 · 3/4 · 4 or 2 bytes
    assert (sharded["sent"], sharded["sent_without_privacy"]) == (9 * 10**9, 4.5 * 10**9)  # 3/4 · 12 or 6 bytes
    assert found["whole"]["mechanism"] == found["sharded"]["mechanism"]
    text = printed(capsys, asked)
    assert "Each of 4 GPUs" in text
    assert "sends 6 GB per step" in text
    assert "sends 9 GB per micro-batch" in text
    assert "sends nothing per step" in printed(capsys, [*SMALL, "--gpus", "1"])
    assert main([*SMALL, "--gpus", "0"]) == 2
    assert "gpus" in capsys.readouterr().err


def test_the_mechanism_that_fits_on_each_gpu(capsys):
    """With FSDP2, each of four GPUs stores a quarter of past noise, so more fits."""
    asked = [*SMALL, "--parameters", "1e9", "--gpus", "4", "--memory-budget"]
    found = json.loads(printed(capsys, [*asked, "3GB", "--json"]))
    whole, sharded = (found["per_gpu"][name] for name in ("whole", "sharded"))
    rows = {row["name"]: row for row in found["mechanisms"]}
    assert whole["mechanism"] == found["chosen"] != sharded["mechanism"]
    for cost, holders in ((whole, 1), (sharded, 4)):
        assert cost["noise"] == rows[cost["mechanism"]]["memory_bytes"] // holders <= 3e9
    assert rows[sharded["mechanism"]]["memory_bytes"] > 3e9
    assert sharded["mechanism"] in printed(capsys, [*asked, "3GB"]).split("Each of 4 GPUs")[1]


def test_printed_plan_keeps_the_guarantee(capsys):
    change = ["--adjacency", "replace", "--epsilon", "4.99999996", "--delta", "1.23456789e-6"]
    (line,) = [line for line in printed(capsys, [*SMALL, *change]).splitlines() if "PrivacyPlan(" in line]
    names = {
        **{name: getattr(dpoptim, name) for name in dpoptim.__all__},
        "PrivacyPlan": lambda *_, **given: PrivacyPlan(**NUMBERS, **given),
    }
    plan = eval(line.strip().replace("PrivacyPlan(..., ", "PrivacyPlan("), names)
    found = json.loads(printed(capsys, [*SMALL, *change, "--json"]))
    (row,) = [row for row in found["mechanisms"] if row["name"] == found["chosen"]]
    assert plan.noise_multiplier == row["noise_multiplier"]
    assert plan.epsilon() <= 4.99999996
    assert row["total_sensitivity"] >= 2 * row["sensitivity"]


def test_add_remove_allows_only_independent_noise(capsys):
    found = json.loads(printed(capsys, [*SMALL, "--sampling", "poisson", "--adjacency", "add-remove", "--json"]))
    assert [row["name"] for row in found["mechanisms"]] == ["Independent()"]


def test_a_weak_delta_is_refused(capsys):
    assert main([*SMALL, "--delta", "0.01", "--json"]) == 2
    assert "delta=0.01 is not below 1/" in capsys.readouterr().err


def test_tight_memory_budget_is_explained(capsys):
    text = " ".join(printed(capsys, [*SMALL, "--memory-budget", "1"]).split())
    assert "times less than independent noise, in no memory; B" in text
    assert "above the 1 B allowed." in text


def test_plot_without_matplotlib_is_refused_early(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SMALL, "--plot", str(tmp_path / "plan.png")]) == 2
    assert (
        capsys.readouterr().err == "dpoptim: --plot needs the package matplotlib; run: pip install 'dpoptim[plots]'\n"
    )


def test_secret_sampling_and_verbose(capsys):
    text = printed(capsys, [*SMALL, "--sampling", "poisson"])
    assert "CyclicPoisson(bands=" in text
    assert "Secret Poisson sampling" in text
    found = json.loads(printed(capsys, [*SMALL, "--sampling", "poisson", "--json"]))
    whole = printed(capsys, [*SMALL, "--sampling", "poisson", "--verbose"])
    assert all(row["name"] in whole for row in found["mechanisms"])
    assert "--verbose" not in whole


def test_all_mechanisms_for_a_different_workload(capsys):
    once = [*SMALL, "--num-examples", "6000", "--all", "--json"]
    found = json.loads(printed(capsys, [*once, "--workload", "momentum:0.9"]))
    assert found["workload"] == "PrefixSums(momentum=0.9)"
    errors = {row["name"]: row["rmse_mean"] for row in found["mechanisms"]}
    assert errors["Dense()"] == pytest.approx(errors["Banded(bands=60)"], rel=1e-3) == min(errors.values())
    prefix = {row["name"]: row["rmse_mean"] for row in json.loads(printed(capsys, once))["mechanisms"]}
    assert prefix["Independent()"] < errors["Independent()"]


def test_plot_names_the_mechanisms(capsys, tmp_path):
    target = tmp_path / "plan.svg"
    printed(capsys, [*SMALL, "--plot", str(target)])
    assert target.read_text().count("<!-- BandedToeplitz(bands=20) -->") == 1  # the legend's entry


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--steps", "0"], "Expected steps to be a whole number >= 1, got 0"),
        (["--batch-size", "3000"], "Expected batch_size <= num_examples, got 3000 > 2000"),
        (["--epsilon", "-1"], "Expected --epsilon > 0, got -1.0"),
        (["--epsilon", "nan"], "Expected --epsilon > 0, got nan"),
        (["--delta", "-1e-5"], "Expected --delta > 0 and < 1, got -1e-05"),
        (["--epsilon", "1e6", "--sampling", "poisson"], "secret sampling <= 100"),
        (["--steps", "1e6", "--num-examples", "10000000"], "Expected steps <= the limit, got 1000000 > 100000"),
        (["--parameters", "0"], "Pass the number of trained parameters, or the model"),
        (["--adjacency", "add-remove"], "no proof"),
        (["--plot", "none/plan.png"], "the folder none does not exist"),
        (["--plot", "plan.docx"], "must end in .png"),
    ],
)
def test_mistakes_print_one_line(refusal, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    assert words in refusal(*SMALL, *change)


@pytest.mark.parametrize(
    "change",
    [
        ["--steps", "many"],
        ["--steps", "2.5"],
        ["--parameters", "-4"],
        ["--workload", "moments:2"],
        ["--workload", "sums"],
    ],
)
def test_values_that_cannot_be_parsed_are_quoted(capsys, change):
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, *change])
    assert stopped.value.code == 2
    assert change[1] in capsys.readouterr().err
