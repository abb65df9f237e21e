"""Synthetic texts: their sampling, their files, which continue exactly, and what is refused."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from dpoptim.app import Recipe, generate, load_trained, train
from dpoptim.app.cli import main
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.synthetic.rows import Rows
from dpoptim.app.synthetic.sampling import Sampler, draw, uniforms
from tests.app import tiny
from tests.app.runs import StopAfter

TEMPLATE = "A {label} review:"
SHORT: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs on labelled texts (a whole model), on chats (LoRA) and on plain texts."""
    folder = tmp_path_factory.mktemp("generate")
    rows = [{"text": text, "label": label} for text, label in zip(tiny.TEXTS, tiny.LABELS, strict=True) if text] * 4
    chats = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": row["text"]}] for row in rows]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    settings: dict[str, Any] = {"epsilon": 8.0, "noise": "independent", "steps": 2, "batch_size": 8, "max_length": 48}
    for name, make, data, more in (
        ("labels", tiny.bytepair, "texts.jsonl", {"prompt_template": TEMPLATE}),
        ("chats", tiny.chatty, "chats.jsonl", {"lora_rank": 2, "learning_rate": 0.1}),
        ("plain", tiny.bytepair, "texts.jsonl", {}),
    ):
        tokenizer = make()
        model = tiny.saved(folder / f"{name}-gpt2", tiny.gpt2(tokenizer), tokenizer)
        train(Recipe(model=model, data=str(folder / data), **{**settings, **more}), folder / name)
    return folder


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8), (2.0, 0.5)])
def test_tokens_are_drawn_from_the_cut_distribution(temperature, top_p):
    logits = torch.tensor([1.0, 3.0, 0.0, 2.0, -torch.inf])
    grid = (torch.arange(10_000, dtype=torch.float64)[:, None] + 0.5) / 10_000
    drawn = draw(logits.expand(len(grid), -1), grid, temperature=temperature, top_p=top_p)
    found = torch.bincount(drawn.flatten(), minlength=5) / len(grid)
    whole = (logits / temperature).softmax(0)
    kept, total = [], 0.0
    for token in whole.argsort(descending=True).tolist():
        if total < top_p:
            kept.append(token)
            total += float(whole[token])
    expected = torch.zeros(5)
    expected[kept] = whole[kept] / whole[kept].sum()
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_random_numbers_belong_to_seed_row_and_place():
    assert np.array_equal(uniforms(1, 7, 5), uniforms(1, 7, 9)[:5])
    others = [uniforms(1, 7, 5), uniforms(2, 7, 5), uniforms(1, 8, 5), uniforms(7, 1, 5)]
    assert len({tuple(one) for one in others}) == 4


def test_a_row_does_not_depend_on_its_batch():
    """Prompts of different lengths are padded on the left, and others may stop earlier."""
    tokenizer = tiny.chatty()
    model = tiny.gpt2(tokenizer).eval()
    sampler = Sampler(model, tokenizer, seed=3, max_new_tokens=12, temperature=1.0, top_p=0.9)
    prompts = [tokenizer(text)["input_ids"] for text in ("a", "the quick brown fox", "noise noise")]
    together = sampler(prompts, [5, 6, 7])
    assert together == [sampler([prompt], [row])[0] for prompt, row in zip(prompts, (5, 6, 7), strict=True)]
    assert all(together)


def test_generation_ends_at_the_end_of_a_turn():
    tokenizer = tiny.chatty()
    model = tiny.gpt2(tokenizer).eval()
    over = tokenizer.convert_tokens_to_ids("<|over|>")

    def prefer(module, inputs, output):
        output.logits[..., over] = 100.0  # the first token may not end a text
        return output

    with model.register_forward_hook(prefer):
        sampler = Sampler(model, tokenizer, seed=0, max_new_tokens=9, temperature=1.0, top_p=1.0)
        (found,) = sampler([[5]], [0])
    assert len(found) == 1
    assert over not in found


def test_no_text_is_blank():
    """A model that prefers blanks, ends and special tokens: each text still has a word."""
    tokenizer = tiny.chatty()
    model = tiny.gpt2(tokenizer).eval()
    blank = [
        token for token in range(len(tokenizer)) if not tokenizer.decode([token], skip_special_tokens=True).strip()
    ]
    assert len(blank) > 3

    def prefer(module, inputs, output):
        output.logits[..., blank] += 100.0
        return output

    with model.register_forward_hook(prefer):
        for most in (1, 3):
            sampler = Sampler(model, tokenizer, seed=0, max_new_tokens=most, temperature=1.0, top_p=0.9)
            for ids in sampler([[5]] * 8, range(8)):
                assert len(ids) == most
                assert tokenizer.decode(ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-300])
