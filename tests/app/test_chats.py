"""Runs on prompts and chats: how records are read, which tokens are trained, and what is refused."""

from __future__ import annotations

import csv
import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dpoptim.app import Recipe, prepare, prepare_run, read_records
from dpoptim.app.data.examples import TokenDataset
from dpoptim.app.models.prepared import not_finite, random_batch
from dpoptim.clipping import check_example_independence
from dpoptim.integrations.chats import ChatTokens
from dpoptim.integrations.losses import Task
from tests.app import tiny

REVIEWS = [("good", "the fox"), ("bad", "noise"), ("bad", "a dog and a fox"), ("good", "over the lazy dog")] * 5
TEMPLATE = "A {stars} review:"


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("stars", "text"), *REVIEWS])
    return path


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts_of(records):
    return [[message["content"] for message in chat] for chat in records.chats or ()]


def test_a_template_makes_prompts_of_columns(reviews):
    found = read_records(reviews, label_column="stars", prompt_template=TEMPLATE)
    assert texts_of(found)[:2] == [["A good review:", "the fox"], ["A bad review:", "noise"]]
    assert found.label_names == ("bad", "good")
    assert texts_of(found.take([1])) == [["A bad review:", "noise"]]
    other = read_records(reviews, text_column="stars", prompt_template="{text}, which is")
    assert texts_of(other)[0] == ["the fox, which is", "good"]
    assert other.labels is None


@pytest.mark.parametrize("response", ["response", "completion"])
def test_prompts_with_responses_and_messages_are_found(tmp_path, response):
    pairs = read_records(
        lines(tmp_path / "a.jsonl", [{"prompt": "1 + 1?", response: "2", "id": "x"}]), may_be_chats=True
    )
    assert texts_of(pairs) == [["1 + 1?", "2"]]
    assert (pairs.prompt_template, pairs.text_column) == ("{prompt}", response)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chats = read_records(lines(tmp_path / "b.jsonl", [{"messages": chat, "prompt": "Hi"}]), may_be_chats=True)
    assert texts_of(chats) == [["Hi", "Hello"]]
    assert (chats.prompt_template, chats.text_column) == (None, "messages")
    plain = read_records(lines(tmp_path / "c.jsonl", [{"text": "a", "prompt": "b"}]), may_be_chats=True)
    assert plain.chats is None


def prepared_for(tokenizer, reviews, max_length=64):
    records = read_records(reviews, label_column="stars", prompt_template=TEMPLATE)
    model = tiny.gpt2(tokenizer)
    settings = {"tokenizer": tokenizer, "max_length": max_length, "bucket": 8}
    return prepare(task=Task.CAUSAL_LM, model=model, records=records, **settings)


@pytest.mark.parametrize("make", [tiny.bytepair, tiny.chatty])
def test_losses_are_means_over_the_responses_of_one_example_at_a_time(make, reviews):
    """Brute force: tokenize prompt and response as text, and average the losses of the response's tokens."""
    tokenizer = make()
    has_template = tokenizer.chat_template is not None
    prepared = prepared_for(tokenizer, reviews)
    prepared.model.eval()
    before, between, after = (
        ("<|turn|>user\n", "<|over|>\n<|turn|>assistant\n", "<|over|>") if has_template else ("", "\n", "<|endoftext|>")
    )
    batch = prepared.collated([prepared.dataset[i] for i in range(4)])
    with torch.no_grad():
        losses = prepared.loss_per_example(prepared.model, batch)
        for place, (stars, text) in enumerate(REVIEWS[:4]):
            asked = tokenizer(f"{before}A {stars} review:{between}")["input_ids"]
            response = tokenizer(f"{text}{after}")["input_ids"]
            logits = prepared.model(torch.tensor([asked + response])).logits[0]
            own = F.cross_entropy(logits[len(asked) - 1 : -1], torch.tensor(response))
            torch.testing.assert_close(losses[place], own)
            label = batch["labels"][place]
            assert label[label != -100].tolist() == response


def test_examples_stay_independent_and_a_cut_example_has_loss_0(reviews):
    prepared = prepared_for(tiny.chatty(), reviews, max_length=30)
    batch = random_batch(prepared, [12, 7, 3])
    assert (batch["labels"][0, :5] == -100).all(), "half of a random text is a prompt"
    check_example_independence(prepared.model, prepared.loss_per_example, batch)
    cut = prepared_for(tiny.chatty(), reviews, max_length=20)
    losses = cut.loss_per_example(cut.model, cut.collated([cut.dataset[0], cut.dataset[1]]))
    assert losses.tolist() == [0.0, 0.0]
    dataset: Any = cut.dataset
    assert dataset.untaught() == len(REVIEWS)
    losses.sum().backward()
    assert not not_finite(cut.model)


def test_a_chat_without_tokens_leaves_the_others_in_place():
    chats = [ChatTokens([], []), ChatTokens([5, 6], [False, True])]
    dataset = TokenDataset(chats, None, filler=0)
    assert [np.asarray(dataset[place].is_response).tolist() for place in (0, 1)] == [[False], [False, True]]
    assert dataset.untaught() == 1


def recipe(folder, data, **changes):
    model = tiny.saved(folder / "gpt2", tiny.gpt2(tiny.bytepair()), tiny.bytepair())
    settings = {"model": model, "data": str(data), "noise_multiplier": 1.0, "noise": "independent", "batch_size": 5}
    return Recipe(**{**settings, "steps": 2, "max_length": 48, **changes})


