"""`dpoptim advise` as people call it: text, JSON, plot, models, probe and mistakes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import dpoptim
from dpoptim import NoiseMemory, PrivacyPlan, theory
from dpoptim.app.cli import main
from dpoptim.app.cli.advise import model_size, typed_count
from dpoptim.app.models.loading import task_of_model
from dpoptim.integrations.losses import Task
from dpoptim.optim.geometries import InverseRoot
from tests.app.runs import COLUMN_FLAGS, write_rows

DEFAULTS = ["--steps", "60", "--batch-size", "100", "--num-examples", "2000", "--epsilon", "4", "--delta", "1e-6"]
TRAINING = [*DEFAULTS, "--sampling", "shuffled", "--clip-norm", "1"]
SMALL = ["advise", "10k", *TRAINING]
PLAN = PrivacyPlan(num_examples=2000, batch_size=100, steps=60)
SENTENCE = "noise is added to the clipped gradient of every private record and a public one needs none"
WORDS = SENTENCE.split()


def printed(capsys, arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


class AdviseOnce:
    """Computes each advice once, whoever asks for it."""

    def __init__(self) -> None:
        self.found: dict[str, theory.Advice] = {}

    def __call__(self, plan: PrivacyPlan, *, progress: Any = lambda _: None, **settings: Any) -> theory.Advice:
        settings = {
            "signal": None,
            "beta1": 0.9,
            "beta2": 0.999,
            "memory_budget": None,
            "memory": NoiseMemory(bits=32),
            **settings,
        }
        asked = repr((plan, sorted(settings.items())))
        if asked not in self.found:
            self.found[asked] = theory.advise(plan, progress=progress, **settings)
        return self.found[asked]


@pytest.fixture(scope="module", autouse=True)
def advise_once() -> Iterator[AdviseOnce]:
    with pytest.MonkeyPatch.context() as patch:
        once = AdviseOnce()
        patch.setattr("dpoptim.app.cli.advise.advise", once)
        yield once


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """A saved BERT of two layers with its tokenizer."""
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


def test_json_holds_the_advice(capsys, advise_once):
    found = json.loads(printed(capsys, [*SMALL, "--json"]))
    advice = advise_once(PLAN, epsilon=4.0, delta=1e-6, parameters=10_000)
    assert found["variant"] == advice.variant
    assert found["noise_multiplier"] == advice.plan.noise_multiplier
    assert found["noise_variance"] == advice.noise_variance
    assert found["negative_fraction"] == advice.negative_fraction
    assert found["window"]["eps_scale"] == [advice.window.low, advice.window.high]
    assert found["try"]["eps_scale"] == list(advice.window.to_try)
    assert found["try"]["eps_scale_is"] == [advice.window.place(value) for value in advice.window.to_try]
    assert found["signal"]["measured"] is False
    assert [one["norm"] for one in found["assumptions"]] == [0.03, 0.1, 0.3]
    assert [one["snr"] for one in found["assumptions"]] == [one.snr for one in advice.assumptions]
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


def test_answer_comes_first_and_verbose_explains_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, SMALL).splitlines()
    assert lines[0].startswith("Use scale_then_privatize with ")
    assert sum(-(-len(line) // 80) or 1 for line in lines) <= 24, "one screenful"
    text = " ".join(" ".join(lines).split())
    assert "scale_then_privatize: for averaged gradients of 0.03 to 0.3 clip norms, noise adds" in text
    assert "gradients ASSUMED" in text
    assert "too narrow to hold a value" in text
    text = " ".join(printed(capsys, [*SMALL, "--verbose"]).split())
    for words in (
        "window of eps_scale",
        "negative by bias correction",
        "if gradients are 0.03",
        "to try",
        "epsilon*",
        "Evidence: in the paper",
        "closed form (Balle and Wang 2018)",
        "CyclicPoisson",
        "normals per step",
    ):
        assert words in text
    assert text.count("nu collapses") == 1


def test_a_hopeless_run_is_called_so(capsys):
    text = " ".join(printed(capsys, ["advise", "4.4M", *SMALL[2:]]).split())
    assert "outlook: hopeless: the noise of the whole run is" in text
    assert "trained parameters (a smaller model, LoRA, frozen layers)." in text


def test_values_to_try_are_marked(capsys, advise_once):
    text = " ".join(printed(capsys, ["advise", "300", *TRAINING, "--verbose"]).split())
    window = advise_once(PLAN, epsilon=4.0, delta=1e-6, parameters=300).window
    assert {window.place(value) for value in window.to_try} == {"in if examples agree", "above"}
    assert f"{window.to_try[0]:.6g} (in the window if examples agree)" in text
    assert f"{window.to_try[-1]:.6g} (above the window)" in text
    assert "too narrow" not in text


@pytest.mark.slow
def test_tiny_epsilon_prints_every_mechanism(capsys):
    """The accountant may return 0, within its tolerance."""
    found = printed(capsys, [*SMALL, "--verbose", "--epsilon", "1e-6"])
    assert found.count("BufferedToeplitz(buffers=") >= 3
    assert "- ASSUMED" in found
    assert printed(capsys, ["plan", *DEFAULTS, "--epsilon", "1e-6"])


def test_nothing_is_printed_if_a_part_fails(capsys, monkeypatch):
    def fails(epsilon):
        raise ValueError("math domain error")

    monkeypatch.setattr("dpoptim.app.cli.plan.format_bytes", fails)
    assert main([*SMALL, "--verbose"]) == 2
    assert capsys.readouterr().out == ""
    assert main(["plan", *DEFAULTS]) == 2
    assert capsys.readouterr().out == ""


def test_large_epsilon_skips_secret_sampling(capsys):
    text = " ".join(printed(capsys, [*SMALL, "--verbose", "--epsilon", "1e6"]).split())
    assert "The other sampling is not compared: Expected epsilon with secret sampling <= 100" in text
    assert "CyclicPoisson(" not in text


def test_printed_code_runs(capsys):
    lines = printed(capsys, [*SMALL, "--clip-norm", "0.5"]).splitlines()
    names: dict[str, Any] = {name: getattr(dpoptim, name) for name in dpoptim.__all__}
    names["PrivacyPlan"] = lambda *_, **given: PrivacyPlan(num_examples=2000, batch_size=100, steps=60, **given)
    names["model"] = torch.nn.Linear(3, 1)
    (plan_line,) = [line.partition(" = ")[2] for line in lines if line.startswith("  plan = ")]
    (optimizer_line,) = [line.partition(" = ")[2] for line in lines if line.startswith("  optimizer = ")]
    names["plan"] = eval(plan_line.replace("..., ", ""), names)
    assert names["plan"].clip_norm == 0.5
    assert names["plan"].epsilon() <= 4.0
    optimizer = eval(optimizer_line.replace("lr=...", "lr=0.1"), names)
    assert isinstance(optimizer, dpoptim.PrivateOptimizer)


def test_printed_command_trains_as_advised(capsys, tmp_path):
    """A dry run of the printed command has the advised settings; tables have a larger clip norm by default."""
    data, parameters = write_rows(tmp_path / "rows.csv"), 290
    sizes = ["--steps", "20", "--batch-size", "16", "--epsilon", "4", "--delta", "1e-4"]
    found = json.loads(printed(capsys, ["advise", str(parameters), "--num-examples", "120", *sizes, "--json"]))
    given = shlex.split(found["train"].replace("MODEL", "mlp").replace("DATA", data))
    assert given[:2] == ["dpoptim", "train"]
    whole = ["--validation-fraction", "0", "--dry-run", "--json"]
    followed = json.loads(printed(capsys, [*given[1:], *COLUMN_FLAGS, *whole]))
    train = ["train", "--model", "mlp", "--data", data, "--clip-norm", "0.1"]
    default = json.loads(printed(capsys, [*train, *COLUMN_FLAGS, *sizes, *whole]))
    for run in (followed, default):
        assert run["trained_parameters"] == found["parameters"] == parameters
        assert run["noise_multiplier"] == found["noise_multiplier"]
        assert run["recipe"]["clip_norm"] == found["clip_norm"] == 0.1
        assert repr(PrivacyPlan.from_dict(run["plan"]).sampling) == found["sampling"]
    assert followed["recipe"]["variant"] == found["variant"]
    plan = PrivacyPlan.from_dict(followed["plan"])
    scale = dpoptim.scale_then_privatize(torch.nn.Linear(3, 1), plan, lr=1.0).geometry
    assert isinstance(scale, InverseRoot)
    assert scale.eps_scale == pytest.approx(found["window"]["default"], rel=1e-6)


def test_printed_command_names_model_and_adjacency(capsys, bert):
    change = ["--sampling", "poisson", "--adjacency", "add-remove"]
    text = printed(capsys, ["advise", str(bert), *TRAINING, *change])
    (line,) = [line for line in text.splitlines() if line.startswith("  dpoptim train ")]
    assert f"--model {bert} --data DATA --epsilon 4.0 --delta 1e-06 --steps 60 --batch-size 100 " in line
    assert "--clip-norm 1.0 --sampling poisson --noise independent " in line
    assert line.endswith("--adjacency add-remove --num-examples 2000")


def test_poisson_and_other_betas(capsys):
    change = ["--sampling", "poisson", "--betas", "0.9", "0.9", "--noise-bits", "16", "--json"]
    found = json.loads(printed(capsys, [*SMALL, *change]))
    assert "--betas 0.9 0.9" in found["train"]
    assert found["sampling"].startswith(("CyclicPoisson", "Poisson"))
    assert {row["sampling"] for row in found["mechanisms"]} >= {"Shuffled()"}
    first, last = found["forecasts"][0], found["forecasts"][-1]
    assert first["negative_bias_correction"] > last["negative_bias_correction"]


def test_plot_shows_the_window(capsys, tmp_path):
    target = tmp_path / "advice.svg"
    printed(capsys, [*SMALL, "--plot", str(target)])
    for words in ("bias correction", "to try", "ν̂ diverges"):
        assert words in target.read_text()


def test_parameters_are_counted_from_the_configuration_alone(tmp_path, bert):
    config = transformers.BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        architectures=["BertForMaskedLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert model_size(str(tmp_path), task=Task.MASKED_LM) == (4_416_698, "BertForMaskedLM")  # BERT-Tiny, tied
    config.architectures = None
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not name its task .*one of masked-lm"):
        task_of_model(str(tmp_path))
    assert model_size(str(tmp_path), task=Task.MASKED_LM)[0] == 4_416_698
    config.num_labels = 5
    config.save_pretrained(tmp_path)
    classifier = transformers.AutoModelForSequenceClassification.from_config(config)
    counted = (sum(p.numel() for p in classifier.parameters()), "BertForSequenceClassification")
    assert model_size(str(tmp_path), task=Task.TEXT_CLASSIFICATION) == counted
    (tmp_path / "gpt2").mkdir()
    transformers.GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path / "gpt2")
    assert model_size(str(tmp_path / "gpt2"), task=Task.CAUSAL_LM)[0] == 124_439_808
    made = transformers.AutoModelForMaskedLM.from_pretrained(bert)
    assert model_size(str(bert), task=Task.MASKED_LM)[0] == sum(p.numel() for p in made.parameters())


def test_counted_class_is_printed(capsys, bert):
    assert "parameters of BertForMaskedLM;" in printed(capsys, ["advise", str(bert), *TRAINING])
    task = ["--task", "text-classification", "--json"]
    found = json.loads(printed(capsys, ["advise", str(bert), *TRAINING, *task]))
    assert found["counted"] == "BertForSequenceClassification"


def test_probe_measures_gradients(capsys, bert, public_texts, advise_once):
    probe = ["--probe", str(public_texts), "--probe-examples", "16"]
    assert main(["advise", str(bert), *TRAINING, *probe, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("you declare the examples of --probe PUBLIC") == 1
    assert "Loading weights" not in captured.err
    found = json.loads(captured.out)
    signal = found["signal"]
    assert (signal["measured"], signal["examples"]) == (True, 16)
    assert found["parameters"] == model_size(str(bert), task=Task.MASKED_LM)[0]
    assert 0 < signal["norm"] < 1
    assert len(signal["squares"]) > 10
    assert found["notes"][0].startswith("MEASURED on 16 public examples")
    before = len(advise_once.found)
    text = " ".join(printed(capsys, ["advise", str(bert), *TRAINING, *probe, "--verbose"]).split())
    assert len(advise_once.found) == before  # the same signal again: masks and dropout come from a seed
    assert "gradients measured" in text
    assert "signal in an update" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--steps", "0"], "Expected steps to be a whole number >= 1, got 0"),
        (["--epsilon", "inf"], "Expected --epsilon > 0, got inf"),
        (["--delta", "2"], "Expected --delta > 0 and < 1, got 2.0"),
        (["--clip-norm", "0"], "Expected clip_norm >= 1e-12"),
        (["--steps", "1e6", "--num-examples", "1e8"], "Expected steps <= the limit, got 1000000 > 100000"),
        (["--text-column", "text"], "--text-column needs --probe"),
        (["--betas", "0.9", "1"], "Expected beta2 >= 0 and < 1, got 1.0"),
        (["--plot", "none/advice.png"], "the folder none does not exist"),
        (["--probe", "public.txt", "--task", "masked-lm"], "is a number; give a folder or a name"),
    ],
)
def test_mistakes_print_one_line(capsys, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    refused_in_one_line(capsys, [*SMALL, *change], words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("0", "'0' is neither a number of parameters"),
        ("-5", "is neither a number of parameters, such as 4.4M, nor"),
        ("mlp", "depends on the columns of the data; give a number"),
        ("./missing", "does not exist"),
        ("empty", "config.json"),
        ("broken", "'broken' cannot be loaded"),
        ("nobody/no-such-model", "is not a folder here, and the Hugging Face hub did not provide it"),
        ("9/no-such-model", "hub did not provide it"),
    ],
)
def test_unreadable_models_are_refused(capsys, tmp_path, monkeypatch, model, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    refused_in_one_line(capsys, ["advise", model, *TRAINING], words)


def test_unusable_probes_are_refused(capsys, tmp_path, bert, public_texts):
    few = tmp_path / "few.txt"
    few.write_text("noise\nis\n")
    base = ["advise", str(bert), *TRAINING]
    refused_in_one_line(capsys, [*base, "--probe", str(few), "--task", "masked-lm"], "has 2 records")
    missing = [*base, "--probe", str(tmp_path / "no.txt"), "--task", "masked-lm"]
    refused_in_one_line(capsys, missing, "does not exist")
    refused_in_one_line(capsys, [*missing, "--probe-examples", "4"], "too few")
    too_long = [*base, "--probe", str(public_texts), "--task", "masked-lm", "--max-length", "900"]
    refused_in_one_line(capsys, too_long, "900")


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"'some/model' needs .*transformers"):
        model_size("some/model", task=Task.MASKED_LM)
    assert typed_count("4.4M") == 4_400_000
    assert typed_count("gpt2") is None
    assert model_size("small-cnn", task=Task.IMAGE_CLASSIFICATION)[1] == "SmallCNN"


def refused_in_one_line(capsys, arguments, words):
    """One line of error, after the note on public examples, and nothing on standard output."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *before, last = captured.err.strip().splitlines()
    assert last.startswith("dpoptim: ")
    assert words in last
    assert all(line.startswith("note: ") for line in before)
