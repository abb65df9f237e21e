"""Chats as tokens: responses are found in any template, and prompts have the same tokens in training and generation."""

from __future__ import annotations

import datasets
import pytest
import torch
import transformers

from dpoptim.integrations.chats import ensure_template, prompt_ids, stop_ids, tokenize_chats
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer, tokenize_chat
from tests.app import tiny

CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": " a dog? "},
    {"role": "assistant", "content": "a fox"},
    {"role": "user", "content": "noise?"},
    {"role": "assistant", "content": "no assistant"},
    {"role": "user", "content": "left out"},
]


def plain():
    tokenizer = tiny.bytepair()
    ensure_template(tokenizer)
    return tokenizer


def split(tokenizer, chat, max_length=200):
    """What is shown and what is trained, as text."""
    ((ids, is_response),) = tokenize_chats(tokenizer, [chat], max_length=max_length)
    trained = [token for token, own in zip(ids, is_response, strict=True) if own]
    return tokenizer.decode(ids), tokenizer.decode(trained)


def test_a_chat_template_is_followed_and_only_responses_are_trained():
    whole, trained = split(tiny.chatty(), CHAT)
    assert whole == (
        "<|turn|>system\nbe short<|over|>\n<|turn|>user\n a dog? <|over|>\n<|turn|>assistant\na fox<|over|>\n"
        "<|turn|>user\nnoise?<|over|>\n<|turn|>assistant\nno assistant<|over|>"
    )
    assert trained == "a fox<|over|>no assistant<|over|>"


def test_without_a_template_messages_are_lines_and_responses_end_the_text():
    end = "<|endoftext|>"
    assert split(plain(), CHAT) == (
        f"be short\na dog?\na fox{end}noise?\nno assistant{end}",
        f"a fox{end}no assistant{end}",
    )


def test_a_tokenizer_that_begins_texts_begins_chats():
    tokenizer = tiny.wordpiece()
    tokenizer.add_special_tokens({"bos_token": "[CLS]", "eos_token": "[SEP]"})
    ensure_template(tokenizer)
    assert split(tokenizer, CHAT[1:3])[0].split()[0] == "[CLS]"


def test_a_template_without_an_ending_gets_the_end_of_the_text():
    tokenizer = tiny.bytepair()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert split(tokenizer, CHAT[1:3])[1] == "a fox<|endoftext|>"


@pytest.mark.parametrize("tokenizer", [plain(), tiny.chatty()], ids=["plain", "template"])
def test_a_prompt_has_the_tokens_that_it_had_in_training(tokenizer):
    ((ids, is_response),) = tokenize_chats(tokenizer, [CHAT], max_length=200)
    start = max(place for place in range(1, len(ids)) if is_response[place] and not is_response[place - 1])
    asked = prompt_ids(tokenizer, CHAT[:4])
    assert asked == ids[: len(asked)]
    assert len(asked) in (start, start - 1)  # the plain template has nothing between response and next line
    assert ids[-1] in stop_ids(tokenizer)
    assert not set(ids[start:-1]) & set(stop_ids(tokenizer)), "a response stops at its end, not before"


def test_a_template_that_prints_the_date_does_not_change_with_it():
    tokenizer = tiny.bytepair()
    own = (
        "{% set today = strftime_now('%d %b %Y') %}{{ strftime_now(\"%Y\") }} {{ today }} {{ messages[-1]['content'] }}"
    )
    tokenizer.chat_template = own
    assert split(tokenizer, CHAT[1:3])[0] == "2025 01 Jan 2025 a fox<|endoftext|>"
    assert tokenizer.chat_template == own


@pytest.mark.parametrize(
    "start", ["{{ bos_token }}", "{% if messages[0]['role'] != 'system' %}<|turn|>system\nbe nice<|over|>\n{% endif %}"]
)
def test_what_a_template_adds_is_there_once_and_not_trained(start):
    tokenizer = tiny.chatty()
    tokenizer.chat_template = start + tokenizer.chat_template
    whole, trained = split(tokenizer, CHAT[1:3])
    added = "<|endoftext|>" if "bos" in start else "<|turn|>system\nbe nice<|over|>\n"
    assert whole == f"{added}<|turn|>user\n a dog? <|over|>\n<|turn|>assistant\na fox<|over|>"
    assert trained == "a fox<|over|>"
    assert tokenizer.decode(prompt_ids(tokenizer, CHAT[1:2])) == whole.removesuffix("a fox<|over|>")


def test_marks_of_generation_and_thoughts_before_the_last_response_are_read():
    tokenizer = tiny.chatty()
    tokenizer.chat_template = (
        "{% for m in messages %}<|turn|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
        "{% if loop.last %}<think></think>{% endif %}{{ m['content'] }}<|over|>{% endgeneration %}"
        "{% else %}{{ m['content'] }}<|over|>{% endif %}\n{% endfor %}"
    )
    assert split(tokenizer, CHAT[1:5])[1] == "a fox<|over|>no assistant<|over|>"
    assert tokenizer.decode(prompt_ids(tokenizer, CHAT[1:2])).endswith("<|turn|>assistant\n<think></think>")


def test_long_chats_are_cut_at_the_end():
    tokenizer = tiny.chatty()
    ((ids, is_response),) = tokenize_chats(tokenizer, [CHAT], max_length=200)
    ((cut, flags),) = tokenize_chats(tokenizer, [CHAT], max_length=30)
    assert (cut, flags) == (ids[:30], is_response[:30])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this chat (roles must alternate)"),
        ("{{ messages[0]['content'] }}", "does not print every response once"),
    ],
)
def test_a_template_that_does_not_fit(template, problem):
    tokenizer = tiny.bytepair()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r".") as raised:
        tokenize_chat(tokenizer, CHAT, max_length=50)
    assert problem in str(raised.value)


def test_private_trainer_trains_on_responses(tmp_path):
    """The losses of the collated batch are means over the responses of each chat alone."""
    tokenizer = tiny.chatty()
    tokenizer.pad_token = tokenizer.eos_token
    model = tiny.gpt2(tokenizer)
    chats = [CHAT[1:3], CHAT[1:5], [CHAT[1], {"role": "assistant", "content": "a much longer answer"}]] * 4
    data = datasets.Dataset.from_dict({"messages": chats})
    tokens = data.map(
        lambda row: tokenize_chat(tokenizer, row["messages"], max_length=64), remove_columns=data.column_names
    )
    collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, report_to="none", use_cpu=True
    )
    trainer = PrivateTrainer(
        model, args, collator, tokens, privacy=PrivacyArguments(noise_multiplier=1.0, delta=1e-3, noise="independent")
    )
    with torch.no_grad():
        losses = trainer.loss_per_example(model.eval(), collator(list(tokens.select(range(3)))))
        for place in range(3):
            row = {name: torch.tensor([value]) for name, value in tokens[place].items()}
            torch.testing.assert_close(losses[place], model(**row).loss)
    trainer.train()
