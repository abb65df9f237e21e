"""Generate texts with the model of a finished run; interrupted files are continued."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dpoptim.app.files import check_target, naming, write_text
from dpoptim.app.models.loading import load_tokenizer
from dpoptim.app.models.prepared import most_tokens
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.recipes.defaults import chosen_device
from dpoptim.app.runs.run import load_trained
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.app.synthetic.rows import Rows, digest
from dpoptim.app.synthetic.sampling import Sampler
from dpoptim.arguments import check_number, check_whole
from dpoptim.integrations.losses import Task
from dpoptim.integrations.optional import first_line
from dpoptim.optim.out_of_memory import is_out_of_memory

ROWS = 1000
_NOTE = """
Synthetic texts. The file {name} was made with this model alone, without the training records. So the
statement above also holds for the texts, and generating more of them costs no further privacy
(post-processing). It does not cover prompts, proportions of labels and settings of the sampling that were
chosen by looking at private data. Made with:
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
    place, out = RunDirectory(Path(directory).expanduser()), Path(out).expanduser()
    place.check_is_run()
    recipe = place.read_recipe()
    if recipe.task != Task.CAUSAL_LM.value:
        raise ValueError(f"{place.path} is a run of {recipe.task}; only runs of causal-lm generate texts")
    check_target("out", out, ".jsonl")
    check_whole("seed", seed, low=0)
    check_whole("batch_size", batch_size)
    check_number("temperature", temperature, low=0)
    check_number("top_p", top_p, above=0, high=1)
    if max_new_tokens is not None:
        check_whole("max_new_tokens", max_new_tokens)
    rows = Rows.of(recipe, by, weights, prompts)
    num = check_whole("num", num if num is not None else len(rows.prompts) if prompts is not None else ROWS)
    sampling = {"seed": seed, "temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    settings = json.dumps(
        {**sampling, **rows.described(), "run": digest(place.log_file.read_bytes())}, ensure_ascii=False, default=str
    )
    statement = place.statement_file.read_text(encoding="utf-8")
    beside = out.with_suffix(".statement.txt")
    done, size = _completed(out, beside, settings)
    result = {"out": str(out), "statement": str(beside), "rows": max(num, done), "new_rows": max(num - done, 0)}
    started, places, progress = time.monotonic(), rows.places(num), progress or ProgressReporter()
    with progress:
        if done < num:
            progress.stage(f"loading {place.model}")
            texts = _Texts(place, rows, device, sampling)
            write_text(beside, f"{statement}{_NOTE.format(name=out.name)}{settings}\n")
            progress.begin(step=done, steps=num, batch_size=1, whole_run=True, unit="row")
        while done < num:
            first = done - done % batch_size  # always the same batches, because rounding may depend on them
            batch, began = range(first, min(first + batch_size, num)), time.monotonic()
            try:
                lines = texts.lines(places[batch.start : batch.stop], batch)
                new = "".join(lines[done - first :]).encode()
                _append(out, new, size)
            except (OSError, RuntimeError, MemoryError) as error:
                done_so_far = f"{done} rows of {out} are complete, call again to continue"
                if isinstance(error, OSError):
                    raise OSError(f"{first_line(error)}; {done_so_far}") from error
                if is_out_of_memory(error):
                    raise ValueError(f"out of memory; use a --batch-size below {batch_size}. {done_so_far}") from error
                raise
            done, size = batch.stop, size + len(new)
            progress.step(step=done, epsilon=0.0, seconds=(time.monotonic() - began) / len(batch))
    return {**result, "seconds": round(time.monotonic() - started, 1), "guarantee": statement.splitlines()[0]}


class _Texts:
    """Writes rows with the model of a run."""

    def __init__(self, place: RunDirectory, rows: Rows, device: str, sampling: Mapping[str, Any]) -> None:
        model, self._tokenizer, self._rows = load_trained(place.path), load_tokenizer(place.model), rows
        where = chosen_device(device)
        model.to(where, torch.bfloat16 if where.type == "cuda" and rows.recipe.dtype == "bf16" else None)
        self._ids = [rows.ids(place, self._tokenizer) for place in range(len(rows.prompts))]
        longest, new = max(map(len, self._ids)), sampling["max_new_tokens"]
        most = most_tokens(model, self._tokenizer)
        if new is None:
            most = min(most, rows.recipe.max_length or most)
            new = most - longest
        if not 1 <= new <= most - longest:
            left = f"which leaves {max(0, most - longest)} of {most} for new ones"
            raise ValueError(f"the longest prompt has {longest} tokens, {left}; shorten it, or change --max-new-tokens")
        self._sampler = Sampler(model, self._tokenizer, **{**sampling, "max_new_tokens": new})

    def lines(self, places: Sequence[int], rows: Sequence[int]) -> list[str]:
        """Generate rows as lines of JSON."""
        found = []
        for place, new in zip(places, self._sampler([self._ids[place] for place in places], rows), strict=True):
            ids = new if self._rows.chat(place) is not None else [*self._ids[place], *new]
            row = self._rows.with_text(place, self._tokenizer.decode(ids, skip_special_tokens=True).strip())
            found.append(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        return found


def _completed(out: Path, beside: Path, settings: str) -> tuple[int, int]:
    """The rows and bytes of a file that these settings made; a last line without an end is removed."""
    if not out.exists():
        return 0, 0
    try:
        made = dict(json.loads(beside.read_text(encoding="utf-8").splitlines()[-1]))
    except (OSError, ValueError, TypeError, IndexError):
        raise ValueError(f"{out} exists and was not made by generate; choose a different name for out") from None
    changed = [name for name, value in json.loads(settings).items() if made.get(name) != value]
    if changed:
        raise ValueError(
            f"{out} exists and was made with a different {', '.join(changed)}; choose a different name for out, or the "
            "same settings to continue"
        )
    with naming(out), out.open("r+b") as file:
        content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        file.truncate(len(content))
    return content.count(b"\n"), len(content)


def _append(out: Path, new: bytes, size: int) -> None:
    """Add lines to a file of this size."""
    with naming(out), out.open("ab") as file:
        if file.tell() != size:
            raise ValueError(f"another command is writing {out}; wait until it ends, then run this command again")
        file.write(new)
        file.flush()
        os.fsync(file.fileno())
