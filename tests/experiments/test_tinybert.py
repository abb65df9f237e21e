"""BERT-Tiny's table: texts, losses, tuning and runs, each against a simple version."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dpoptim.data import private_loader
from dpoptim.noise import NoiseKey
from dpoptim.optim import InverseRoot
from experiments import results_file
from experiments.__main__ import main
from experiments.framework import MissingInput, Request
from experiments.progress import ProgressReporter
from experiments.tinybert import model as models
from experiments.tinybert import report
from experiments.tinybert.data import Marks, laid_out, make_part, read_corpus, synthetic_corpus
from experiments.tinybert.experiment import build_workspace, run_table
from experiments.tinybert.grid import (
    COLUMNS,
    NON_PRIVATE,
    ONLY_SCHEDULED,
    ROWS,
    SIZES,
    Hyperparameter,
    Row,
    Scoring,
    Size,
    guarantee,
    places,
    plan_of,
    row,
)
from experiments.tinybert.model import mean_losses, optimizer_of
from experiments.tinybert.report import CLAIMS, compared, how_close, level, scores
from experiments.tinybert.schedule import Job, chosen, final_cell, first_setting, jobs, reached, tuning_cell, wanted
from experiments.tinybert.training_run import Unfinished, run
from experiments.tinybert.workers import workers
from tests.app.tiny import wordpiece

pytestmark = pytest.mark.slow

VOCABULARY = 150
SHARED = {"num_examples": 60, "model": "m"}


@pytest.fixture(scope="module")
def workspace():
    corpus = synthetic_corpus(vocabulary=VOCABULARY, examples=60)
    return build_workspace(corpus, lambda: models.synthetic(vocabulary=VOCABULARY), 64, "cpu", Scoring())


def cell(name: str, kind: str = "independent", *, purpose: str = "final", **changes):
    place, size = (name, kind), SIZES["smoke"]
    made = final_cell(place, first_setting(row(name), kind), size, SHARED, 0)
    return {**made, "purpose": purpose, **changes}


def part_of(texts, indices, vocabulary=VOCABULARY, generator=None, *, bucket=8, longest=64):
    chosen, width, most, _ = texts.part(indices, bucket=bucket, longest=longest)
    return make_part(texts, chosen, width, most, vocabulary, generator or torch.Generator().manual_seed(0))


class TestTexts:
    def test_a_part_masks_only_its_places(self, workspace):
        texts, indices = workspace.train, np.arange(12)
        chosen, width, most, tokens = texts.part(indices, bucket=8, longest=64)
        assert (width % 8, tokens) == (0, int(texts.lengths[:12].sum()))
        assert (len(chosen), most) == (12, int(texts.masked[:12].max()))
        part = part_of(texts, indices)
        stored = texts.tokens.numpy()[1:]
        whole = np.split(stored, np.flatnonzero(stored == 102) + 1)
        for i in range(12):
            own = [101, *whole[i].tolist()]
            counted = part.labels[i] != -100
            places = part.places[i][counted].tolist()
            assert len(places) == len(set(places)) == max(round(0.15 * (len(own) - 2)), 1) == int(part.masked[i])
            assert part.labels[i][counted].tolist() == [own[place] for place in places]
            assert not {0, len(own) - 1} & set(places), "[CLS] and [SEP] are never masked"
            for place, token in enumerate(part.ids[i].tolist()):
                expected = own[place] if place < len(own) else 0
                assert token == expected or place in places
                assert bool(part.attends[i, 0, 0, place]) == (place < len(own))

    def test_shares_of_masks(self):
        texts = laid_out(np.array([*[200] * 20000, 102] * 2), Marks(), 20002, "cpu")
        part = part_of(texts, np.arange(2), 30000, bucket=1, longest=20002)
        seen = part.ids.gather(1, part.places)
        assert float((seen == 103).float().mean()) == pytest.approx(0.8, abs=0.02)
        assert float((seen == 200).float().mean()) == pytest.approx(0.1, abs=0.015)

    def test_long_texts_are_cut(self):
        texts = laid_out(np.array([*range(200, 300), 102]), Marks(), 16, "cpu")
        part = part_of(texts, np.arange(1), 999, longest=16)
        assert part.ids.shape == (1, 16)
        assert texts.lengths.tolist() == [16]


def test_losses_are_those_of_the_plain_model(workspace):
    model = workspace.fresh_model()
    part = part_of(workspace.train, np.arange(9))
    logits = model.bert(part.ids, attention_mask=part.attends[:, 0, 0].long()).logits
    for i in range(9):
        counted = part.labels[i] != -100
        plain = F.cross_entropy(logits[i, part.places[i][counted]], part.labels[i][counted])
        torch.testing.assert_close(model(part)[i], plain, rtol=1e-5, atol=1e-5)


def test_evaluation_is_the_mean_over_tokens_and_over_examples(workspace, monkeypatch):
    model = workspace.fresh_model()
    whole = mean_losses(model, workspace.test, longest=64)
    assert mean_losses(model, workspace.test, longest=64) == whole, "masks are always the same"
    assert model.training
    seen: list[tuple[float, int]] = []
    plain = type(model).token_losses

    def kept(self, part):
        losses = plain(self, part)
        seen.extend(zip(losses.double().sum(1).tolist(), part.masked.tolist(), strict=True))
        return losses

    monkeypatch.setattr(type(model), "token_losses", kept)
    mean_losses(model, workspace.test, longest=64)
    assert len(seen) == len(workspace.test)
    assert whole["tokens"] == pytest.approx(sum(s for s, _ in seen) / sum(n for _, n in seen))
    assert whole["examples"] == pytest.approx(sum(s / n for s, n in seen) / len(seen))


class TestCorpus:
    @pytest.fixture
    def model(self, tmp_path):
        wordpiece().save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    def test_the_arxiv_file(self, tmp_path, model):
        file = tmp_path / "arxiv.json"
        abstracts = [f"noise {'fox ' * (i % 7)}dog{'s' * i}" for i in range(40)]
        file.write_text("".join(json.dumps({"id": str(i), "abstract": a}) + "\n" for i, a in enumerate(abstracts * 2)))
        corpus = read_corpus(str(file), model, longest=64, cache=tmp_path)
        counts = [int((part == corpus.marks.sep).sum()) for part in (corpus.train, corpus.validation, corpus.test)]
        assert counts == [32, 4, 4], "each distinct text once"
        sets = [{tuple(text) for text in np.split(part, np.flatnonzero(part == corpus.marks.sep) + 1)[:-1]}
                for part in (corpus.train, corpus.validation, corpus.test)]  # fmt: skip
        assert sum(map(len, sets)) == len(set.union(*sets)), "no text is in two sets"
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr("experiments.tinybert.data._pack")
            again = read_corpus(str(file), model, longest=64, cache=tmp_path)
        assert np.array_equal(again.train, corpus.train), "kept beside the results"
        file.write_text("".join(json.dumps({"abstract": f"{a} fox"}) + "\n" for a in abstracts))
        other = read_corpus(str(file), model, longest=64, cache=tmp_path)
        assert not np.array_equal(other.train, corpus.train), "another file of that name"

    def test_a_line_without_an_abstract(self, tmp_path, model):
        file = tmp_path / "arxiv.json"
        file.write_text('{"abstract": "a"}\n{"title": "b"}\n')
        with pytest.raises(ValueError, match="line 2 is not a JSON object with an abstract"):
            read_corpus(str(file), model, longest=64, cache=tmp_path)

    def test_packed_files_need_held_out_ones(self, tmp_path):
        (tmp_path / "train-0.u16.xz").write_bytes(b"")
        with pytest.raises(MissingInput, match=r"validation\.u16\.xz"):
            read_corpus(str(tmp_path), "", longest=64, cache=tmp_path)


class TestSearch:
    @given(
        sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
        at=st.lists(st.integers(0, 5), min_size=3, max_size=3),
        start=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    )
    @settings(max_examples=60, deadline=None)
    def test_finds_the_bottom_of_a_bowl(self, sizes, at, start):
        knobs = tuple(
            Hyperparameter(f"k{i}", tuple(map(float, range(n))), float(min(start[i], n - 1)))
            for i, n in enumerate(sizes)
        )
        bowl = Row(name="x", label="x", knobs=knobs)
        bottom = [min(at[i], n - 1) for i, n in enumerate(sizes)]
        tried: dict = {}
        while settings_ := wanted(bowl, "any", tried):
            assert not set(settings_) & set(tried), "nothing is tried twice"
            for setting in settings_:
                tried[setting] = sum((value - bottom[i]) ** 2 for i, (_, value) in enumerate(setting))
        assert [value for _, value in reached(bowl, "any", tried)] == bottom
        assert len(tried) <= 1 + 2 * sum(sizes) + 2 * len(sizes)

    def test_an_abandoned_run_is_not_chosen(self):
        place, size = ("post_processing", "banded"), dataclasses.replace(SIZES["smoke"], tuned=True)
        losses = {1e-3: (4.0, "finished"), 5e-4: (3.0, "given up"), 2e-3: (3.9, "finished"), 5e-3: (None, "diverged")}
        lines = [
            {"cell": tuning_cell(place, (("lr", rate),), size, SHARED),
             "result": {"validation": loss, "ended": ended, "curve": [(1, loss)]}}
            for rate, (loss, ended) in losses.items()
        ]  # fmt: skip
        assert chosen(lines, place, size) == (("lr", 2e-3),)
        (job,) = jobs(lines, [place], size, SHARED, 1)
        assert (job.cell["purpose"], job.cell["lr"], job.cell["batch_size"]) == ("final", 2e-3, size.batch_size)

    def test_every_start_is_on_its_grid(self):
        for each in ROWS:
            for kind in COLUMNS:
                for knob, (name, value) in zip(each.knobs, first_setting(each, kind.name), strict=True):
                    assert knob.name == name
                    assert value in knob.grid


class TestPrivacy:
    def test_a_smaller_batch_keeps_the_noise_of_the_average(self):
        size = Size(steps=20, batch_size=64, standing_for=64, tuning_batch_size=8, tuning_steps=20, seeds=1)
        shared = {"num_examples": 1000, "model": "m"}
        for kind in ("independent", "banded", "independent_low"):
            for name in ("post_processing", "independent_moments"):
                setting = first_setting(row(name), kind)
                large, small = (
                    plan_of(final_cell((name, kind), setting, size, shared, 0)),
                    plan_of(tuning_cell((name, kind), setting, size, shared)),
                )
                a, b = large.noise_stddevs(), small.noise_stddevs()
                assert b.gradient_sum / 8 == pytest.approx(a.gradient_sum / 64)
                if name == "independent_moments":
                    assert b.square == pytest.approx(a.square, rel=0.1)  # Δ₂ is (2B − 1)/B² up to a factor

    def test_only_full_batches_have_an_epsilon(self):
        full, small = cell("post_processing"), cell("post_processing", batch_size=4)
        epsilon, note = guarantee(full, plan_of(full))
        assert epsilon is not None
        assert note is None
        assert guarantee(small, plan_of(small))[0] is None
        assert "NOT private" in str(guarantee(cell("noiseless"), plan_of(cell("noiseless")))[1])

    def test_the_papers_setting(self):
        """817,503 texts in 2000 batches of 2048: six participations."""
        size = SIZES["paper"]
        made = final_cell(("post_processing", "banded"), (("lr", 1e-3),), size, {"num_examples": 817_503}, 0)
        plan = plan_of(made)
        assert plan.max_participations == 6
        independent = {**made, "column": "independent"}
        ours, plain = guarantee(made, plan)[0], guarantee(independent, plan_of(independent))[0]
        assert ours is not None
        assert plain is not None
        assert 0.9 * plain < ours <= plain, "the last columns of a banded Toeplitz matrix are cut, and shorter"

    def test_columns_named_by_an_epsilon_spend_it(self):
        for kind in [each.name for each in COLUMNS if each.epsilon is not None]:
            made = cell("scale_then_privatize", kind)
            assert guarantee(made, plan_of(made))[0] == pytest.approx(10.0, rel=1e-3)

    @pytest.mark.parametrize(("kind", "less"), [("independent_low", 0), ("poisson_10", 0), ("banded", 0.1)])
    def test_a_steps_noise_in_tuning_is_that_of_the_final_run_or_a_little_less(self, kind, less):
        """Correlated noise is optimized for a run's own steps; the page states how much that reduces it."""
        place, size, shared = ("scale_then_privatize", kind), SIZES["paper"], {"num_examples": 817_503}
        setting = tuple((dict(first_setting(row(place[0]), kind)) | {"clip_norm": 1.0}).items())
        tuned, final = (
            level(made) for made in (tuning_cell(place, setting, size, shared),
                                     final_cell(place, setting, size, shared, 0))
        )  # fmt: skip
        assert (1 - less) * final <= tuned * (1 + 1e-9)
        assert tuned <= final * (1 + 1e-9)

    def test_tuning_runs_at_an_epsilon_have_the_noise_of_the_final_run(self):
        size, shared = SIZES["paper"], {"num_examples": 817_503}
        place = ("scale_then_privatize", "poisson_10")
        setting = first_setting(row(place[0]), place[1])
        tuned, final = (
            plan_of(cell) for cell in (tuning_cell(place, setting, size, shared),
                                       final_cell(place, setting, size, shared, 0))
        )  # fmt: skip
        assert final.noise_multiplier is not None
        assert tuned.noise_multiplier == pytest.approx(final.noise_multiplier * 256 / 2048)


