"""The built-in demonstration: fine-tune a small BERT on private text, with and without privacy.

The model comes with the package and was trained on public documentation strings by `experiments/demo/make_model.py`.
The private texts are documentation strings of two other libraries, one record per string. Each way of fine-tuning is an
ordinary run of `dpoptim train` at the same (ε, δ). Scores are on other texts, outside the guarantee, and ε holds for
each model by itself. Learning rates and steps were chosen on the same texts; ε does not cover that choice.
"""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from dpoptim.app.demo.text import texts_of
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.report.page import write_report
from dpoptim.app.runs.run import train
from dpoptim.app.runs.run_log import read_runs
from dpoptim.arguments import check_delta
from dpoptim.data.processes import check_alone
from dpoptim.integrations.optional import require
from dpoptim.privacy.statement import format_epsilon

MODEL = Path(__file__).parent / "model"
LIBRARIES = ("sympy", "networkx")  # installed with torch
LENGTH = 24  # tokens per record
LETTERS = 150  # per record: more than make up those tokens
TEST_EVERY = 6  # one record in six is held out


class Size(NamedTuple):
    """How much to do."""

    texts_per_library: int
    batch_size: int
    steps: int


FULL = Size(texts_per_library=3000, batch_size=384, steps=10)
QUICK = Size(texts_per_library=150, batch_size=32, steps=3)
NOT_PRIVATE = "not_private"
METHODS = {
    "post_processing": "Adam on the noisy gradient",
    "bias_correction": "subtracts the noise's part of the second moment",
    "independent_moments": "separate noise for the squared gradient",
    "scale_then_privatize": "applies Adam's scaling before clipping and noise",
    NOT_PRIVATE: "Adam without clipping and noise",
}


def main(*, json_wanted: bool, quick: bool, console: Console, keep: str | None = None, **over: Any) -> int:
    """Run the demonstration into the folder `keep`, print a table or JSON, and return the exit code."""
    require("transformers", "the demonstration")
    check_alone("the demonstration")
    size = QUICK if quick else FULL
    settings: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "seed": 0, **over}
    Recipe(model="demo", data="demo", **settings)  # refuses bad values before the work
    folder = Path(keep or f"runs/demo-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    torch.set_num_threads(1)  # two threads spend more time waiting than such a small model computes
    began = time.perf_counter()
    progress = ProgressReporter(console, brief=True)
    progress.message(f"a demonstration, because no model or data is given: reading {' and '.join(LIBRARIES)} ...")
    private, test = read_texts(size)
    check_delta(settings["delta"], len(private))
    folder.mkdir(parents=True)
    for name, texts in (("private", private), ("test", test)):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    results: list[dict[str, Any]] = []
    for number, (name, idea) in enumerate(METHODS.items(), start=1):
        progress.message(f"fine-tuning {number} of {len(METHODS)}: {name} ...")
        summary = train(recipe_of(name, folder, size, settings), folder / name, progress=progress)
        if summary["reason"] != "finished":
            return 128 + summary.get("signal", 2)
        before, after = (summary["validation"][place]["loss"] for place in ("first", "last"))
        spent = {"private": name != NOT_PRIVATE, "epsilon": summary["epsilon"]}
        results.append({"name": name, "idea": idea, **spent, "loss": after})
    results.insert(0, {"name": "none", "idea": "the public model", "private": True, "epsilon": 0.0, "loss": before})
    runs = read_runs([folder / name for name in METHODS])
    report = write_report(runs, folder / "report.html")
    answer = {
        "epsilon": settings["epsilon"],
        "delta": settings["delta"],
        "num_examples": len(private),
        "test_records": len(test),
        "batch_size": size.batch_size,
        "steps": size.steps,
        "adjacency": runs[0].plan.adjacency.value,
        "sampling": type(runs[0].plan.sampling).__name__,
        "results": results,
        "seconds": time.perf_counter() - began,
        "report": str(report),
    }
    if json_wanted:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        show(answer)
    return 0


def read_texts(size: Size) -> tuple[list[str], list[str]]:
    """The private texts, and the test texts; no text occurs twice."""
    found = (text[:LETTERS] for name in LIBRARIES for text in texts_of(name, size.texts_per_library))
    texts = list(dict.fromkeys(found))
    test = texts[TEST_EVERY - 1 :: TEST_EVERY]
    private = [text for place, text in enumerate(texts, 1) if place % TEST_EVERY]
    if len(private) < size.batch_size:
        raise ValueError(f"the demonstration needs the sources of {' and '.join(LIBRARIES)}, which are not installed")
    return private, test


def recipe_of(method: str, folder: Path, size: Size, settings: dict[str, Any]) -> Recipe:
    changes: dict[str, Any] = {**settings, "variant": method, "learning_rate": 5e-3}
    if method == NOT_PRIVATE:
        changes |= {"variant": "post_processing", "learning_rate": 4e-3}
        changes |= {"epsilon": None, "noise_multiplier": 0.0, "clip_norm": 1e6}
    return Recipe(
        task="masked-lm",
        model=str(MODEL),
        data=str(folder / "private.jsonl"),
        validation_data=str(folder / "test.jsonl"),
        max_length=LENGTH,
        noise="independent",
        batch_size=size.batch_size,
        steps=size.steps,
        evaluate_every=size.steps,
        checkpoint_every=size.steps,
        device="cpu",
        **changes,
    )


def show(answer: dict[str, Any]) -> None:
    """Print the table, which fits in 80 columns, the guarantee and the report's path."""
    console = Console()
    table = Table(title=f"Loss on the masked words of {answer['test_records']:,} held-out texts")
    table.add_column("fine-tuning", no_wrap=True)
    table.add_column("idea")
    for name in ("ε", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    best = min((row for row in answer["results"] if row["private"]), key=lambda row: row["loss"])
    for row in answer["results"]:
        style = "bold green" if row is best else "" if row["private"] else "dim"
        epsilon = "∞" if row["epsilon"] is None else format_epsilon(row["epsilon"])
        table.add_row(row["name"], row["idea"], epsilon, f"{row['loss']:.3f}", style=style)
    console.print(table)
    console.print(
        f"Each private run: ε = {answer['epsilon']:g} at δ = {answer['delta']:g}, "
        f"{answer['adjacency'].replace('_', '-')} adjacency, "
        f"{answer['sampling']} sampling of about {answer['batch_size']} of {answer['num_examples']:,} texts in "
        f"{answer['steps']} steps\nreport: {answer['report']} ({answer['seconds']:.0f} s)",
        highlight=False,
        soft_wrap=True,
    )
