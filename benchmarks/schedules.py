"""Schedules of the learning rate and averaged weights: held-out losses of `dpoptim train` at one epsilon.

    apt-get install dataset-fashion-mnist
    python benchmarks/schedules.py
    python benchmarks/schedules.py --tasks texts --json FILE --write FILE
    python benchmarks/schedules.py --from FILE --write FILE    # redo the table of earlier results

Every row may choose among four learning rates; the table shows the best. "wsd" has the same warm-up as linear decay,
and decays over the last 30 % of the steps only. "averaged" scores a moving average of the weights. The texts are those
of the demonstration, 3,851 records in 100 steps of 384. The images are 3,000 of Fashion-MNIST for `small-cnn`, in as
many steps of 300. All other settings are the defaults. Seeds change new weights and masks, and every run has its own
noise. Rows of one seed begin with the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from learning_rates import EPSILON, of_texts
from options import add_json, add_write, at_least, report
from record import bullets, heading, markdown_table, measure_or_read, page, save, setting

from dpoptim.app import Recipe, read_log, train
from experiments.fashion_mnist.data import PACKAGE, check, images_for

DECAY = 0.95
ROWS: dict[str, dict[str, Any]] = {
    "linear decay": {"schedule": "linear"},
    "wsd (the default)": {"schedule": "wsd"},
    "constant": {"schedule": "constant", "warmup": 0.0},
    "constant, averaged": {"schedule": "constant", "warmup": 0.0, "averaged": DECAY},
}
BASE = next(iter(ROWS))
RATES = {"texts": (4e-3, 8e-3, 1.6e-2, 3.2e-2), "images": (1e-2, 2e-2, 4e-2, 8e-2)}
IMAGES = {"private": 3000, "test": 1000}


def of_images(steps: int, **settings: Any) -> float:
    """The held-out loss of one run on images."""
    from PIL import Image

    pixels = images_for("cnn", PACKAGE, "cpu", num_examples=IMAGES["private"], test=True)
    parts = {"private": (pixels.train, pixels.train_labels), "test": (pixels.scored, pixels.scored_labels)}
    with tempfile.TemporaryDirectory() as folder:
        for part, (images, labels) in parts.items():
            for number in range(IMAGES[part]):
                place = Path(folder, part, f"class_{int(labels[number])}")
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(((images[number, 0] + 1) * 127.5).byte().numpy()).save(place / f"{number}.png")
        recipe = Recipe(
            task="image-classification", model="small-cnn", data=str(Path(folder, "private")), epsilon=EPSILON,
            validation_data=str(Path(folder, "test")), delta=1e-5, batch_size=300, steps=steps, evaluate_every=steps,
            device="cpu", **settings,
        )  # fmt: skip
        train(recipe, Path(folder, "run"))
        scores = [
            entry["loss"] for entry in read_log(Path(folder, "run", "log.jsonl")) if entry["kind"] == "evaluation"
        ]
    return float(scores[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of each task, row and rate, one per seed; save them after each."""
    record: dict[str, Any] = {**setting("cpu", options.commit), "tasks": {}}
    for task in options.tasks:
        rows = record["tasks"].setdefault(task, {name: {f"{rate:g}": [] for rate in RATES[task]} for name in ROWS})
        for seed in range(options.seeds):
            for name, settings in ROWS.items():
                for rate in RATES[task]:
                    own = {**settings, "learning_rate": rate, "seed": seed}
                    loss = (
                        of_texts(EPSILON, options.steps, **own) if task == "texts" else of_images(options.steps, **own)
                    )
                    rows[name][f"{rate:g}"].append(loss)
                    report(f"{task}, seed {seed}, {name}, rate {rate:g}: {loss:.4f}")
                    if options.json:
                        save(record, options.json)
    return record


def best(losses: dict[str, list[float]]) -> tuple[str, list[float]]:
    """The rate with the lowest mean, and its losses."""
    return min(losses.items(), key=lambda each: statistics.mean(each[1]))


def markdown(record: dict[str, Any]) -> str:
    rows = []
    for task, found in record["tasks"].items():
        base = best(found[BASE])[1]
        for name in ROWS:
            rate, losses = best(found[name])
            more = [a - b for a, b in zip(losses, base, strict=True)]
            error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 and name != BASE else None
            difference = "" if error is None else f"{statistics.mean(more):+.3f} ± {error:.3f}"
            edge = "*" if rate == list(found[name])[-1] else ""
            rows.append([task, name, f"{statistics.mean(losses):.3f}", difference, rate + edge, str(len(losses))])
    titles = ["task", "schedule", "loss", "minus linear decay", "best rate", "seeds"]
    about = f"{heading(record)}. By `python benchmarks/schedules.py`; its docstring explains the rows."
    notes = [
        f"Held-out losses at ε = {EPSILON:g}, δ = 1e-5, blanking one record: means over seeds. Differences are paired "
        "by seed, with their standard error. * is the largest rate that was tried.",
        f"The moving average has a decay of {DECAY:g}.",
    ]
    return page("Schedules and averaged weights", about, markdown_table(titles, rows), bullets(notes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", nargs="+", choices=RATES, default=tuple(RATES), metavar="NAME", help=", ".join(RATES)
    )
    parser.add_argument("--steps", type=at_least(1), default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="(default: 3)")
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "images" in options.tasks and not options.earlier:
        check(PACKAGE)
    measure_or_read(parser, options, lambda: measure(options), markdown, "tasks", needs=("transformers", "PIL"))


if __name__ == "__main__":
    main()
