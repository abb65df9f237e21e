"""What precedes the text of each synthetic row: a label, a prompt, a chat or nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.app.data.records import RecordKind, read_columns
from dpoptim.app.recipes.prompts import fields, filled
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.setup import same_source
from dpoptim.arguments import check_number
from dpoptim.integrations.chats import chat_of, is_chat, prompt_ids


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The columns of each prompt, which the rows take in turn, or by weight."""

    recipe: Recipe
    prompts: list[dict[str, Any]]  # the columns of a row before its text is added
    weights: list[float] | None = None

    @classmethod
    def of(cls, recipe: Recipe, by: str | None, weights: Mapping[str, float] | None, prompts: Any) -> Rows:
        """The rows that are asked of a run, checked against its recipe."""
        if by is not None and prompts is not None:
            raise ValueError("by and prompts were both given; give one of them")
        if by is not None:
            return _labels(recipe, by, weights)
        if weights is not None:
            raise ValueError("weights are proportions of labels; also give by (--by)")
        given = [None] if prompts is None else _read(prompts, recipe)
        return cls(recipe=recipe, prompts=[_columns_of(prompt, recipe) for prompt in given])

    def places(self, rows: int) -> list[int]:
        """The prompt of each of the first rows; more rows only add to them."""
        if self.weights is None:
            return [row % len(self.prompts) for row in range(rows)]
        due = [(np.arange(rows) + 0.5) / weight for weight in self.weights]  # of the rows of each label
        return (np.argsort(np.concatenate(due), kind="stable")[:rows] // rows).tolist()

    def described(self) -> dict[str, Any]:
        """The weights, and a digest of the prompts, which the file itself has."""
        text = json.dumps(self.prompts, ensure_ascii=False, default=str)
        return {"prompts": f"{len(self.prompts)}, digest {digest(text.encode())}", "weights": self.weights}

    def chat(self, place: int) -> Any:
        """The messages of a prompt, as in training; None if it is the beginning of its text."""
        template, columns = self.recipe.prompt_template, self.prompts[place]
        return (
            columns.get(self.recipe.messages_column or "") if template is None else chat_of(filled(template, columns))
        )

    def ids(self, place: int, tokenizer: Any) -> list[int]:
        """The tokens of a prompt, as in training."""
        chat = self.chat(place)
        if chat is not None:
            return prompt_ids(tokenizer, chat)
        ids = list(tokenizer(self.prompts[place][_text_column(self.recipe)])["input_ids"])
        ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if not ids and start is None:
            raise ValueError("the tokenizer has no start token; give --prompt TEXT")
        return ids or [start]

    def with_text(self, place: int, text: str) -> dict[str, Any]:
        """The columns of a row with its text."""
        columns, messages = self.prompts[place], self.recipe.messages_column
        if messages is not None:
            return {messages: [*columns[messages], {"role": "assistant", "content": text}]}
        return {**columns, _text_column(self.recipe): text}


def digest(content: bytes) -> str:
    """A short digest, to recognise what a file was made from."""
    return blake2b(content, digest_size=8).hexdigest()


def _text_column(recipe: Recipe) -> str:
    return recipe.text_column or "text"


def _labels(recipe: Recipe, by: str, weights: Mapping[str, float] | None) -> Rows:
    """Rows for each label."""
    used, names = fields(recipe.prompt_template or ""), recipe.label_names or ()
    if by not in used or not names:
        train = f"train with --prompt-template 'A {{{by}}} text:' --label-column {by} first"
        hint = f"use {' or '.join(used)}" if names else train
        raise ValueError(f"by={by!r} is not a label in the prompts of this run; {hint}")
    if used != [by]:
        others = ", ".join(name for name in used if name != by)
        raise ValueError(f"by={by!r} does not fill {others} in the prompts; give prompts (--prompts) with all columns")
    for name, weight in (weights or {}).items():
        if name not in names:
            raise ValueError(f"weights has {name!r}, and the labels are {', '.join(names)}")
        check_number(f"weights[{name!r}]", weight, low=0)
    if weights is None:
        return Rows(recipe=recipe, prompts=[{by: name} for name in names])
    missing = next((name for name in names if name not in weights), None)
    if missing is not None:
        raise ValueError(f"weights has no {missing!r}; give every label a number, which may be 0")
    chosen = {name: float(weights[name]) for name in names if weights[name]}
    if not chosen:
        raise ValueError("weights are all 0; give one of them a positive number")
    return Rows(recipe=recipe, prompts=[{by: name} for name in chosen], weights=list(chosen.values()))


def _read(prompts: Any, recipe: Recipe) -> Sequence[Any]:
    """Prompts as texts or as rows; a file of texts has one prompt per line."""
    if not isinstance(prompts, str | Path):
        found: Sequence[Any] = list(prompts)
    elif same_source(str(prompts), recipe.data):
        raise ValueError(f"prompts {str(prompts)!r} is the training data, and prompts are published; give public ones")
    else:
        columns, _ = read_columns(prompts, kind=RecordKind.TEXT)
        found = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        found = columns["text"] if Path(prompts).suffix == ".txt" else found
    if not found:
        raise ValueError("prompts is empty; give at least one")
    return found


def _columns_of(prompt: Any, recipe: Recipe) -> dict[str, Any]:
    """The columns of a row before its text is added."""
    template, messages = recipe.prompt_template, recipe.messages_column
    if template is not None:
        names = fields(template)
        if isinstance(prompt, Mapping):
            return {name: _value(prompt, name) for name in names}
        given = [] if prompt is None else [prompt]
        if len(given) != len(names):
            needs = f"the columns {', '.join(names)}; give --by or --prompts FILE with them" if names else "no columns"
            raise ValueError(f"the prompts of this run, {template!r}, have {needs}")
        return dict(zip(names, given, strict=True))
    if isinstance(prompt, Mapping) and messages not in prompt:
        prompt = _value(prompt, "prompt")
    if messages is None:
        return {_text_column(recipe): str(prompt or "")}
    chat = prompt[messages] if isinstance(prompt, Mapping) else prompt and chat_of(str(prompt))
    if not chat or not is_chat(chat):
        raise ValueError("this run was trained on chats; give --prompt TEXT, or --prompts FILE with chats or texts")
    return {messages: list(chat[:-1] if chat[-1]["role"] == "assistant" else chat)}


def _value(prompt: Mapping[str, Any], name: str) -> Any:
    if prompt.get(name) is None:
        raise ValueError(f"prompts have no {name!r}; their columns are {', '.join(map(str, prompt))}")
    return prompt[name]
