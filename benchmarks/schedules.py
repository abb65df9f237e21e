"""Learning-rate schedules and averaged weights: held-out losses of `dpoptim train` at one epsilon.

    python benchmarks/schedules.py
    python benchmarks/schedules.py --json FILE --write FILE
    python benchmarks/schedules.py --from FILE --write FILE    # redo the table of earlier results

Every row has the same four learning rates to choose from, and the table shows the best of them. All other settings are
the defaults. The tasks are those of learning_rates.py; tables are trained with the model mlp.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from learning_rates import EPSILON, SEEDS, main, of_table, of_texts
from options import report
from record import heading, markdown_table, save

DECAY = 0.95
RATES = {"texts": (2e-3, 4e-3, 8e-3, 1.6e-2), "tables": (0.03, 0.1, 0.3, 1.0)}
ROWS: dict[str, dict[str, Any]] = {
    "constant": {"schedule": "constant", "warmup": 0.0},
    "constant, averaged": {"schedule": "constant", "warmup": 0.0, "averaged": DECAY},
    "linear": {"schedule": "linear", "warmup": 0.0},
    "linear with warm-up, the default": {},
    "linear with warm-up, averaged": {"averaged": DECAY},
    "cosine with warm-up": {"schedule": "cosine"},
}


def measure(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Add the losses of each task, row and rate to the record, and save it after each."""
    for task in options.tasks:
        rows = record["tasks"].setdefault(task, {})
        for name, settings in ROWS.items():
            found = rows.setdefault(name, {})
            for rate in RATES["texts" if task == "texts" else "tables"]:
                if task == "texts":
                    losses = [of_texts(EPSILON, options.steps, **settings, learning_rate=rate)]
                else:
                    losses = of_table(task, "mlp", EPSILON, **settings, learning_rate=rate)
                found[f"{rate:g}"] = losses
                report(f"{task}, {name}, rate {rate:g}: {[round(one, 4) for one in losses]}")
                if options.json:
                    save(record, options.json)


def markdown(record: dict[str, Any]) -> str:
    def best(losses: dict[str, list[float]]) -> str:
        means = {rate: statistics.mean(own) for rate, own in losses.items()}
        rate = min(means, key=means.__getitem__)
        return f"{means[rate]:.3f} at {rate}"

    tasks = record["tasks"]
    lines = [
        "# Schedules and averaged weights",
        "",
        f"{heading(record)}. By `python benchmarks/schedules.py`; its docstring explains the rows.",
        "",
        f"Loss on held-out records at ε = {EPSILON:g} and the best learning rate, which follows. The average has "
        f"a decay of {DECAY:g}. Tables: means of {SEEDS} seeds.",
        "",
        *markdown_table(["schedule", *tasks], [[row, *(best(found[row]) for found in tasks.values())] for row in ROWS]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("schedules.py", __doc__, measure, markdown)
