"""The built-in demonstration: a small BERT learns from public text, and then, privately, from other text.

The texts are documentation strings of Python and installed libraries, each string a record, divided by library into
public ones and private ones. A WordPiece vocabulary is counted on the public ones alone, and a BERT of two layers is
trained on them without privacy. From there it is fine-tuned on the private ones: not at all, without privacy, and by
four private variants of Adam at one (ε, δ), each an ordinary run of `dpoptim train`. Scores are on private-domain
records that no run trained on; they are outside the guarantee.

Learning rates were chosen by trial on the same records (1e-2 over 3e-3 for post-processing, bias correction and
scale-then-privatize, one run each; independent moments take the same), which a real project would not do: ε does not
cover that choice. Other settings are the defaults. ε holds for each model by
itself, not for all of them at once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dpoptim.app.data.records import read_records
from dpoptim.app.demo.model import LENGTH, pretrain
from dpoptim.app.demo.text import texts_of
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.metrics import evaluate
from dpoptim.app.runs.progress import SILENCE, ProgressDisplay
from dpoptim.app.runs.run import train
from dpoptim.integrations.optional import require
from dpoptim.privacy.format_epsilon import format_epsilon

PUBLIC = ("python", "numpy", "scipy", "setuptools", "pip", "rich")
PRIVATE = ("sympy", "networkx")
TEST_EVERY = 6


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is done: the whole demonstration, or a quick look."""

    records_per_library: int
    pretraining_steps: int
    batch_size: int
    steps: int


