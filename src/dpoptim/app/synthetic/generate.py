"""Generate texts with the model of a finished run; interrupted files are continued."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from dpoptim.app.data.records import RecordKind, read_columns
from dpoptim.app.files import check_target, naming, write_text
from dpoptim.app.models.loading import load_tokenizer
from dpoptim.app.models.prepared import most_tokens
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.recipes.defaults import chosen_device
from dpoptim.app.recipes.prompts import fields, filled
from dpoptim.app.recipes.recipe import Recipe, read_recipe
from dpoptim.app.runs.run import load_trained
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.arguments import check_number, check_whole
from dpoptim.integrations.chats import chat_of, is_chat, prompt_ids
from dpoptim.integrations.losses import Task
from dpoptim.optim.out_of_memory import is_out_of_memory

ROWS = 1000
_NOTE = """
Synthetic texts. The file {name} was made with this model alone, without the training records, so the statement above
also holds for the texts: generating more of them costs no further privacy (post-processing). It does not cover prompts,
proportions of labels and settings of the sampling that were chosen by looking at private data. Made with:
"""


def generate(
    directory: str | Path,
    out: str | Path,
    *,
    num: int | None = None,
    by: str | None = None,
    weights: Mapping[str, float] | None = None,
    prompts: str | Path | Sequence[str | Mapping[str, Any]] | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_p: float = 0.95,
    batch_size: int = 32,
    seed: int = 0,
    device: str = "auto",
    progress: ProgressReporter | None = None,
) -> dict[str, Any]:
    """Write synthetic texts to a .jsonl file, with the columns of the training data, and the run's statement beside it.

    A file that exists is continued: row i is a function of (run, settings, seed, i), so it ends as if it had never been
    interrupted. Larger `num` adds rows. With a different `batch_size` or machine, rounding may change a row.

    Args:
        directory: A finished run of causal-lm.
        out: The .jsonl file. The statement is OUT.statement.txt.
        num: The number of rows. Defaults to one per prompt, or 1000.
        by: The label column, which is a field of the run's prompt_template: the same number of rows per label.
        weights: With `by`, the proportion of each label. They must be public, unlike those of the training records.
        prompts: A file or list of prompts, taken in turn: texts, or rows with the columns of the run's prompts. A last
            response in a chat is left out.
        max_new_tokens: Defaults to the length at which training texts were cut, less the longest prompt.
        temperature: Divides the logits; 0 always takes the most probable token.
        top_p: Keep the most probable tokens that together have this probability.
        batch_size: The rows that are generated at once.
        seed: The seed.
        device: "auto", "cpu" or "cuda".
        progress: Shows the rows. Defaults to silence.

    Returns:
        The file, its statement, the number of rows, of which `new_rows` are new, and the guarantee.

    Raises:
        ValueError: The run has not finished or is not of causal-lm, prompts do not fit it, or `out` was made otherwise.

    Guarantee: the run's guarantee covers the rows, if prompts, weights and settings do not depend on private data.
    """
    place, out, progress = (
        RunDirectory(Path(directory).expanduser()),
        Path(out).expanduser(),
        progress or ProgressReporter(),
    )
    place.check_is_run()
    recipe = read_recipe(place.recipe_file)
    if recipe.task != Task.CAUSAL_LM.value:
        raise ValueError(f"{place.path} is a run of {recipe.task}; only runs of causal-lm generate texts")
    check_target("out", out, ".jsonl")
    check_whole("seed", seed, low=0)
    check_whole("batch_size", batch_size)
    check_number("temperature", temperature, low=0)
    check_number("top_p", top_p, above=0, high=1)
    if max_new_tokens is not None:
        check_whole("max_new_tokens", max_new_tokens)
    asked = _Rows.of(recipe, by, weights, prompts)
    num = check_whole("num", num if num is not None else len(asked.prompts) if prompts is not None else ROWS)
    settings = {
        "seed": seed, "temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens,
        "rows": asked.described(), "run": _digest(place.log_file.read_bytes()),
    }  # fmt: skip
    statement = place.statement_file.read_text(encoding="utf-8")
    note = _NOTE.format(name=out.name) + json.dumps(settings, ensure_ascii=False, default=str) + "\n"
    beside = out.with_suffix(".statement.txt")
    done = _rows_of(out, beside, statement + note)
    places = asked.places(num)
    started, before = time.monotonic(), done
    with progress:
        if done < num:
            progress.stage(f"loading {place.model}")
            write = _Writer(place, recipe, asked, out, device)
            sampler = write.sampler(seed=seed, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
            write_text(beside, statement + note)
            progress.begin(step=done, steps=num, batch_size=1, whole_run=True, unit="row")
        while done < num:
            first = done - done % batch_size  # always the same batches, because rounding may depend on them
            rows = range(first, min(first + batch_size, num))
            began = time.monotonic()
            try:
                write(sampler, places[rows.start : rows.stop], rows, done)
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    raise ValueError(
                        f"out of memory; use a --batch-size below {batch_size}, here {done} rows are written"
                    ) from error
                raise
            done = rows.stop
            progress.step(step=done, epsilon=0.0, seconds=(time.monotonic() - began) / len(rows))
    return {
        "out": str(out),
        "statement": str(beside),
        "rows": done,
        "new_rows": done - before,
        "seconds": round(time.monotonic() - started, 1),
        "guarantee": statement.splitlines()[0],
    }


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What precedes the text of each row: one of `prompts`, in turn or by weight."""

    text_column: str
    prompts: list[dict[str, Any]]  # the columns of a row before its text is added
    chats: list[Any] | None  # the messages of each prompt; None for runs on plain texts
    weights: list[float]

    @classmethod
    def of(cls, recipe: Recipe, by: str | None, weights: Mapping[str, float] | None, prompts: Any) -> _Rows:
        """The rows that are asked of a run, checked against its recipe."""
        if by is not None and prompts is not None:
            raise ValueError("by and prompts were both given; give one of them")
        if weights is not None and by is None:
            raise ValueError("weights are proportions of labels; also give by (--by)")
        text, template = recipe.text_column or "text", recipe.prompt_template
        if by is not None:
            names, numbers = _labels(recipe, by, weights)
            found = [{by: name} for name in names]
        else:
            own: list[Any] = [None] if prompts is None else _read(prompts, recipe)
            found, numbers = [_columns_of(prompt, recipe, text) for prompt in own], [1.0] * len(own)
        chats: list[Any] | None = None
        if template is not None:
            chats = [chat_of(filled(template, columns)) for columns in found]
        elif recipe.messages_column is not None:
            chats = [columns[recipe.messages_column] for columns in found]
        return cls(text_column=text, prompts=found, chats=chats, weights=numbers)

    def places(self, rows: int) -> list[int]:
        """The prompt of each of the first rows: the one that lags behind its weight most, or in turn."""
        if len(set(self.weights)) == 1:
            return [row % len(self.prompts) for row in range(rows)]
        share = [weight / sum(self.weights) for weight in self.weights]
        counts, found = [0] * len(share), []
        for row in range(rows):
            lag = [part * (row + 1) - count for part, count in zip(share, counts, strict=True)]
            found.append(lag.index(max(lag)))
            counts[found[-1]] += 1
        return found

    def described(self) -> Any:
        """The prompts and weights, or a digest if they are long."""
        found = {"prompts": self.prompts, "weights": self.weights}
        text = json.dumps(found, ensure_ascii=False, default=str)
        return f"{len(self.prompts)} prompts, {_digest(text.encode())}" if len(text) > 1000 else found