@pytest.mark.parametrize("name", [each.name for each in (*ROWS, *ONLY_SCHEDULED)])
def test_every_row_trains(workspace, name):
    kind = "none" if name.startswith("non_private") else "independent_low"
    outcome = run(cell(name, kind), workspace)
    assert outcome.result["steps_done"] >= 1
    assert outcome.result["ended"] in ("finished", "diverged")
    assert ("NOT private" in (outcome.note or "")) == (outcome.epsilon is None)
    assert ("gradient_norms" in outcome.result) == (name == "noiseless")
    assert ("negative_fractions" in outcome.result) == (row(name).label.startswith(("IME", "JME", "bias")))


def test_seeds_test_texts_and_every_setting_make_a_difference(workspace):
    """Cells run with their settings: no setting is ignored, no two rows are equal, and sets are separate."""
    first = {}
    for each in ROWS:
        kind = "none" if each.name in NON_PRIVATE else "independent_low"
        shorter: dict[str, Any] = {"period": 1} if each.name == "delayed" else {}  # than these runs
        first[each.name] = run(made := cell(each.name, kind, **shorter), workspace).result["validation"]
        for knob in each.knobs:
            other = next(value for value in reversed(knob.grid) if value != made[knob.name])
            other = 1e3 if knob.name == "clip_norm" else other  # where all are clipped, Adam does not mind by how much
            assert run({**made, knob.name: other}, workspace).result["validation"] != first[each.name], knob
    assert len(set(first.values())) == len(first), "rows differ"
    plain = run(cell("post_processing"), workspace).result
    other_seed = run(cell("post_processing", seed=1), workspace).result
    other_test = run(cell("post_processing"), replace(workspace, test=workspace.train)).result
    assert other_seed["validation"] != plain["validation"]
    assert other_test["validation"] == plain["validation"]
    assert other_test["test"] != plain["test"]


