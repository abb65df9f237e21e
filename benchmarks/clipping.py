"""Clipping without tuning: held-out losses of `dpoptim train` with fixed, adaptive and normalized clipping.

    python benchmarks/clipping.py
    python benchmarks/clipping.py --json FILE --write FILE
    python benchmarks/clipping.py --from FILE --write FILE    # redo the table of earlier results

"fixed X" has clip norm X. "adaptive" and "normalized" have the defaults of `--clipping`. All other settings are the
defaults. The tasks are those of learning_rates.py; tables are trained with the model mlp.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from learning_rates import SEEDS, main, of_table, of_texts
from options import report
from record import heading, markdown_table, save

EPSILONS = (3.0, 8.0)
CLIP_NORMS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
METHODS: dict[str, dict[str, Any]] = {
    **{f"fixed {norm:g}": {"clip_norm": norm} for norm in CLIP_NORMS},
    "adaptive": {"clipping": "adaptive"},
    "normalized": {"clipping": "normalized"},
}


def measure(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Add the losses of each task, ε and method to the record, and save it after each."""
    for task in options.tasks:
        for epsilon in EPSILONS:
            found = record["tasks"].setdefault(task, {}).setdefault(f"{epsilon:g}", {})
            for name, settings in METHODS.items():
                if task == "texts":
                    found[name] = [of_texts(epsilon, options.steps, **settings)]
                else:
                    found[name] = of_table(task, "mlp", epsilon, **settings)
                report(f"{task}, epsilon {epsilon:g}, {name}: {[round(one, 4) for one in found[name]]}")
                if options.json:
                    save(record, options.json)


def markdown(record: dict[str, Any]) -> str:
    rows = []
    for task, epsilons in record["tasks"].items():
        for epsilon, found in epsilons.items():
            losses = {name: statistics.mean(own) for name, own in found.items()}
            best = min((name for name in losses if name.startswith("fixed")), key=losses.__getitem__)
            others = [
                f"{losses[name]:.3f} ({losses[name] / losses[best] - 1:+.1%})" for name in ("adaptive", "normalized")
            ]
            rows.append([task, epsilon, *(f"{losses[f'fixed {norm:g}']:.3f}" for norm in CLIP_NORMS), best, *others])
    lines = [
        "# Clipping without tuning",
        "",
        f"{heading(record)}. By `python benchmarks/clipping.py`; its docstring explains the columns.",
        "",
        f"Loss on held-out records, and in brackets over the best fixed clip norm. Tables: means of {SEEDS} seeds.",
        "",
        *markdown_table(
            ["task", "ε", *(f"fixed {norm:g}" for norm in CLIP_NORMS), "best fixed", "adaptive", "normalized"], rows
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main("clipping.py", __doc__, measure, markdown)