FULL = Size(records_per_library=4000, pretraining_steps=300, batch_size=384, steps=20)
QUICK = Size(records_per_library=150, pretraining_steps=5, batch_size=32, steps=3)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table: how the model is fine-tuned, with a learning rate that was chosen by trial."""

    name: str
    idea: str
    settings: dict[str, Any]

    @property
    def private(self) -> bool:
        return "noise_multiplier" not in self.settings


METHODS = (
    Method(
        name="not_private",
        idea="Adam: no noise, no clipping",
        settings={"variant": "post_processing", "noise_multiplier": 0.0, "clip_norm": 1e6, "learning_rate": 3e-3},
    ),
    Method(
        name="post_processing",
        idea="Adam on the noisy gradient",
        settings={"variant": "post_processing", "learning_rate": 1e-2},
    ),
    Method(
        name="bias_correction",
        idea="less the noise's share of the second moment",
        settings={"variant": "bias_correction", "learning_rate": 1e-2},
    ),
    Method(
        name="independent_moments",
        idea="the square has noise of its own (IME)",
        settings={"variant": "independent_moments", "learning_rate": 1e-2},
    ),
    Method(
        name="scale_then_privatize",
        idea="Adam's scaling before clipping and noise",
        settings={"variant": "scale_then_privatize", "learning_rate": 1e-2},
    ),
)


def main(
    *,
    json_wanted: bool,
    quick: bool,
    console: Console,
    keep: str | None = None,
    epsilon: float = 8.0,
    delta: float = 1e-5,
    seed: int = 0,
) -> int:
    """Run the demonstration and print a table or JSON; the runs are kept in the folder `keep`, if there is one."""
    require("transformers", "the demonstration")
    size = QUICK if quick else FULL
    common: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "seed": seed,
        "batch_size": size.batch_size,
        "steps": size.steps,
    }
    Recipe(model="demonstration", data="demonstration", **common)  # a bad value is told before the work
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dpoptim-")))
        else:
            folder = Path(keep)
            folder.mkdir(parents=True)
        found = fine_tuned_each_way(folder, size, common, stack.enter_context(Stages(console)))
    answer = {**found, "delta": delta, "seconds": time.perf_counter() - began, "kept": keep}
    if json_wanted:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        show(answer)
    return 0


class Stages:
    """What is being done: a bar a stage in a terminal; elsewhere a line when one begins, and after `SILENCE`."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:<30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._title, self._total, self._said = "", 0, 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, title: str, total: int, *, line: str | None = None) -> None:
        """A stage of `total` parts; `line` is what a log says where the title alone does not tell."""
        self._task = self._progress.add_task(title, total=total)
        self._title, self._total = line or title, total
        self._say("...")

    def at(self, done: int) -> None:
        """So many parts are done."""
        self._progress.update(self._task, completed=done)
        if time.monotonic() - self._said >= SILENCE:
            self._say(f"{done}/{self._total}")

    def _say(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{self._title} {text}", highlight=False, soft_wrap=True)
        self._said = time.monotonic()


def fine_tuned_each_way(folder: Path, size: Size, common: dict[str, Any], stages: Stages) -> dict[str, Any]:
    """Read, pretrain, and fine-tune in processes of one thread each; everything is written into `folder`."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with ProcessPoolExecutor(2, mp_context=context, initializer=_worker, initargs=(queue,)) as pool:
        try:
            texts = _read(pool, size, stages)
            for name in texts:
                _write(folder / f"{name}.jsonl", texts[name])
            for _ in range(2):
                pool.submit(_import_ahead)  # the workers are idle while the model is pretrained
            stages.begin("pretraining on public text", size.pretraining_steps)
            prepared = pretrain(
                folder / "pretrained",
                texts["public"],
                steps=size.pretraining_steps,
                seed=common["seed"],
                after_step=stages.at,
            )
            test = evaluate(prepared.on(read_records(folder / "test.jsonl")))
            summaries = _fine_tuned(pool, queue, folder, common, stages)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    public = Method(name="no fine-tuning", idea="the public model as it is", settings={})
    scores = {"loss": test.loss, "perplexity": test.perplexity}
    first = _row(public, {"epsilon": 0.0, "seconds": 0.0, "validation": {"last": scores}})
    return {
        "epsilon": common["epsilon"],
        "public_records": len(texts["public"]),
        "num_examples": len(texts["private"]),
        "test_records": len(texts["test"]),
        "batch_size": size.batch_size,
        "steps": size.steps,
        "parameters": sum(p.numel() for p in prepared.model.parameters()),
        "results": [first, *(_row(method, summaries[method.name]) for method in METHODS)],
        "statement": (folder / METHODS[-1].name / "statement.txt").read_text(encoding="utf-8"),
    }


def _fine_tuned(
    pool: ProcessPoolExecutor, queue: Any, folder: Path, common: dict[str, Any], stages: Stages
) -> dict[str, dict[str, Any]]:
    """The summary of each method's run, one after the other: two at once took longer than twice one, by trial."""
    summaries = {}
    for number, method in enumerate(METHODS, start=1):
        told = f"fine-tuning on private text, {number} of {len(METHODS)}, {method.name}"
        stages.begin(method.name, common["steps"], line=told)
        settings = {**common, **method.settings}
        if not method.private:
            settings.pop("epsilon")
        running = pool.submit(fine_tune, folder, method.name, settings)
        while not running.done():
            with contextlib.suppress(Empty):
                stages.at(queue.get(timeout=0.2))
        stages.at(common["steps"])
        summaries[method.name] = running.result()
    return summaries


def _row(method: Method, summary: dict[str, Any]) -> dict[str, Any]:
    last = summary["validation"]["last"]
    return {
        "name": method.name,
        "idea": method.idea,
        "private": method.private,
        "epsilon": summary["epsilon"],
        "loss": last["loss"],
        "perplexity": last["perplexity"],
        "seconds": summary["seconds"],
    }


def fine_tune(folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One run of `dpoptim train` from the pretrained model, in a process of its own."""
    recipe = Recipe(
        task="masked-lm",
        model=str(folder / "pretrained"),
        data=str(folder / "private.jsonl"),
        validation_data=str(folder / "test.jsonl"),
        max_length=LENGTH,
        noise="independent",
        evaluate_every=settings["steps"],
        checkpoint_every=settings["steps"],
        device="cpu",
        **settings,
    )
    return train(recipe, folder / name, progress=_Reporting())


class _Reporting(ProgressDisplay):
    """Sends steps to the process that shows them."""

    queue: Any = None

    def step(self, *, step: int, epsilon: float, seconds: float) -> None:
        _Reporting.queue.put(step)


def _worker(queue: Any) -> None:
    _Reporting.queue = queue
    torch.set_num_threads(1)


def _import_ahead() -> None:
    importlib.import_module("transformers.models.bert.modeling_bert")


def _read(pool: ProcessPoolExecutor, size: Size, stages: Stages) -> dict[str, list[str]]:
    """Public texts, private ones, and every sixth private one for the test; no text is there twice."""
    stages.begin("reading documentation strings", len(PUBLIC + PRIVATE))
    seen: set[str] = set()
    found: dict[str, list[str]] = {"public": [], "private": [], "test": []}
    limits = [size.records_per_library] * len(PUBLIC + PRIVATE)
    read = zip(PUBLIC + PRIVATE, pool.map(texts_of, PUBLIC + PRIVATE, limits), strict=True)
    for done, (library, texts) in enumerate(read, start=1):
        new = [text for text in texts if text not in seen]
        seen.update(new)
        if library in PUBLIC:
            found["public"] += new
        else:
            found["test"] += new[TEST_EVERY - 1 :: TEST_EVERY]
            found["private"] += [text for place, text in enumerate(new, 1) if place % TEST_EVERY]
        stages.at(done)
    if not found["public"] or len(found["private"]) < size.batch_size:
        raise ValueError(
            f"the sources of {', '.join(PUBLIC)} (public) and {', '.join(PRIVATE)} (private) were not found beside "
            "this installation; train on your own text with --model and --data"
        )
    return found


def _write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def show(answer: dict[str, Any]) -> None:
    """The table, which fits in 80 columns, and the guarantee."""
    console = Console()
    table = Table(title=f"Masked words of {answer['test_records']:,} texts of libraries that no run trained on")
    table.add_column("fine-tuning", no_wrap=True)
    table.add_column("how")
    for title in ("ε", "loss", "perplexity"):
        table.add_column(title, justify="right", no_wrap=True)
    best = min((row for row in answer["results"] if row["private"]), key=lambda row: row["loss"])
    for row in answer["results"]:
        style = "bold green" if row is best else "" if row["private"] else "dim"
        spent = "∞" if row["epsilon"] is None else format_epsilon(row["epsilon"])
        table.add_row(row["name"], row["idea"], spent, f"{row['loss']:.3f}", f"{row['perplexity']:.1f}", style=style)
    console.print(table)
    console.print(
        f"A BERT of {answer['parameters']:,} parameters, pretrained on {answer['public_records']:,} public texts "
        f"({', '.join(PUBLIC)}), fine-tuned on {answer['num_examples']:,} private ones ({', '.join(PRIVATE)}): "
        f"{answer['steps']} steps of {answer['batch_size']}, δ = {answer['delta']:g}. In {answer['seconds']:.0f} s.\n"
        "The test texts are outside the guarantee. Learning rates were chosen by trial on the same "
        "texts, which ε does not cover. Noise is new in every run: small differences say nothing.\n",
        highlight=False,
    )
    console.rule(f"The guarantee of {METHODS[-1].name}, from its statement.txt")
    console.print(answer["statement"], soft_wrap=True, highlight=False, markup=False, end="")
    if answer["kept"] is not None:
        console.print(f"The runs are in {answer['kept']}; each holds a noise.key, which is a secret.", highlight=False)
