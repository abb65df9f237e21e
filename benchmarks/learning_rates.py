"""Which learning rate suits which noise: held-out losses of `dpoptim train` at one epsilon.

    python benchmarks/learning_rates.py
    python benchmarks/learning_rates.py --json FILE --write FILE
    python benchmarks/learning_rates.py --from FILE --write FILE    # redo the table of earlier results

"correlated" is the default: shuffled batches with the noise of the least error. "independent" is secret Poisson
batches with independent noise. The texts are those of the demonstration, 3,851 records in 100 steps of 384; the tables
are scikit-learn's. Each rate is the largest of a run, with warm-up and linear decay. It needs scikit-learn and
transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from options import add_json, add_write, at_least, report
from record import heading, markdown_table, measure_or_read, page, save, setting
from tables import TASKS, with_dpoptim

from dpoptim.app import Recipe, read_log, train
from dpoptim.app.demo import demonstration

NOISES: dict[str, dict[str, str]] = {
    "correlated": {},
    "independent": {"noise": "independent", "sampling": "poisson"},
}
RATES = {"texts": (5e-4, 2e-3, 8e-3), "mlp": (0.01, 0.03, 0.1, 0.3), "linear": (0.01, 0.03, 0.1, 0.3)}
TABLES = ("breast cancer", "digits")
EPSILON, SEEDS = 3.0, 2


def of_table(task: str, model: str, epsilon: float, **settings: Any) -> list[float]:
    """The held-out losses of runs on a table, one per seed."""
    made = TASKS[task]()
    return [with_dpoptim(made, model, epsilon, seed, **settings)["loss"] for seed in range(SEEDS)]


def of_texts(epsilon: float, steps: int, **settings: Any) -> float:
    """The held-out loss of one run on the demonstration's texts."""
    private, test = demonstration.read_texts(demonstration.FULL)
    with tempfile.TemporaryDirectory() as folder:
        for name, texts in (("private", private), ("test", test)):
            lines = (json.dumps({"text": text}) + "\n" for text in texts)
            Path(folder, f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        recipe = Recipe(
            task="masked-lm", model=str(demonstration.MODEL), max_length=demonstration.LENGTH, epsilon=epsilon,
            data=str(Path(folder, "private.jsonl")), validation_data=str(Path(folder, "test.jsonl")), delta=1e-5,
            batch_size=384, steps=steps, evaluate_every=steps, device="cpu", **settings,
        )  # fmt: skip
        train(recipe, Path(folder, "run"))
        scores = [
            entry["loss"] for entry in read_log(Path(folder, "run", "log.jsonl")) if entry["kind"] == "evaluation"
        ]
    return float(scores[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of each task, noise and rate; save them after each."""
    record: dict[str, Any] = {**setting("cpu", options.commit), "tasks": {}}
    for task in options.tasks:
        for model in ("texts",) if task == "texts" else ("mlp", "linear"):
            what = task if task == "texts" else f"{task}, {model}"
            for name, noise in NOISES.items():
                found = record["tasks"].setdefault(what, {}).setdefault(name, {})
                for rate in RATES[model]:
                    settings = {**noise, "learning_rate": rate}
                    if task == "texts":
                        losses = [of_texts(EPSILON, options.steps, schedule="linear", **settings)]
                    else:
                        losses = of_table(task, model, EPSILON, **settings)
                    found[f"{rate:g}"] = losses
                    report(f"{what}, {name} noise, rate {rate:g}: {[round(one, 4) for one in losses]}")
                    if options.json:
                        save(record, options.json)
    return record


def markdown(record: dict[str, Any]) -> str:
    rates = sorted({rate for task in record["tasks"].values() for found in task.values() for rate in found}, key=float)
    rows = [
        [task, noise, *(f"{statistics.mean(found[rate]):.3f}" if rate in found else "-" for rate in rates)]
        for task, noises in record["tasks"].items()
        for noise, found in noises.items()
    ]
    about = f"{heading(record)}. By `python benchmarks/learning_rates.py`; its docstring explains the rows."
    what = f"Loss on held-out records at ε = {EPSILON:g}, by learning rate. Tables: means of {SEEDS} seeds."
    return page("Learning rates and noise", about, what, markdown_table(["task", "noise", *rates], rows))


def add_tasks(parser: argparse.ArgumentParser, default: tuple[str, ...]) -> None:
    known = ("texts", *TASKS)
    parser.add_argument("--tasks", nargs="+", choices=known, default=default, metavar="NAME", help=", ".join(known))
    parser.add_argument("--steps", type=at_least(1), default=100, metavar="N", help="on the texts (default: 100)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tasks(parser, ("texts", *TABLES))
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    needs = ("sklearn", "transformers")
    measure_or_read(parser, options, lambda: measure(options), markdown, "tasks", needs=needs)


if __name__ == "__main__":
    main()
