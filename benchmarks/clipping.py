"""Clipping without tuning: held-out losses of `dpoptim train` with fixed, adaptive and normalized clipping.

    python benchmarks/clipping.py
    python benchmarks/clipping.py --tasks digits patients --seeds 3
    python benchmarks/clipping.py --json FILE --write FILE
    python benchmarks/clipping.py --from FILE --write FILE    # redo the table of earlier results

"fixed X" has clip norm X. "adaptive" and "normalized" have the defaults of `--clipping`, "adaptive from X" starts at X.
All other settings are the defaults. Tasks are tables of tables.py, trained with the model mlp, and the texts of
learning_rates.py, which are not in the default tasks because they take an hour.

The runs of a seed have the same weights, batches and noise, so that their differences show the clipping. For each seed,
the tuned norm is the fixed one that is best on all other seeds, so that luck in the choice does not count. After ± is
the standard error of the difference. Few seeds make it rough.

The defaults of "adaptive" were chosen on these tasks and on patients, with other seeds, in a faster simulation. So the
tasks are not new to them.
"""

from __future__ import annotations

import argparse
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import torch
from learning_rates import add_tasks, of_texts
from options import add_json, add_write, at_least, report
from record import heading, markdown_table, measure_or_read, page, save, setting
from tables import TASKS, with_dpoptim

TABLES = ("breast cancer", "digits", "friedman")
EPSILONS = (3.0, 8.0)
CLIP_NORMS = (0.1, 0.3, 1.0, 2.0, 3.0, 10.0)
UNTUNED: dict[str, dict[str, Any]] = {
    "adaptive": {"clipping": "adaptive"},
    "normalized": {"clipping": "normalized"},
}
STARTS: dict[str, dict[str, Any]] = {
    f"adaptive from {start:g}": {"clipping": "adaptive", "clip_norm": start} for start in (0.1, 10.0)
}
METHODS = {**{f"fixed {norm:g}": {"clip_norm": norm} for norm in CLIP_NORMS}, **UNTUNED, **STARTS}


def loss_of(task: str, epsilon: float, steps: int, method: str, seed: int) -> float:
    """The held-out loss of one run, whose noise is the same for all methods."""
    torch.set_num_threads(1)
    with mock.patch("os.urandom", lambda count: random.Random(seed).randbytes(count)):  # key and run_id
        if task == "texts":
            return of_texts(epsilon, steps, seed=seed, schedule="linear", **METHODS[method])
        return with_dpoptim(TASKS[task](), "mlp", epsilon, seed, **METHODS[method])["loss"]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of each task, ε and method; save them after each."""
    record: dict[str, Any] = {**setting("cpu", options.commit), "tasks": {}}
    with ProcessPoolExecutor(options.workers) as pool:
        for seed in range(options.seeds):
            for task in options.tasks:
                for epsilon in EPSILONS:
                    found = record["tasks"].setdefault(task, {}).setdefault(f"{epsilon:g}", {})
                    losses = list(pool.map(partial(loss_of, task, epsilon, options.steps, seed=seed), METHODS))
                    for name, loss in zip(METHODS, losses, strict=True):
                        found.setdefault(name, []).append(loss)
                    report(f"{task}, epsilon {epsilon:g}, seed {seed}: {[round(one, 4) for one in losses]}")
                    if options.json:
                        save(record, options.json)
    return record


def tuned(found: dict[str, list[float]]) -> tuple[list[str], list[float]]:
    """For each seed, the fixed clip norm that is best on all other seeds, and its loss on this one."""
    fixed = [name for name in found if name.startswith("fixed")]
    names = []
    for seed in range(len(found["adaptive"])):
        others = {name: sum(found[name]) - found[name][seed] for name in fixed}
        names.append(min(fixed, key=others.__getitem__))
    return names, [found[name][seed] for seed, name in enumerate(names)]


def over(losses: list[float], others: list[float]) -> str:
    """How much larger the mean loss is, with the standard error of the difference."""
    differences = [one - other for one, other in zip(losses, others, strict=True)]
    mean, count = statistics.mean(others), len(differences)
    error = statistics.stdev(differences) / count**0.5 / mean
    return f"{statistics.mean(differences) / mean:+.1%} ± {error:.1%}"


def markdown(record: dict[str, Any]) -> str:
    rows, means = [], []
    for task, epsilons in record["tasks"].items():
        for epsilon, found in epsilons.items():
            names, best = tuned(found)
            how = ", ".join(dict.fromkeys(name.removeprefix("fixed ") for name in names))
            untuned = [over(found[name], best) for name in (*UNTUNED, *STARTS)]
            rows.append([task, epsilon, str(len(best)), f"{statistics.mean(best):.4f} at {how}", *untuned])
            means.append([task, epsilon, *(f"{statistics.mean(found[name]):.4f}" for name in METHODS)])
    return page(
        "Clipping without tuning",
        f"{heading(record)}. By `python benchmarks/clipping.py`; its docstring explains the columns.",
        "Loss on held-out records: of the tuned fixed clip norm, and by how much that of other methods is larger.",
        markdown_table(["task", "ε", "seeds", "tuned", *UNTUNED, *STARTS], rows),
        "Means of all seeds:",
        markdown_table(["task", "ε", *METHODS], means),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tasks(parser, TABLES)
    parser.add_argument("--seeds", type=at_least(2), default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--workers", type=at_least(1), default=2, metavar="N", help="runs at a time (default: 2)")
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    needs = ("sklearn", "transformers")
    measure_or_read(parser, options, lambda: measure(options), markdown, "tasks", needs=needs)


if __name__ == "__main__":
    main()
