"""Chats as tokens, and which of these tokens belong to responses.

A chat is a list of messages with a role and a content. The tokenizer's chat template is rendered once per chat, with a
mark in the place of each response. So responses are found in any template, and a prompt has the same tokens in training
and in generation.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpoptim.integrations.optional import first_line
from dpoptim.integrations.token_losses import IGNORED

Message = Mapping[str, str]
Chat = Sequence[Message]

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] | trim }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
"""For a tokenizer without a chat template: a response ends with the end of the text, all else with a new line."""

_MARK = "\ue0f1response\ue0f2"  # private-use characters: no text has them
_TODAY = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")
_DATE = datetime.date(2025, 1, 1)  # in place of today: a run that is resumed tomorrow must have the same tokens


class ChatTokens(NamedTuple):
    """The tokens of a chat, and whether each belongs to a response."""

    ids: list[int]
    is_response: list[bool]


def ensure_template(tokenizer: Any) -> None:
    """Give a tokenizer without a chat template the plain one, which is then saved with it."""
    if tokenizer.chat_template is not None:
        return
    first = tokenizer("a")["input_ids"][:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + PLAIN_TEMPLATE


def chat_of(prompt: str, response: str | None = None) -> Chat:
    """A prompt, and its response if there is one."""
    asked = [{"role": "user", "content": prompt}]
    return asked if response is None else [*asked, {"role": "assistant", "content": response}]


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list | tuple) and all(
        isinstance(part, Mapping) and isinstance(part.get("role"), str) and isinstance(part.get("content"), str)
        for part in value
    )


def responses_of(chat: Chat) -> list[str]:
    """The texts of a chat's responses."""
    return [message["content"] for message in chat if message["role"] == "assistant"]


def problem_of(chat: Any) -> str | None:
    """What is wrong with a chat; None if it can be trained on."""
    if not is_chat(chat):
        return 'that are not lists such as [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'
    responses = responses_of(chat)
    return None if responses and all(text.strip() for text in responses) else "without a response"


def tokenize_chats(
    tokenizer: Any,
    chats: Sequence[Chat],
    *,
    max_length: int,
    locate: Callable[[int], str] = lambda index: f"chat {index + 1}",
) -> Iterator[ChatTokens]:
    """Tokenize chats and cut each at the end, to `max_length` tokens.

    A response consists of its text and of what the template puts after it to end the turn. If that is not a special
    token, the end-of-text token closes the chat. Messages after the last response are left out.
    """
    eos = tokenizer.eos_token_id
    closing = [eos] if eos is not None and _end(tokenizer) is None else []
    for place, chat in enumerate(chats):
        try:
            pieces = _pieces(tokenizer, chat)
        except ValueError as error:
            raise ValueError(f"{locate(place)}: {error}") from error
        found = ChatTokens([], [])
        tokens = _ids(tokenizer, [text for text, _ in pieces])
        for ids, (_, is_response) in zip([*tokens, closing], [*pieces, ("", True)], strict=True):
            found.ids.extend(ids)
            found.is_response.extend([is_response] * len(ids))
        yield ChatTokens(found.ids[:max_length], found.is_response[:max_length])


def tokenize_chat(tokenizer: Any, messages: Chat, *, max_length: int) -> dict[str, list[int]]:
    """Tokenize one chat for `PrivateTrainer`, with labels on the responses only.

    Use it with `dataset.map`, and `DataCollatorForSeq2Seq(tokenizer)` as the collator. A tokenizer without a chat
    template gets a plain one: each message in a line, and the end-of-text token after a response.

    Args:
        tokenizer: A tokenizer of transformers.
        messages: The chat, such as [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}].
        max_length: Longer chats are cut at the end.

    Returns:
        `input_ids`, and `labels`, which are −100 at tokens outside of responses.

    Raises:
        ValueError: There is no response, or the tokenizer's chat template refuses the chat.
    """
    ensure_template(tokenizer)
    problem = problem_of(messages)
    if problem is not None:
        raise ValueError(f"messages has values {problem}. Give a list with at least one response.")
    ((ids, is_response),) = tokenize_chats(tokenizer, [messages], max_length=max_length)
    labels = [token if own else IGNORED for token, own in zip(ids, is_response, strict=True)]
    return {"input_ids": ids, "labels": labels}


def prompt_ids(tokenizer: Any, messages: Chat) -> list[int]:
    """The tokens before the response to these messages, as in training."""
    pieces = _pieces(tokenizer, [*messages, {"role": "assistant", "content": ""}])[:-2]
    return [token for ids in _ids(tokenizer, [text for text, _ in pieces]) for token in ids]


def stop_ids(tokenizer: Any) -> list[int]:
    """The tokens that end a response: the end of the text, and the special token that the template puts after it."""
    own = _end(tokenizer) if tokenizer.chat_template is not None else None
    return sorted({token for token in (own, tokenizer.eos_token_id) if token is not None})


def next_tokens(tokens: NDArray[np.int32], is_response: NDArray[np.bool_] | None) -> NDArray[np.int32]:
    """The label of each position: the next token, `IGNORED` after the last and before tokens of no response."""
    following = np.append(tokens[1:], np.int32(IGNORED))
    return following if is_response is None else np.where(np.append(is_response[1:], False), following, IGNORED)


def _pieces(tokenizer: Any, chat: Chat) -> list[tuple[str, bool]]:
    """The texts of a chat in order, up to the end of its last response, and which of them are trained."""
    is_response = [message["role"] == "assistant" for message in chat]
    used = chat[: max(place for place, own in enumerate(is_response) if own) + 1]
    marked = [
        {"role": message["role"], "content": _MARK if own else message["content"]}
        for message, own in zip(used, is_response, strict=False)
    ]
    first, *others = _rendered(tokenizer, marked).split(_MARK)
    responses = [text.strip() for text in responses_of(used)]
    if len(others) != len(responses):
        raise ValueError("the tokenizer's chat template does not print every response once; choose another template")
    ending = others[-1].rstrip()
    pieces = [(first, False)]
    for response, following in zip(responses, others, strict=True):
        own = ending if following.startswith(ending) else ""
        pieces += [(response, True), (own, True), (following[len(own) :], False)]
    return pieces[:-1]


def _rendered(tokenizer: Any, messages: Sequence[Message]) -> str:
    template = _TODAY.sub(lambda found: repr(_DATE.strftime(found[2])), tokenizer.get_chat_template())
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except Exception as error:  # templates raise errors of their own, such as for a role that they do not know
        raise ValueError(f"the tokenizer's chat template refuses this chat ({first_line(error)})") from error


def _end(tokenizer: Any) -> int | None:
    """The special token at the end of what the template puts after a response."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    ending = _rendered(tokenizer, chat).rpartition(_MARK)[2].rstrip()
    own = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return next((token for token in _ids(tokenizer, [ending])[0][-1:] if token in own), None)


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return list(tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"])
