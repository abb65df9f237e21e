"""Every example runs on tiny models and files, and prints its options with --help."""

from __future__ import annotations

import copy
import csv
import json
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from peft import AutoPeftModelForSequenceClassification

import dpoptim
from tests.app import tiny
from tests.distributed.launch import accelerate_launch, torchrun

IMPORT = "from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer"
EXAMPLES = Path(__file__).parents[1] / "examples"
TRAINERS = ["bert_masked_lm", "gpt2_causal_lm", "text_classification", "lora_classification"]
STEPS = ["--max_steps", "3", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
PRIVACY = ["--epsilon", "8", "--delta", "1e-3"]
TEXTS = [text for text in tiny.TEXTS if text] * 3
OTHERS = [f"{text} and the dog" for text in tiny.TEXTS if text]
LABELS = ["bad", "good"]

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs an example in this process, in an empty folder, and returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def run_example(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    yield run_example
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def texts_for(name: str) -> list[str]:
    return OTHERS if name.startswith("held_out") else TEXTS


def text_file(folder: Path, name: str = "train.txt") -> str:
    (folder / name).write_text("\n".join(texts_for(name)), encoding="utf-8")
    return str(folder / name)


def labelled_file(folder: Path, name: str) -> str:
    rows = [{"text": text, "label": LABELS[number % 2]} for number, text in enumerate(texts_for(name))]
    if name.endswith(".jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)
    return str(folder / name)


def bert(folder: Path, kind: Any) -> str:
    torch.manual_seed(0)
    words = tiny.wordpiece()
    return tiny.saved(folder / "model", kind(tiny.bert_config(len(words))), words)


def trainer_flags(folder: Path) -> list[str]:
    return ["--output_dir", str(folder / "out"), "--use_cpu", "--report_to", "none", *STEPS, *PRIVACY]


def check_output(folder: Path, printed: str) -> None:
    out = folder / "out"
    (key,) = (folder / "out.secret").glob("*.key")
    assert key.stat().st_mode & 0o777 == 0o600
    assert not list(out.rglob("*.key")), "nothing secret in what people upload"
    assert "train_loss" not in json.loads((out / "train_results.json").read_text())
    assert "8" in printed
    assert "1e-03" in printed or "0.001" in printed


def test_bert_masked_lm(run: Run, tmp_path: Path) -> None:
    model = bert(tmp_path, transformers.BertForMaskedLM)
    train, held_out = text_file(tmp_path), text_file(tmp_path, "held_out.txt")
    flags = ["--model_name_or_path", model, "--train_file", train, "--validation_file", held_out]
    check_output(tmp_path, run("bert_masked_lm", *flags, *trainer_flags(tmp_path)))
    trained = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    before = transformers.AutoModelForMaskedLM.from_pretrained(model)
    assert not torch.equal(
        trained.bert.embeddings.word_embeddings.weight, before.bert.embeddings.word_embeddings.weight
    )
    assert json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_loss"] > 0


def test_gpt2_causal_lm(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pieces = tiny.bytepair()
    model = tiny.saved(tmp_path / "model", transformers.GPT2LMHeadModel(tiny.gpt2_config(len(pieces))), pieces)
    train, held_out = labelled_file(tmp_path, "train.jsonl"), labelled_file(tmp_path, "held_out.jsonl")
    flags = ["--model_name_or_path", model, "--train_file", train, "--validation_file", held_out]
    flags += ["--max_seq_length", "32"]
    check_output(tmp_path, run("gpt2_causal_lm", *flags, *trainer_flags(tmp_path)))
    assert json.loads((tmp_path / "out" / "eval_results.json").read_text())["perplexity"] > 1


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_text_classification(run: Run, tmp_path: Path, ending: str) -> None:
    model = bert(tmp_path, transformers.BertForSequenceClassification)
    train, held_out = labelled_file(tmp_path, f"train.{ending}"), labelled_file(tmp_path, f"held_out.{ending}")
    flags = ["--model_name_or_path", model, "--train_file", train, "--validation_file", held_out]
    more = ["--variant", "bias_correction", "--sampling", "shuffled"]
    printed = run("text_classification", *flags, "--labels", *LABELS, *more, *trainer_flags(tmp_path))
    check_output(tmp_path, printed)
    assert 0 <= json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_accuracy"] <= 1
    trained = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert trained.config.id2label == {0: "bad", 1: "good"}


def test_lora_classification(run: Run, tmp_path: Path) -> None:
    model = bert(tmp_path, transformers.BertForSequenceClassification)
    train = labelled_file(tmp_path, "train.csv")
    flags = ["--model_name_or_path", model, "--train_file", train, "--labels", *LABELS, "--rank", "2"]
    printed = run("lora_classification", *flags, *trainer_flags(tmp_path))
    check_output(tmp_path, printed)
    adapted = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out")
    trained = [value for name, value in adapted.named_parameters() if "lora_B" in name]
    assert trained
    assert all(value.abs().sum() > 0 for value in trained)  # they start at 0


def test_synthetic_text(run: Run, tmp_path: Path) -> None:
    printed = run("synthetic_text", "--output_dir", "out", "--reviews", "64", "--steps", "2", "--epsilon", "5")
    assert "Differentially private: epsilon = 5.0000" in printed
    assert "accuracy on real reviews (not private): {'synthetic': " in printed
    rows = [json.loads(line) for line in (tmp_path / "out" / "synthetic.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == ["bad", "good"] * 200


def test_accelerate_loop(run: Run, tmp_path: Path) -> None:
    model = bert(tmp_path, transformers.BertForSequenceClassification)
    train = labelled_file(tmp_path, "train.csv")
    flags = ["--model_name_or_path", model, "--train_file", train, "--validation_file", train, "--output_dir", "out"]
    sizes = ["--batch_size", "4", "--micro_batch_size", "2", "--max_train_steps", "3", "--cpu"]
    printed = run("accelerate_loop", *flags, "--labels", *LABELS, *sizes, *PRIVACY)
    assert "on data that the guarantee does not cover" in printed
    trained = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    before = transformers.AutoModelForSequenceClassification.from_pretrained(model)
    assert not torch.equal(trained.classifier.weight, before.classifier.weight)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", ["text_classification", "accelerate_loop"])
def test_two_processes(tmp_path: Path, name: str, sharded: bool, launcher: str) -> None:
    model = bert(tmp_path, transformers.BertForSequenceClassification)
    train, held_out = labelled_file(tmp_path, "train.csv"), labelled_file(tmp_path, "held_out.csv")
    flags = ["--model_name_or_path", model, "--train_file", train, "--validation_file", held_out, "--labels", *LABELS]
    sizes = ["--batch_size", "4", "--micro_batch_size", "2", "--max_train_steps", "3", "--cpu"]
    more = [*sizes, *PRIVACY, "--output_dir", "out"] if name == "accelerate_loop" else trainer_flags(tmp_path)
    start = [str(EXAMPLES / f"{name}.py")]
    start = ["-m", "tests.distributed.fsdp_on_cpu", *start] if sharded else start
    if launcher == "torchrun":
        fsdp: dict[str, Any] = {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        }
        done = torchrun(*start, *flags, *more, cwd=tmp_path, **(fsdp if sharded else {}))
    else:
        done = accelerate_launch(*start, *flags, *more, sharded=sharded, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if name == "text_classification":
        check_output(tmp_path, done.stdout)
        measured = json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_accuracy"]
    else:
        assert done.stdout.count("on data that the guarantee does not cover") == 1
        measured = float(done.stdout.split("accuracy ")[1].split(",")[0])
    trained = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = [int(trained(**words(text, return_tensors="pt")).logits.argmax()) for text in OTHERS]
    accuracy = sum(label == number % 2 for number, label in enumerate(found)) / len(found)
    assert measured == pytest.approx(accuracy, abs=1e-3)


def test_lightning_module(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    generator = torch.Generator().manual_seed(0)
    lines = ["a,b,c,label"]
    for number in range(40):
        values = torch.randn(3, generator=generator) + 2.0 * (number % 2)
        lines.append(",".join([*(f"{value:.3f}" for value in values.tolist()), ("no", "yes")[number % 2]]))
    (tmp_path / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    flags = ["--train_file", "rows.csv", "--labels", "no", "yes", "--batch_size", "10", "--max_steps", "6"]
    printed = run("lightning_module", *flags, *PRIVACY)
    assert "6 steps" in printed
    saved = torch.load(tmp_path / "classifier.pt", weights_only=True)
    assert saved["0.weight"].shape == (64, 3)


def lightning_fit(steps: int, **settings: Any) -> tuple[Any, Any]:
    """Train the example's module with Lightning, and a copy in a plain loop; no noise, and all 20 rows in each step."""
    lightning = pytest.importorskip("lightning")
    kind = runpy.run_path(str(EXAMPLES / "lightning_module.py"))["PrivateClassifier"]
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(20, 3, generator=generator), torch.arange(20) % 2)
    plan = dpoptim.PrivacyPlan(num_examples=20, batch_size=20, steps=steps, clip_norm=0.1, noise_multiplier=0.0)
    torch.manual_seed(1)
    module = kind(plan, columns=3, labels=2, lr=1e-2)
    plain = copy.deepcopy(module.layers)
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(module, train_dataloaders=dpoptim.private_loader(data, plan))
    plan = plan.replace()
    optimizer = dpoptim.scale_then_privatize(plain, plan, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for rows, labels in dpoptim.private_loader(data, plan):
        torch.nn.functional.cross_entropy(plain(rows), labels, reduction="none").sum().backward()
        optimizer.step()
        schedule.step()
    return module, plain


def test_lightning_matches_a_plain_loop() -> None:
    module, plain = lightning_fit(steps=4)
    assert module.optimizers().optimizer.mechanism.step == 4
    for one, other in zip(module.layers.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_accumulation_by_lightning_is_refused() -> None:
    with pytest.raises(ValueError, match="before optimizer"):
        lightning_fit(steps=4, accumulate_grad_batches=2)


@pytest.mark.parametrize("name", [*TRAINERS, "accelerate_loop", "lightning_module"])
def test_help(run: Run, capsys: pytest.CaptureFixture[str], name: str) -> None:
    if name == "lightning_module":
        pytest.importorskip("lightning")
    with pytest.raises(SystemExit) as ended:
        run(name, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--train_file" in shown
    assert "--epsilon" in shown


@pytest.mark.parametrize("name", TRAINERS)
def test_three_changes_make_a_stock_script_private(name: str) -> None:
    """Undoing the marked changes (import, flags, trainer, statement) leaves a script that does not mention dpoptim."""
    source = (EXAMPLES / f"{name}.py").read_text()
    stock = source
    for private, plain in (
        (f"{IMPORT}  # <-- replaces transformers.Trainer\n", ""),
        ("    # <-- PrivacyArguments adds --epsilon, --delta and the other privacy options\n", ""),
        ("    data, args, privacy =", "    data, args ="),
        ("TrainingArguments, PrivacyArguments)", "TrainingArguments)"),
        ("PrivateTrainer(  # <--", "Trainer("),
        ("        privacy=privacy,  # <--\n", ""),
        ("    print(trainer.plan.statement())\n", ""),
    ):
        assert stock.count(private) == 1, private
        stock = stock.replace(private, plain)
    _, code = stock.split("from __future__", 1)
    assert not {"dpoptim", "PrivateTrainer", "PrivacyArguments", "privacy", "plan"} & set(re.findall(r"\w+", code))
    assert len(source.splitlines()) < 120