def test_a_run_records_what_it_found(tmp_path, reviews):
    setup = prepare_run(recipe(tmp_path, reviews, prompt_template=TEMPLATE, label_column="stars"))
    assert setup.recipe.label_names == ("bad", "good")
    assert setup.recipe.text_column == "text"
    assert "after prompts 'A {stars} review:'" in setup.messages[0]
    assert "no chat template" in " ".join(setup.messages)
    assert "2 classes read from the data: bad, good" in " ".join(setup.messages), "they are published"
    assert setup.validation is not None
    assert len(setup.validation.records) == 1
    again = Recipe.from_dict(setup.recipe.to_dict())
    assert again.prompt_template == TEMPLATE


def test_some_examples_without_a_response_are_counted(tmp_path):
    rows = [{"prompt": "a " * (30 if number == 2 else 1), "response": "b"} for number in range(20)]
    data = lines(tmp_path / "pairs.jsonl", rows)
    setup = prepare_run(recipe(tmp_path, data, max_length=16))
    assert "1 of 19 records have no response within max_length=16, so they teach nothing" in " ".join(setup.notes)


def test_lora_goes_where_it_is_told(tmp_path, reviews):
    lora = {"lora_rank": 2, "lora_alpha": 6, "lora_targets": ["c_proj"]}
    setup = prepare_run(recipe(tmp_path, reviews, prompt_template=TEMPLATE, **lora))
    trained = [name for name, value in setup.model.named_parameters() if value.requires_grad]
    assert trained
    assert all("c_proj" in name for name in trained)
    model: Any = setup.model
    (config,) = model.peft_config.values()
    assert config.lora_alpha == 6


MISTAKES = {
    "a column that is missing": (
        ["--prompt-template", "A {star} review:"],
        "names 'star', but the columns are stars, te",
    ),
    "a text column that is missing": (
        ["--prompt-template", "A", "--text-column", "x"],
        "text_column='x' is not a column",
    ),
    "a prompt with its own text": (["--prompt-template", "A review: {text}"], "into its own prompt; leave {text} out"),
    "an open brace": (["--prompt-template", "A {stars"], "must name columns as {name}"),
    "a field with a format": (["--prompt-template", "A {stars:d}"], "must name columns as {name}"),
    "a label outside of the prompts": (["--label-column", "stars"], "or write {stars} in prompt_template"),
    "messages that are texts": (["--messages-column", "text"], "records that are not lists such as [{"),
    "two kinds of prompts": (["--messages-column", "text", "--prompt-template", "A"], "were both given"),
    "prompts that fill the length": (
        ["--prompt-template", TEMPLATE, "--max-length", "4"],
        "19 of 19 records have no resp",
    ),
    "a different task": (["--prompt-template", TEMPLATE, "--task", "masked-lm"], "leave it out, or choose causal-lm"),
    "LoRA layers that do not exist": (
        ["--lora-rank", "2", "--lora-targets", "x"],
        "lora_rank=2 cannot be used: Target mod",
    ),
    "LoRA settings without a rank": (["--lora-alpha", "2"], "lora_alpha=2.0 needs lora_rank"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name, tmp_path, reviews, refusal):
    flags, problem = MISTAKES[name]
    model = tiny.saved(tmp_path / "gpt2", tiny.gpt2(tiny.bytepair()), tiny.bytepair())
    run = tmp_path / "run"
    command = ["train", "--model", model, "--data", str(reviews), "--noise-multiplier", "1", "--run-dir", str(run)]
    assert problem in refusal(*command, *flags)
    assert not run.exists()


def test_empty_responses_are_refused(tmp_path):
    chat = [{"role": "user", "content": "Hi"}]
    rows = [{"messages": [*chat, {"role": "assistant", "content": " "}]}, {"messages": chat}]
    with pytest.raises(ValueError, match="has 2 records without a response"):
        read_records(lines(tmp_path / "a.jsonl", rows), may_be_chats=True)
    with pytest.raises(ValueError, match="has 1 records without 'response'"):
        read_records(lines(tmp_path / "b.jsonl", [{"prompt": "a", "response": None}]), may_be_chats=True)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": float("nan")}, "has 1 records without 'text'"),
        ({"stars": float("nan")}, "has 1 records without 'stars'"),
        ({"stars": None}, "has 1 records without 'stars'"),
        ({"text": ["a", "b"]}, "has 1 records whose 'text' is not a text or a number"),
    ],
)
def test_values_that_are_missing_or_lists_are_refused(tmp_path, row, problem):
    good = {"stars": 0, "text": "a"}
    data = lines(tmp_path / "a.jsonl", [good, {**good, **row}])
    with pytest.raises(ValueError, match=problem):
        read_records(data, prompt_template=TEMPLATE)
    read_records(lines(tmp_path / "b.jsonl", [good]), prompt_template=TEMPLATE)


def test_held_out_records_must_be_of_the_same_kind(tmp_path, reviews):
    prepared = prepared_for(tiny.chatty(), reviews)
    with pytest.raises(ValueError, match="must have the prompts or messages"):
        prepared.on(read_records(lines(tmp_path / "a.jsonl", [{"text": "a"}])))
    assert np.array_equal(prepared.on(prepared.records).lengths, prepared.lengths)
