"""Fashion-MNIST: its files, the features, equal noise, the plan of runs, and one small run of both libraries."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace

import pytest
import torch

from experiments import results_file
from experiments.__main__ import main
from experiments.fashion_mnist import EXPERIMENT, estimate
from experiments.fashion_mnist.cells import ROW, ROWS, SIZES, fastest
from experiments.fashion_mnist.data import read_idx
from experiments.fashion_mnist.models import _filters, scattering
from experiments.fashion_mnist.training import opacus_noise, plan_of
from experiments.framework import lines_of

PAPER = SIZES["paper"]
ONLY = ("--only", "row=opacus_dp_adam", "--only", "row=scale_then_privatize", "--only", "row=non_private")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A smoke run of three rows."""
    pytest.importorskip("opacus")
    out = tmp_path_factory.mktemp("results")
    assert main(["fashion_mnist", "--scale", "smoke", *ONLY, "--out", str(out)]) == 0
    return out


def searched(accuracies, losses=None):
    """Lines of a finished search of the ViT's DP-SGD."""
    cells = [c for c in PAPER.search_cells() if (c["model"], c["row"]) == ("vit", "dp_sgd")]
    losses = losses or [1.0] * len(cells)
    return [
        {"cell": cell, "result": {"accuracy": accuracy, "loss": loss}}
        for cell, accuracy, loss in zip(cells, accuracies, losses, strict=True)
    ]


class TestData:
    def test_reads_idx_files(self, tmp_path):
        path = tmp_path / "x.gz"
        content = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (2, 2, 3)) + bytes(range(12))
        path.write_bytes(gzip.compress(content))
        assert torch.equal(read_idx(path), torch.arange(12, dtype=torch.uint8).view(2, 2, 3))
        for wrong in (content[:-1], b"\0\0\x0d" + content[3:]):
            path.write_bytes(gzip.compress(wrong))
            with pytest.raises(ValueError, match="not a whole idx file"):
                read_idx(path)

    def test_missing_files_are_one_line_with_the_command(self, tmp_path, capsys):
        arguments = ["fashion_mnist", "--scale", "paper", "--data", str(tmp_path), "--out", str(tmp_path)]
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "no train-images-idx3-ubyte.gz. Run `apt-get install dataset-fashion-mnist`" in line
        assert "--data" in line


class TestFeatures:
    def test_wavelets_have_no_mean_and_one_direction(self):
        """The peak of each is at frequency 3π/4 or 3π/8 in its direction, with gain 1."""
        wavelets, blur = _filters("cpu")
        assert wavelets[..., 0, 0].abs().max() < 1e-6
        torch.testing.assert_close(blur.sum(1), torch.ones(7))
        for scale in (0, 1):
            for k in (0, 2, 4):
                gains, angle = wavelets[scale, k].abs(), math.pi * k / 8
                down, right = divmod(int(gains.argmax()), 32)
                expected = (math.sin(angle) * 12 / 2**scale, math.cos(angle) * 12 / 2**scale)
                assert (down, right) == pytest.approx(expected, abs=0.6)
                assert float(gains.max()) == pytest.approx(1, abs=0.05)

    def test_each_image_has_its_own_features(self):
        images = torch.randn(5, 1, 28, 28)
        features = scattering(images)
        assert features.shape == (5, 81 * 49)
        torch.testing.assert_close(scattering(images[2:3])[0], features[2])