def test_low_temperatures_take_the_most_probable_token(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.999], [5.0, -torch.inf, 4.0]])
    assert draw(logits, torch.tensor([[0.9], [0.1]]), temperature=temperature, top_p=0.9).tolist() == [[1], [0]]


def test_large_vocabularies_are_cut_at_the_same_place():
    """A row that needs more tokens than are ranked first, beside a row that needs fewer."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5000, generator=generator) * torch.tensor([[0.1], [8.0]])
    settings = {"temperature": 1.0, "top_p": 0.9}
    for row in range(2):
        probabilities = logits[row].double().softmax(0).sort(descending=True)
        kept = probabilities.indices[probabilities.values.cumsum(0) - probabilities.values < 0.9].tolist()
        ends = [draw(logits, torch.full((2, 1), end, dtype=torch.float64), **settings)[row] for end in (0.0, 1 - 1e-9)]
        assert ends == [min(kept), max(kept)]
        grid = torch.arange(2000, dtype=torch.float64)[:, None] / 2000
        drawn = draw(logits[row].expand(2000, -1), grid, **settings).flatten().tolist()
        assert set(drawn) <= set(kept)


def test_tokens_that_the_tokenizer_lacks_are_never_drawn():
    tokenizer = tiny.bytepair()
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(tiny.gpt2_config(len(tokenizer) + 500)).eval()
    found = Sampler(model, tokenizer, seed=0, max_new_tokens=20, temperature=1.0, top_p=1.0)([[5]] * 4, range(4))
    assert max(token for row in found for token in row) < len(tokenizer)


# -- files ------------------------------------------------------------------------------------------------------------


def test_labels_get_equal_numbers_and_the_statement_lies_beside(runs, tmp_path, capsys):
    out = tmp_path / "synthetic.jsonl"
    flags = ["--by", "label", "--num", "10", "--max-new-tokens", "6", "--json"]
    assert main(["generate", str(runs / "labels"), "--out", str(out), *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    rows = read(out)
    assert (printed["rows"], printed["new_rows"]) == (10, 10)
    assert Counter(row["label"] for row in rows) == {"animal": 5, "privacy": 5}
    assert all(row.keys() == {"label", "text"} for row in rows)
    statement = (tmp_path / "synthetic.statement.txt").read_text()
    assert statement.startswith((runs / "labels" / "statement.txt").read_text())
    assert "post-processing" in statement
    assert printed["guarantee"] == statement.splitlines()[0]


def test_public_weights_change_the_numbers():
    recipe = Recipe(model="x", data="y", epsilon=1, prompt_template=TEMPLATE, label_names=("a", "b", "c"))
    asked = Rows.of(recipe, "label", {"c": 1, "b": 0, "a": 3}, None)
    assert [columns["label"] for columns in asked.prompts] == ["a", "c"]
    places = asked.places(400)
    assert Counter(places) == {0: 300, 1: 100}
    assert asked.places(30) == places[:30]
    assert Counter(places[:40]) == {0: 30, 1: 10}, "at any length"


def test_an_interrupted_file_continues_exactly(runs, tmp_path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    for seed in (0, 1):
        generate(runs / "labels", tmp_path / f"{seed}.jsonl", by="label", num=11, seed=seed, **SHORT)
    assert read(tmp_path / "0.jsonl") != read(tmp_path / "1.jsonl")
    generate(runs / "labels", whole, by="label", num=11, **SHORT)
    assert read(whole) == read(tmp_path / "0.jsonl"), "deterministic"
    with pytest.raises(KeyboardInterrupt):
        generate(runs / "labels", cut, by="label", num=11, progress=StopAfter(8), **SHORT)
    assert len(read(cut)) == 8
    content = cut.read_bytes()
    for end in (len(content), content.index(b"\n") + 9, 3, 0):  # between batches, in a line, in the first line
        cut.write_bytes(content[:end])
        generate(runs / "labels", cut, by="label", num=11, **SHORT)
        assert cut.read_bytes() == whole.read_bytes()
    assert generate(runs / "labels", cut, by="label", num=11, **SHORT)["new_rows"] == 0
    assert generate(runs / "labels", cut, by="label", num=13, **SHORT)["new_rows"] == 2
    assert read(cut)[:11] == read(whole)


def test_batches_of_other_sizes_write_the_same_rows(runs, tmp_path):
    for size in (1, 5, 16):
        generate(runs / "labels", tmp_path / f"{size}.jsonl", by="label", num=16, max_new_tokens=12, batch_size=size)
    assert read(tmp_path / "1.jsonl") == read(tmp_path / "5.jsonl") == read(tmp_path / "16.jsonl")


def test_two_commands_do_not_write_one_file(runs, tmp_path):
    out = tmp_path / "a.jsonl"

    class Other(ProgressReporter):
        def step(self, **named: Any) -> None:
            with out.open("a") as file:
                file.write("{}\n")

    with pytest.raises(ValueError, match="another command is writing"):
        generate(runs / "labels", out, by="label", num=8, progress=Other(), **SHORT)


def test_a_file_of_other_settings_is_not_continued(runs, tmp_path):
    out = tmp_path / "a.jsonl"
    generate(runs / "labels", out, by="label", num=2, **SHORT)
    weights = {"animal": 1, "privacy": 0}
    for name, value in {"seed": 1, "temperature": 0.5, "max_new_tokens": 5, "weights": weights}.items():
        with pytest.raises(ValueError, match=f"was made with a different .*{name}"):
            generate(runs / "labels", out, **{"by": "label", "num": 4, **SHORT, name: value})
    with pytest.raises(ValueError, match="was made with a different prompts, run"):
        generate(runs / "plain", out, num=4, **SHORT)
    (tmp_path / "b.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match="was not made by generate"):
        generate(runs / "labels", tmp_path / "b.jsonl", by="label", num=2, **SHORT)
    assert (tmp_path / "b.jsonl").read_text() == "mine\n"


def test_lora_factors_are_used_and_prompts_are_chats(runs, tmp_path):
    """The file has what the adapter, not merged, continues the chats with; the untrained model continues otherwise."""
    peft = pytest.importorskip("peft")
    prompts = ["the dog", "noise"]
    generate(runs / "chats", tmp_path / "a.jsonl", prompts=prompts, max_new_tokens=12)
    rows = [row["messages"] for row in read(tmp_path / "a.jsonl")]
    assert [[message["role"] for message in messages] for messages in rows] == [["user", "assistant"]] * 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(runs / "chats" / "model")
    asked = [tokenizer(f"<|turn|>user\n{prompt}<|over|>\n<|turn|>assistant\n")["input_ids"] for prompt in prompts]

    def texts(model):
        sampler = Sampler(model.eval(), tokenizer, seed=0, max_new_tokens=12, temperature=1.0, top_p=0.95)
        return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in sampler(asked, [0, 1])]

    base = transformers.AutoModelForCausalLM.from_pretrained(runs / "chats-gpt2")
    untrained, found = texts(base), [messages[1]["content"] for messages in rows]
    assert found == texts(peft.PeftModel.from_pretrained(base, runs / "chats" / "model"))
    assert found == texts(load_trained(runs / "chats"))
    assert found != untrained


def test_prompts_come_from_files_and_rows_from_prompts_in_turn(runs, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\nthe dog\n")
    assert main([
        "generate", str(runs / "chats"), "--prompts", str(tmp_path / "prompts.txt"), "--num", "3",
        "--out", str(tmp_path / "a.jsonl"), "--max-new-tokens", "3",
    ]) == 0  # fmt: skip
    assert [row["messages"][0]["content"] for row in read(tmp_path / "a.jsonl")] == ["one", "the dog", "one"]
    rows = [{"label": "public", "other": 1}, {"label": "animal", "other": 2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generate(runs / "labels", tmp_path / "b.jsonl", prompts=tmp_path / "rows.jsonl", **SHORT)
    assert [row["label"] for row in read(tmp_path / "b.jsonl")] == ["public", "animal"]
    generate(runs / "plain", tmp_path / "c.jsonl", prompts=["the fox"], num=2, **SHORT)
    assert all(row["text"].startswith("the fox") for row in read(tmp_path / "c.jsonl"))
    (tmp_path / "e.csv").write_text("prompt,id\nthe dog,1\n")
    generate(runs / "plain", tmp_path / "e.jsonl", prompts=tmp_path / "e.csv", **SHORT)
    assert read(tmp_path / "e.jsonl")[0]["text"].startswith("the dog")
    generate(runs / "chats", tmp_path / "f.jsonl", prompts=tmp_path / "e.csv", max_new_tokens=3)
    assert read(tmp_path / "f.jsonl")[0]["messages"][0] == {"role": "user", "content": "the dog"}
    assert generate(runs / "plain", tmp_path / "d.jsonl", num=2, **SHORT)["rows"] == 2


# -- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = {
    "no run": ("nothing", [], "does not exist"),
    "a run of another task": ("table", [], "is a run of tabular-classification; only runs of causal-lm generate texts"),
    "an unknown label": (
        "labels",
        ["--by", "stars"],
        "by='stars' is not a label in the prompts of this run; use label",
    ),
    "no label": (
        "plain",
        ["--by", "stars"],
        "train with --prompt-template 'A {stars} text:' --label-column stars first",
    ),
    "open columns": (
        "labels",
        [],
        "the prompts of this run, 'A {label} review:', have the columns label; give --by or",
    ),
    "no prompts for chats": ("chats", [], "this run was trained on chats; give --prompt TEXT"),
    "by and prompts": ("labels", ["--by", "label", "--prompt", "x"], "by and prompts were both given"),
    "two kinds of prompts": (
        "chats",
        ["--prompts", "x.txt", "--prompt", "x"],
        "--prompt and --prompts were both given",
    ),
    "weights without by": ("labels", ["--weights", "a=1"], "weights are proportions of labels; also give by (--by)"),
    "weights of no label": ("labels", ["--by", "label", "--weights", "a=1"], "the labels are animal, privacy"),
    "weights without a label": (
        "labels",
        ["--by", "label", "--weights", "animal=1"],
        "weights has no 'privacy'; give every label a number, which may be 0",
    ),
    "weights that are words": ("labels", ["--by", "label", "--weights", "a=b"], "must be a label and a number"),
    "one label twice": (
        "labels",
        ["--by", "label", "--weights", "animal=1", "animal=2"],
        "--weights has a label twice",
    ),
    "no rows": ("chats", ["--prompt", "a", "--num", "0"], "Expected num to be a whole number >= 1, got 0"),
    "private prompts": ("labels", ["--prompts", "RUNS/texts.jsonl"], "is the training data, and prompts are published"),
    "prompts with a gap": ("labels", ["--prompts", "gap.jsonl"], "prompts have no 'label'; their columns are label, x"),
    "a file without prompts": (
        "plain",
        ["--prompts", "gap.jsonl"],
        "prompts have no 'prompt'; their columns are label",
    ),
    "a missing file": ("chats", ["--prompts", "missing.txt"], "data 'missing.txt' does not exist"),
    "a long prompt": ("chats", ["--prompt", "a " * 60], "for new ones; shorten it, or change --max-new-tokens"),
    "too many tokens": ("chats", ["--prompt", "a", "--max-new-tokens", "60"], "for new ones; shorten it, or change"),
    "a bad probability": ("labels", ["--by", "label", "--top-p", "0"], "Expected top_p"),
    "a file of another kind": ("labels", ["--by", "label", "--out", "a.csv"], "out a.csv must end in .jsonl"),
    "a missing folder": ("labels", ["--by", "label", "--out", "no/a.jsonl"], "the folder no does not exist"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name, runs, trained_run, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    run, flags, problem = MISTAKES[name]
    (tmp_path / "gap.jsonl").write_text('{"label": "animal", "x": 1}\n{"x": 2}\n')
    flags = [flag.replace("RUNS", str(runs)) for flag in flags]
    out = [] if "--out" in flags else ["--out", "a.jsonl"]
    assert problem in refusal("generate", str(trained_run if run == "table" else runs / run), *out, *flags)
    assert not list(tmp_path.glob("a*")), "nothing is written"


def test_an_unfinished_run_is_refused(runs, tmp_path):
    shutil.copytree(runs / "labels", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(ValueError, match="has no model yet; finish the run with: dpoptim train --resume"):
        generate(tmp_path / "run", tmp_path / "a.jsonl", by="label", num=2)
    assert not list(tmp_path.glob("a*"))


def test_a_log_shows_rows_per_second(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("dpoptim.app.progress.SILENCE", 0.0)
    shown = io.StringIO()
    generate(
        runs / "labels",
        tmp_path / "a.jsonl",
        by="label",
        num=6,
        progress=ProgressReporter(Console(file=shown)),
        **SHORT,
    )
    assert re.search(r"^row 4/6; [\d.]+ rows/s$", shown.getvalue(), re.M)


def test_a_full_disk_is_named_and_nothing_is_lost(runs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "a.jsonl"
    command = ["generate", str(runs / "labels"), "--by", "label", "--max-new-tokens", "6", "--out", str(out)]
    assert main([*command, "--num", "4"]) == 0
    before = read(out)

    def full(*arguments, **named):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        assert main([*command, "--num", "3", "--out", str(tmp_path / "b.jsonl")]) == 2
        assert "No space left on device" in capsys.readouterr().err
        patched.setattr("dpoptim.app.synthetic.generate.write_text", lambda path, text: None)
        assert main([*command, "--num", "6"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.endswith(f"No space left on device: '{out}'; 4 rows of {out} are complete, call again to continue")
    assert main([*command, "--num", "6"]) == 0
    assert read(out)[:4] == before
    assert len(read(out)) == 6