def test_without_noise_it_is_torch_adam(workspace):
    """The row without privacy, against torch's own optimizer on the same batches and masks."""
    made = cell("non_private_adam", "none", steps=5)
    curve = run(made, workspace).result["curve"]
    key = NoiseKey.from_bytes(hashlib.sha256(b"tinybert 0").digest())
    model = workspace.fresh_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=made["lr"])
    generator = torch.Generator()
    loader = private_loader(
        cast(Any, range(60)), plan_of(made), lengths=workspace.train.lengths, micro_batch_tokens=workspace.part_tokens,
        bucket=64, collate_fn=np.array, key=key, run_id="tinybert",
    )  # fmt: skip
    for step, indices in enumerate(loader):
        secret = key.for_run("tinybert").subkey("masks", str(step))
        generator.manual_seed(int.from_bytes(secret[:8], "little") % 2**63)
        assert len(indices) == 8
        optimizer.zero_grad()
        model(part_of(workspace.train, indices, generator=generator, bucket=64)).mean().backward()
        optimizer.step()
    found = mean_losses(model, workspace.validation, examples=4096, longest=64)["tokens"]
    assert found == pytest.approx(curve[-1][1], abs=2e-4)
    assert found != pytest.approx(curve[-2][1], abs=2e-4)


def test_a_run_is_scored_as_often_and_on_as_many_texts_as_requested(workspace):
    few = dataclasses.replace(workspace, scoring=Scoring(validation_examples=3, test_examples=5, points=2))
    result = run(cell("post_processing", steps=4), few).result
    assert [step for step, _ in result["curve"]] == [2, 4]
    assert result["test_examples"] == 5
    model = workspace.model()
    assert few.validation_loss(model) == mean_losses(model, workspace.validation, examples=3, longest=64)["tokens"]
    assert few.test_losses(model)["test"] == mean_losses(model, workspace.test, examples=5, longest=64)