def _labels(recipe: Recipe, by: str, weights: Mapping[str, float] | None) -> tuple[list[str], list[float]]:
    used = fields(recipe.prompt_template or "")
    if by not in used or not recipe.label_names:
        hint = f"--prompt-template 'A {{{by}}} text:' --label-column {by}"
        raise ValueError(f"by={by!r} is not a label in the prompts of this run. Train with {hint} first.")
    if used != [by]:
        others = ", ".join(name for name in used if name != by)
        raise ValueError(f"by={by!r} leaves {others} of the prompts open; give prompts (--prompts) with all columns")
    names = list(recipe.label_names)
    for name, weight in (weights or {}).items():
        if name not in names:
            raise ValueError(f"weights has {name!r}, and the labels are {', '.join(names)}")
        check_number(f"weights[{name!r}]", weight, low=0)
    numbers = [float((weights or {}).get(name, 0.0 if weights else 1.0)) for name in names]
    if not sum(numbers):
        raise ValueError("weights are all 0; give one of them a positive number")
    return names, numbers


def _read(prompts: Any, recipe: Recipe) -> list[Any]:
    """Prompts as texts or as rows; a file of texts has one prompt per line."""
    if not isinstance(prompts, str | Path):
        found = list(prompts)
    else:
        columns, _ = read_columns(prompts, kind=RecordKind.TEXT)
        names = list(columns)
        found = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if Path(prompts).suffix == ".txt":
            found = [row["text"] for row in found]
        elif recipe.prompt_template is None and recipe.messages_column not in columns:
            if "prompt" not in columns:
                raise ValueError(f"prompts {str(prompts)!r} has no column 'prompt'; the columns are {', '.join(names)}")
            found = [row["prompt"] for row in found]
    if not found:
        raise ValueError("prompts is empty; give at least one")
    return found