class TestPlan:
    @pytest.mark.slow
    def test_both_libraries_add_the_same_noise(self):
        """Opacus's accountant asks for .3 % more, because it bounds its own numerical error."""
        pytest.importorskip("opacus")
        plan = plan_of("Poisson", 3.0, 60_000, 5_000, 480, 1)
        multiplier, epsilon = opacus_noise(3.0, 1 / 12, 480)
        assert epsilon <= 3.0
        assert multiplier == pytest.approx(plan.noise_multiplier, rel=4e-3)
        assert multiplier > plan.noise_multiplier

    def test_sizes_divide(self):
        for size in SIZES.values():
            assert not size.search_examples % size.batch_size
            assert not size.final_examples % size.batch_size

    def test_the_search_trains_on_no_validation_image(self):
        assert {cell["num_examples"] for cell in PAPER.search_cells()} == {50_000}
        assert {cell["epsilon"] for cell in PAPER.search_cells() if "epsilon" in cell} == {3.0}

    def test_final_runs_wait_for_the_search_and_take_the_best(self):
        lines = searched([80.0] * 3 + [81.0, 81.0] + [79.0] * 3, [1.0] * 3 + [0.9, 0.8] + [None] * 3)
        assert PAPER.final_cells(lines[:-1]) == []
        cells = PAPER.final_cells(lines)
        assert [(cell["seed"], cell["epsilon"]) for cell in cells] == [
            (seed, epsilon) for seed in range(3) for epsilon in (1.0, 3.0, 8.0)
        ]
        assert {(cell["lr"], cell["clip_norm"]) for cell in cells} == {ROW["dp_sgd"].settings()[8]}
        assert {(cell["num_examples"], cell["steps"]) for cell in cells} == {(60_000, 480)}
        fewer = replace(PAPER, seeds=1).final_cells(lines)
        assert fewer == cells[:3]

    def test_the_fastest_mode_of_opacus_counts(self):
        cells = [c for c in PAPER.speed_cells() if (c["model"], c["row"]) == ("cnn", "opacus_dp_sgd")]
        results = [{"mode": "hooks", "ms_per_step": 3.0}, {"error": "no"}, {"mode": "ghost", "ms_per_step": 2.0}]
        lines = [{"cell": cell, "result": result} for cell, result in zip(cells, results, strict=True)]
        assert fastest(lines) == {("cnn", "opacus_dp_sgd"): results[2]}
        search = [c for c in PAPER.search_cells() if (c["model"], c["row"]) == ("cnn", "opacus_dp_sgd")]
        assert estimate(search, lines) == pytest.approx(8 * (2 + 400 * 0.002))
        assert estimate(search, lines) == estimate([*search, cells[0]], lines)


class TestRun:
    def test_makes_lines_with_equal_guarantees(self, made):
        lines = results_file.read(made / "fashion_mnist.jsonl").lines
        final = {line["cell"]["row"]: line for line in lines if line["cell"]["purpose"] == "final"}
        assert len(lines) == 9
        for name in ("opacus_dp_adam", "scale_then_privatize"):
            assert final[name]["epsilon"] == pytest.approx(3.0, abs=2e-3)
            assert final[name]["adjacency"] == "add_remove"
        sigmas = [final[name]["plan"]["noise_multiplier"] for name in ("opacus_dp_adam", "scale_then_privatize")]
        assert sigmas[0] == pytest.approx(sigmas[1], rel=5e-3)
        assert "NOT private" in final["non_private"]["note"]
        assert final["non_private"]["epsilon"] is None
        assert "opacus" in final["opacus_dp_adam"]["setting"]["versions"]

    def test_runs_nothing_again_and_renders_the_same_page(self, made, capsys):
        page = (made / "fashion_mnist.md").read_text()
        assert main(["fashion_mnist", "--scale", "smoke", *ONLY, "--out", str(made)]) == 0
        assert "9 cells, 0 of them new" in capsys.readouterr().out
        assert main(["fashion_mnist", "--render", "--out", str(made)]) == 0
        assert (made / "fashion_mnist.md").read_text() == page
        assert (made / "images" / "fashion_mnist-accuracy.png").read_bytes().startswith(b"\x89PNG")
        assert "layout, not the result" in page

    def test_a_changed_result_would_be_detected(self, made):
        """Every final run and every timed step is on the page."""
        lines = lines_of(EXPERIMENT, made)
        expected = EXPERIMENT.markdown(lines)
        for index, line in enumerate(lines):
            if line["cell"]["purpose"] == "search" or (line["cell"]["purpose"], line["epsilon"]) == ("speed", None):
                continue
            changed = line | {"result": {k: 2 * v if isinstance(v, float) else v for k, v in line["result"].items()}}
            assert EXPERIMENT.markdown([*lines[:index], changed, *lines[index + 1 :]]) != expected

    def test_a_final_run_without_a_search_is_refused(self, tmp_path, capsys):
        assert main(["fashion_mnist", "--scale", "smoke", "--only", "purpose=final", "--out", str(tmp_path)]) == 2
        assert "final needs a finished search" in capsys.readouterr().err

    @pytest.mark.slow
    def test_every_row_runs_in_two_processes(self, tmp_path):
        pytest.importorskip("opacus")
        assert main(["fashion_mnist", "--scale", "smoke", "--workers", "2", "--out", str(tmp_path)]) == 0
        lines = lines_of(EXPERIMENT, tmp_path)
        assert len(lines) == 3 * len(ROWS)
        assert all(row.label in EXPERIMENT.markdown(lines) for row in ROWS if row.library != "PyTorch")