def test_a_hopeless_tuning_run_is_abandoned(workspace):
    made = cell("post_processing", purpose="tuning", steps=20)
    best = [(step, 0.5) for step in range(1, 21)]
    result = run(made, workspace, beat=best).result
    assert (result["ended"], result["steps_done"]) == ("given up", 10)


def test_the_eps_of_the_scale_follows_the_noise(workspace):
    plan = plan_of(cell("scale_then_privatize"))
    made = optimizer_of(
        cell("scale_then_privatize"), workspace.fresh_model(), plan, key=NoiseKey.from_bytes(bytes(32)), run_id="x"
    )
    assert isinstance(made.geometry, InverseRoot)
    assert made.geometry.eps_scale == pytest.approx(2 * plan.clip_norm * 1.0 / 8)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The table of two places."""
    out = tmp_path_factory.mktemp("tinybert")
    for name in ("post_processing", "independent_moments"):
        arguments = ["--scale", "smoke", "--only", f"row={name}", "--only", "column=independent_low"]
        assert main(["tinybert", *arguments, "--out", str(out)]) == 0
    return out


class TestTable:
    def test_lines_and_page(self, made):
        lines = results_file.read(made / "tinybert.jsonl").lines
        assert [line["cell"]["row"] for line in lines] == ["none", "post_processing", "independent_moments"]
        page = (made / "tinybert.md").read_text()
        found = scores(lines)
        for place, printed in ((("none", "none"), "4.955"), (("post_processing", "independent_low"), "3.251")):
            assert f"{found[place][0]:.3f} ({printed})" in page
        assert "IME is worse than post-processing" in page

    def test_the_page_is_made_from_any_part_of_the_lines(self, made):
        lines = results_file.read(made / "tinybert.jsonl").lines
        for some in (lines[:1], lines[1:2], lines[1:]):
            assert report.markdown(some).startswith("Made by `python -m experiments tinybert --scale smoke`: ")

    def test_the_table_ends_with_the_epsilon_of_each_column_rounded_up(self, made):
        lines = results_file.read(made / "tinybert.jsonl").lines
        shown = report.main_table(lines).splitlines()[-1].split("|")[2:-1]
        told = 0
        for text, kind in zip(shown, ("independent_low", "banded", "independent"), strict=True):
            for exact in {line["epsilon"] for line in lines if line["cell"]["column"] == kind} - {None}:
                assert exact <= float(text) < exact + 1e-4
                told += 1
        assert told
        nothing = report.main_table(lines[:1]).splitlines()[-1]
        assert nothing.count("–") == 3

    def test_resumes_where_it_stopped(self, made, tmp_path):
        path = tmp_path / "tinybert.jsonl"
        before = (made / "tinybert.jsonl").read_text()
        path.write_text(before)
        only = ("row=post_processing", "column=independent_low")
        run_table(Request(scale="smoke", out=tmp_path, only=only), ProgressReporter())
        assert path.read_text() == before
        run_table(Request(scale="smoke", out=tmp_path, only=only, seeds=2), ProgressReporter())
        lines = results_file.read(path).lines
        assert [line["cell"]["seed"] for line in lines[-2:]] == [0, 1]
        assert len(scores(lines)["post_processing", "independent_low"]) == 2

    def test_seeds_apply_to_columns_beyond_the_paper_too(self, made, tmp_path):
        path = tmp_path / "tinybert.jsonl"
        path.write_text((made / "tinybert.jsonl").read_text())
        run_table(Request(scale="smoke", out=tmp_path, only=("column=buffered_10",), seeds=2), ProgressReporter())
        assert set(scores(results_file.read(path).lines)["scale_then_privatize", "buffered_10"]) == {0, 1}

    def test_figures_adds_to_the_results_and_never_overwrites_them(self, made, tmp_path, capsys):
        path = tmp_path / "tinybert.jsonl"
        path.write_text((made / "tinybert.jsonl").read_text())
        arguments = ["figures", "--scale", "smoke", "--out", str(tmp_path)]
        assert main([*arguments, "--overwrite"]) == 2
        assert "use --overwrite with tinybert" in capsys.readouterr().err
        assert path.read_text() == (made / "tinybert.jsonl").read_text()
        assert main([*arguments, "--only", "column=independent_low"]) == 0
        lines = results_file.read(path).lines
        assert [line["cell"]["purpose"] for line in lines[3:]] == ["clip norms"] * 2
        assert (tmp_path / "images" / "figures-clipping.png").exists()

    def test_a_different_model_or_texts_are_refused(self, made, tmp_path, monkeypatch):
        path = tmp_path / "tinybert.jsonl"
        path.write_text((made / "tinybert.jsonl").read_text())
        again = Request(scale="smoke", out=tmp_path, only=("row=post_processing", "column=independent_low"), seeds=2)
        for changed in ("synthetic", "synthetic_corpus"):
            with monkeypatch.context() as patch:
                at = f"experiments.tinybert.{'model' if changed == 'synthetic' else 'experiment'}.{changed}"
                function = models.synthetic if changed == "synthetic" else synthetic_corpus
                patch.setattr(at, functools.partial(function, seed=1))
                with pytest.raises(ValueError, match="a different model or texts"):
                    run_table(again, ProgressReporter())
        assert path.read_text() == (made / "tinybert.jsonl").read_text()

    def test_a_worker_that_dies_ends_the_run(self, workspace, tmp_path, by_fork):
        with workers(workspace, _dies, Unfinished(tmp_path), 2) as pool:
            pool.start(Job(cell("post_processing")))
            with pytest.raises(RuntimeError, match="a worker process has ended"):
                pool.next_finished()

    def test_bad_input_of_a_worker_reaches_the_caller(self, workspace, tmp_path, by_fork):
        with workers(workspace, _refuses, Unfinished(tmp_path), 2) as pool:
            pool.start(Job(cell("post_processing")))
            with pytest.raises(ValueError, match="no such texts"):
                pool.next_finished()

    def test_a_run_is_kept_until_its_line_is_written(self, tmp_path, monkeypatch):
        request = Request(scale="smoke", out=tmp_path, only=("row=post_processing", "column=independent_low"))
        often = functools.partial(Unfinished, every=0.0)
        monkeypatch.setattr("experiments.tinybert.experiment.Unfinished", often)

        def full(path, line, append=results_file.append):
            if line["cell"]["purpose"] == "final":
                raise OSError("disk full")
            append(path, line)

        with monkeypatch.context() as patch:
            patch.setattr(results_file, "append", full)
            with pytest.raises(OSError, match="disk full"):
                run_table(request, ProgressReporter())
        assert len(list(tmp_path.rglob("*.pt"))) == 1
        run_table(replace(request, overwrite=True), ProgressReporter())
        assert not list(tmp_path.rglob("*.pt"))

    def test_several_processes_give_the_same_result(self, made, tmp_path):
        only = ("row=post_processing", "column=independent_low")
        run_table(Request(scale="smoke", out=tmp_path, only=only, workers=2), ProgressReporter())
        here = {line["cell"]["row"]: line["result"]["curve"] for line in _final(made)}
        there = {line["cell"]["row"]: line["result"]["curve"] for line in _final(tmp_path)}
        assert np.allclose(there["post_processing"], here["post_processing"], rtol=1e-5)  # C loops round differently

    def test_missing_data_is_explained(self, tmp_path, capsys):
        assert main(["tinybert", "--scale", "paper", "--out", str(tmp_path)]) == 2
        assert "--data" in capsys.readouterr().err


@pytest.fixture
def by_fork(monkeypatch):
    """Workers that begin at once; fit for those that do not train."""
    monkeypatch.setattr("experiments.tinybert.workers.STARTED_BY", "fork")


def _dies():
    os._exit(3)


def _refuses():
    raise ValueError("no such texts")


def _final(folder):
    return [line for line in results_file.read(folder / "tinybert.jsonl").lines if line["cell"]["purpose"] == "final"]


PAPER = {"post_processing": 3.5, "independent_moments": 3.6, "bias_correction": 3.49, "dp_sgd": 3.7,
         "scale_then_privatize": 3.45, "noiseless": 3.48, "noiseless_scaled": 3.451}  # fmt: skip


def test_claims_of_one_seed_are_margins_without_a_verdict():
    found = {(name, "banded"): {0: loss} for name, loss in (PAPER | {"scale_then_privatize": 3.4}).items()}
    answers = [compared(claim, found, "banded", PAPER) for claim in CLAIMS]
    assert [text for text in answers if text is not None] == [
        "0.090 (0.040)", "0.100 (0.100)", "−0.020 (−0.020)", "−0.051 (−0.001)", "0.200 (0.200)",
    ]  # fmt: skip
    found["post_processing_eps", "banded"] = {0: 3.47}
    answers = [compared(claim, found, "banded", PAPER) for claim in CLAIMS if claim.ours]
    assert answers == ["0.070 (–)", "0.010 (–)", "0.230 (–)"], "the paper has no such row"


def claim_of(*needs):
    (found,) = (claim for claim in CLAIMS if claim.needs == needs)
    return found


def test_claims_of_several_seeds_are_decided_seed_by_seed():
    def answer(worse, better):
        found = {("independent_moments", "x"): worse, ("post_processing", "x"): better}
        return compared(claim_of("independent_moments", "post_processing"), found, "x", PAPER)

    spread_out = {0: 3.0, 1: 3.5, 2: 4.0}
    more = {seed: loss + 0.1 + 0.01 * seed for seed, loss in spread_out.items()}
    assert answer(more, spread_out) == "0.110 ± 0.025 (0.100), holds"
    assert answer(spread_out, more) == "−0.110 ± 0.025 (0.100), fails"
    assert answer({0: 3.1, 1: 3.4, 2: 4.2}, spread_out).endswith(", undecided")
    level = {0: 3.0001, 1: 3.4999, 2: 4.0}
    assert answer(level, spread_out) == "0.000 ± 0.000 (0.100), fails", "where rows are level, neither is ahead"
    assert answer({0: 3.1, 5: 9.0}, spread_out) == "0.100 (0.100)"
    assert answer({5: 9.0}, spread_out) is None
    assert answer({0: math.inf, 1: 3.0}, spread_out) == "a run diverged"


def test_no_better_has_a_small_tolerance():
    def answer(margin):
        found = {("noiseless", "x"): {0: 3.5 + margin, 1: 3.4 + margin}, ("post_processing", "x"): {0: 3.5, 1: 3.4}}
        return compared(claim_of("noiseless", "post_processing"), found, "x", PAPER)

    assert answer(-0.004).endswith(", holds")
    assert answer(-0.006).endswith(", fails")


def test_an_interval_on_both_sides_of_the_bound_decides_nothing():
    found = {("noiseless", "x"): {0: 3.4949, 1: 3.3951}, ("post_processing", "x"): {0: 3.5, 1: 3.4}}
    answer = compared(claim_of("noiseless", "post_processing"), found, "x", PAPER)
    assert answer is not None
    assert answer.endswith(", undecided")


@pytest.mark.parametrize("name", ["post_processing", "independent_moments", "bias_correction", "dp_sgd"])
def test_every_private_row_can_be_the_next(name):
    found = {(row, "x"): {0: loss} for row, loss in (PAPER | {name: 3.46}).items()}
    assert compared(CLAIMS[0], found, "x", PAPER) == "0.010 (0.040)"


def test_runs_of_different_settings_are_not_averaged():
    def line(loss, seed, lr):
        cell = {"purpose": "final", "row": "post_processing", "column": "banded", "seed": seed, "lr": lr}
        return {"cell": cell, "result": {"test": {"tokens": loss}, "ended": "finished"}}

    lines = [line(3.0, 0, 1.0), line(3.1, 1, 1.0), line(4.0, 0, 2.0), line(4.1, 1, 2.0)]
    assert scores(lines)["post_processing", "banded"] == {0: 4.0, 1: 4.1}


def test_the_distance_of_tuning_runs_from_final_runs_is_reported():
    size, shared = SIZES["paper"], {"num_examples": 817_503}
    place = ("scale_then_privatize", "independent")
    setting = first_setting(row(place[0]), place[1])

    def line(cell, curve):
        last = curve[-1][1]
        result = {"curve": curve, "validation": last, "ended": "finished", "test": {"tokens": last}}
        return {"cell": cell, "result": result}

    tuned = line(tuning_cell(place, setting, size, shared), [[100, 4.5], [200, 4.25], [300, 4.0]])
    final = line(final_cell(place, setting, size, shared, 0), [[200, 4.0], [300, 3.875], [400, 3.0]])
    assert how_close([tuned], size) == ""
    said = how_close([tuned, final], size)
    assert "1.000 (independent, σ = 1)" in said
    assert "up to 0.25 in private rows and 0.00 in others" in said
    assert "Behind post-processing" not in said


def test_rows_that_move_between_tuning_and_final_runs_are_reported():
    """DP-SGD is ahead of post-processing in tuning and behind it afterwards; IME stays in place."""
    size, shared, lines = SIZES["paper"], {"num_examples": 817_503}, []
    losses = {"post_processing": (4.0, 3.0, 3.2), "dp_sgd": (3.9, 3.1, 3.4), "independent_moments": (4.5, 3.5, 3.7),
              "scale_then_privatize": (3.9, 3.0, 3.2)}  # fmt: skip
    for name, (tuned, *final) in losses.items():
        place = (name, "independent")
        setting = first_setting(row(name), place[1])
        cells = [tuning_cell(place, setting, size, shared)]
        cells += [final_cell(place, setting, size, shared, seed) for seed in (0, 1)]
        for cell, loss in zip(cells, (tuned, *final), strict=True):
            result = {"curve": [[100, loss]], "validation": loss, "ended": "finished", "test": {"tokens": loss}}
            lines.append({"cell": cell, "result": result})
    expected = "by up to 0.25 (DP-SGD, independent, σ = 1: −0.100 in tuning, 0.150 in the final runs)."
    assert expected in how_close(lines, size)


def test_further_rows_are_next_to_the_rows_they_are_compared_with():
    found = {("delayed", "independent"): {0: 4.1}, ("post_processing", "independent"): {0: 4.125, 1: 4.3},
             ("scale_then_privatize", "buffered_10"): {0: 3.7},
             ("scale_then_privatize", "banded_10"): {0: 3.8}}  # fmt: skip
    lines = [
        {"cell": {"purpose": "final", "row": row, "column": column}, "plan": {"noise_multiplier": 1.5}}
        for row, column in found
    ]
    of_rows, of_noise = report._beyond(lines, found).split("Scale-then-privatize at ε = 10")
    assert of_rows.index("delayed") < of_rows.index("which is p = 0")
    assert "| 0.025 |" in of_rows, "behind by the seeds that both have, not by the means"
    assert of_noise.index("BLT | 1.5 | 3.700") < of_noise.index("BandMF, b = 128 | 1.5 | 3.800")
    assert report._beyond(lines, {("post_processing", "independent"): {0: 4.2}}) == ""


def test_the_table_has_all_cells_of_the_paper():
    assert len(places(beyond=False)) == 2 + 8 * 3
    ours = {name for name, k in places(beyond=False) for kind in COLUMNS if kind.name == k and name not in kind.paper}
    assert ours == {"non_private_sgd", "non_private_adam", "post_processing_eps"}
    assert math.isclose(sum(kind.paper.get("dp_sgd", 0) for kind in COLUMNS), 3.373 + 3.605 + 3.726)


def test_runs_in_both_precisions_are_compared_and_the_later_counts():
    def line(loss, **changes):
        place = {"purpose": "final", "row": "dp_sgd", "column": "banded"}
        made = {**place, "seed": 0, "lr": 1.0, "momentum": 0.9, **changes}
        return {"cell": made, "result": {"test": {"tokens": loss}, "ended": "finished"}}

    lines = [line(3.5), line(3.2, seed=1), line(3.51, dtype="bfloat16"), line(9.0, dtype="bfloat16", seed=2)]
    assert report._in_both_precisions(lines[:2]) == ""
    said = report._in_both_precisions(lines)
    assert said.startswith("1 of these runs")
    assert said.endswith("differ by +0.0100 to +0.0100.")
    assert scores(lines)["dp_sgd", "banded"] == {0: 3.51, 1: 3.2, 2: 9.0}