def _columns_of(prompt: Any, recipe: Recipe, text: str) -> dict[str, Any]:
    """The columns of a row before its text is added."""
    names = fields(recipe.prompt_template or "")
    if recipe.messages_column is not None:
        chat = prompt.get(recipe.messages_column) if isinstance(prompt, Mapping) else prompt and chat_of(prompt)
        if not chat or not is_chat(chat):
            raise ValueError("this run was trained on chats; give --prompt TEXT, or --prompts FILE with chats or texts")
        return {recipe.messages_column: list(chat[:-1] if chat[-1]["role"] == "assistant" else chat)}
    if recipe.prompt_template is None:
        return {text: prompt or ""}
    if not isinstance(prompt, Mapping):
        given = [] if prompt is None else [prompt]
        if len(given) != len(names):
            needs = f"the columns {', '.join(names)}; give --by or --prompts FILE with them" if names else "no columns"
            raise ValueError(f"the prompts of this run, {recipe.prompt_template!r}, have {needs}")
        return dict(zip(names, given, strict=True))
    missing = [name for name in names if name not in prompt]
    if missing:
        raise ValueError(f"prompts have no column {missing[0]!r}; the columns are {', '.join(map(str, prompt))}")
    return {name: prompt[name] for name in names}


class _Writer:
    """Turns rows into lines of the file."""

    def __init__(self, place: RunDirectory, recipe: Recipe, asked: _Rows, out: Path, device: str) -> None:
        self._recipe, self._asked, self._out = recipe, asked, out
        self._model = load_trained(place.path)
        self._tokenizer = load_tokenizer(place.model)
        where = chosen_device(device)
        self._model.to(where)
        if where.type == "cuda" and recipe.dtype == "bf16":
            self._model.to(torch.bfloat16)
        self._ids = [self._prompt(number) for number in range(len(asked.prompts))]
        self._longest = max(map(len, self._ids))

    def sampler(self, *, max_new_tokens: int | None, **shape: Any) -> Any:
        from dpoptim.app.synthetic.sampling import Sampler

        most = most_tokens(self._model, self._tokenizer)
        limit = most if max_new_tokens is not None else min(most, self._recipe.max_length or most)
        new = limit - self._longest if max_new_tokens is None else max_new_tokens
        if new < 1 or self._longest + new > most:
            raise ValueError(
                f"the longest prompt has {self._longest} tokens, which leaves {max(0, limit - self._longest)} of "
                f"{limit} for new ones; shorten it, or change --max-new-tokens"
            )
        return Sampler(self._model, self._tokenizer, max_new_tokens=new, **shape)

    def __call__(self, sampler: Any, places: list[int], rows: range, done: int) -> None:
        """Generate some rows, and append those that are not done yet."""
        found = sampler([self._ids[place] for place in places], rows)
        lines = [
            json.dumps(self._line(place, ids), ensure_ascii=False, default=str)
            for place, ids in zip(places, found, strict=True)
        ]
        with naming(self._out), self._out.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines[done - rows.start :]))
            file.flush()
            os.fsync(file.fileno())

    def _prompt(self, number: int) -> list[int]:
        tokenizer = self._tokenizer
        if self._asked.chats is not None:
            return prompt_ids(tokenizer, self._asked.chats[number])
        ids = list(tokenizer(self._asked.prompts[number][self._asked.text_column])["input_ids"])
        ids = ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if not ids and start is None:
            raise ValueError("the tokenizer has no token that begins a text; give --prompt TEXT")
        return ids or [start]

    def _line(self, place: int, ids: list[int]) -> dict[str, Any]:
        columns, messages = self._asked.prompts[place], self._recipe.messages_column
        if self._asked.chats is None:
            ids = [*self._ids[place], *ids]
        text = self._tokenizer.decode(ids, skip_special_tokens=True).strip()
        if messages is not None:
            return {messages: [*columns[messages], {"role": "assistant", "content": text}]}
        return {**columns, self._asked.text_column: text}


def _rows_of(out: Path, beside: Path, statement: str) -> int:
    """How many rows a file has; a last line that was not completed is removed."""
    if not out.exists():
        return 0
    if not beside.is_file() or beside.read_text(encoding="utf-8") != statement:
        raise ValueError(
            f"{out} exists and was made from other settings or another run; choose a different name for out"
        )
    with naming(out), out.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    return content.count(b"\n")


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()
