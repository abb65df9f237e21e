"""`dpoptim advise` from the outside: table, JSON, picture, models, probe, help and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import dpoptim
from dpoptim import PrivacyPlan, theory
from dpoptim.cli import main, model_size
from dpoptim.cli.model_size import parameter_count

TRAINING = ["--steps", "60", "--batch-size", "100", "--num-examples", "2000", "--epsilon", "4", "--delta", "1e-6"]
SMALL = ["advise", "10k", *TRAINING]
PLAN = PrivacyPlan(num_examples=2000, batch_size=100, steps=60)
SENTENCE = "noise is added to the clipped gradient of every private record and a public one needs none"
WORDS = SENTENCE.split()


def printed(capsys, arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A BERT of two layers with its tokenizer, saved."""
    folder = tmp_path_factory.mktemp("bert")
    special = ["[PAD]", "[UNK]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def public_texts(tmp_path) -> Path:
    path = tmp_path / "public.txt"
    path.write_text("\n".join(" ".join(WORDS[i % 7 : 7 + i % 9]) for i in range(60)))
    return path


def test_json_is_the_advice(capsys):
    found = json.loads(printed(capsys, [*SMALL, "--json"]))
    advice = theory.advise(PLAN, epsilon=4.0, delta=1e-6, parameters=10_000)
    assert found["variant"] == advice.variant
    assert found["noise_multiplier"] == advice.plan.noise_multiplier
    assert found["noise_variance"] == advice.noise_variance
    assert found["negative_fraction"] == advice.negative_fraction
    assert found["window"]["eps_scale"] == [advice.window.low, advice.window.high]
    assert found["try"]["eps_scale"] == list(advice.window.to_try)
    assert found["signal"]["measured"] is False
    assert [row["step"] for row in found["forecasts"]][-1] == 60
    assert (found["epsilon"], found["delta"], found["parameters"]) == (4.0, 1e-6, 10_000)
    for row in found["mechanisms"]:
        assert {"name", "sampling", "adjacency", "accountant", "noise_multiplier", "rmse_mean", "memory_bytes"} < set(
            row
        )
        assert row["epsilon"] <= 4.0
    (chosen,) = [row for row in found["mechanisms"] if row["chosen"]]
    assert chosen["name"] == found["mechanism"]
    assert chosen["epsilon_at_chosen_error"] == pytest.approx(chosen["epsilon"])


def test_the_table_says_what_why_and_what_to_try(capsys):
    text = " ".join(printed(capsys, SMALL).split())
    for words in (
        "Use scale_then_privatize: noise adds",
        "ASSUMED",
        "window of eps_scale",
        "negative by bias correction",
        "to try",
        "epsilon*",
        "Evidence: in the paper",
        "closed form (Balle and Wang 2018)",
        "CyclicPoisson",
    ):
        assert words in text


def test_what_is_printed_to_be_typed_trains(capsys):
    """Plan and optimizer as printed, with a clip norm that is not the default."""
    lines = printed(capsys, [*SMALL, "--clip-norm", "0.5"]).splitlines()
    names = {**vars(dpoptim), "PrivacyPlan": lambda *_, **given: PrivacyPlan(
        num_examples=2000, batch_size=100, steps=60, **given), "model": torch.nn.Linear(3, 1)}  # fmt: skip
    (plan_line,) = [line.partition(" = ")[2] for line in lines if line.startswith("  plan = ")]
    (optimizer_line,) = [line.partition(" = ")[2] for line in lines if line.startswith("  optimizer = ")]
    names["plan"] = eval(plan_line.replace("..., ", ""), names)
    assert names["plan"].clip_norm == 0.5
    assert names["plan"].epsilon() <= 4.0
    optimizer = eval(optimizer_line.replace("lr=...", "lr=0.1"), names)
    assert isinstance(optimizer, dpoptim.PrivateOptimizer)


def test_poisson_and_other_betas(capsys):
    found = json.loads(printed(capsys, [*SMALL, "--sampling", "poisson", "--beta2", "0.9", "--bits", "16", "--json"]))
    assert found["sampling"].startswith(("CyclicPoisson", "Poisson"))
    assert {row["sampling"] for row in found["mechanisms"]} >= {"Shuffled()"}
    first, last = found["forecasts"][0], found["forecasts"][-1]
    assert first["negative_bias_correction"] > last["negative_bias_correction"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture(capsys, tmp_path, suffix):
    target = tmp_path / f"advice.{suffix}"
    printed(capsys, [*SMALL, "--plot", str(target)])
    assert target.stat().st_size > 10_000
    if suffix == "svg":
        text = target.read_text()
        for words in ("bias correction", "to try", "variance φ of the noise", "BufferedToeplitz(buffers=2)"):
            assert words in text


def test_parameters_are_counted_from_the_configuration_alone(tmp_path, bert):
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        architectures=["BertForMaskedLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert parameter_count(str(tmp_path)) == 4_416_698  # BERT-Tiny with its tied head
    config.architectures = None
    config.save_pretrained(tmp_path)
    assert parameter_count(str(tmp_path)) == 4_385_920
    (tmp_path / "gpt2").mkdir()
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "gpt2")
    assert parameter_count(str(tmp_path / "gpt2")) == 124_439_808
    made = transformers.AutoModelForMaskedLM.from_pretrained(bert)
    assert parameter_count(str(bert)) == sum(p.numel() for p in made.parameters())


def test_a_probe_measures(capsys, bert, public_texts):
    probe = ["--probe", str(public_texts), "--task", "masked-lm", "--probe-examples", "48"]
    found = json.loads(printed(capsys, ["advise", str(bert), *TRAINING, *probe, "--json"]))
    signal = found["signal"]
    assert (signal["measured"], signal["examples"]) == (True, 48)
    assert found["parameters"] == parameter_count(str(bert))
    assert 0 < signal["norm"] < 1
    assert len(signal["squares"]) > 10
    assert found["notes"][0].startswith("MEASURED on 48 public examples")
    again = json.loads(printed(capsys, ["advise", str(bert), *TRAINING, *probe, "--json"]))
    assert again["signal"] == signal  # masks and dropout come from a seed
    text = " ".join(printed(capsys, ["advise", str(bert), *TRAINING, *probe]).split())
    assert "gradients measured" in text
    assert "signal in an update" in text


def test_the_help_says_that_the_probe_must_be_public():
    helped = subprocess.run(
        [sys.executable, "-m", "dpoptim", "advise", "--help"], capture_output=True, text=True, check=True
    )
    text = " ".join(helped.stdout.split())
    for words in ("They must be public", "examples:", "--probe DATA", "4.4M", "an empirical matter"):
        assert words in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--steps", "0"], "steps must be a whole number ≥ 1"),
        (["--epsilon", "inf"], "--epsilon inf must be a finite number above 0"),
        (["--delta", "2"], "delta must be a number strictly between 0 and 1"),
        (["--clip-norm", "0"], "clip_norm must be a number > 0"),
        (["--beta2", "1"], "beta2=1.0 must lie in [0, 1)"),
        (["--plot", "none/advice.png"], "there is no folder none"),
        (["--probe", "public.txt", "--task", "masked-lm"], "is a number; give a folder or a name"),
    ],
)
def test_mistakes_are_one_line(capsys, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    told_in_one_line(capsys, [*SMALL, *change], words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("0", "must be at least one parameter"),
        ("./missing", "does not exist"),
        ("empty", "folder without config.json"),
        ("broken", "config.json cannot be read"),
        ("nobody/no-such-model", "hub did not give it"),
    ],
)
def test_models_that_cannot_be_read(capsys, tmp_path, monkeypatch, model, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    told_in_one_line(capsys, ["advise", model, *TRAINING], words)


def test_probes_that_cannot_run(capsys, tmp_path, bert, public_texts):
    few = tmp_path / "few.txt"
    few.write_text("noise\nis\n")
    base = ["advise", str(bert), *TRAINING]
    told_in_one_line(capsys, [*base, "--probe", str(public_texts)], "--probe needs --task")
    told_in_one_line(capsys, [*base, "--probe", str(few), "--task", "masked-lm"], "has 2 records")
    missing = [*base, "--probe", str(tmp_path / "no.txt"), "--task", "masked-lm"]
    told_in_one_line(capsys, missing, "does not exist")
    told_in_one_line(capsys, [*missing, "--probe-examples", "4"], "too few")


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="needs transformers"):
        parameter_count("some/model")
    assert model_size.is_number("4.4M")
    assert parameter_count("4.4M") == 4_400_000


def told_in_one_line(capsys, arguments, words):
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.strip().splitlines()) == 1
