"""Tables and a picture: accuracy of every method at equal ε, time per step, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpoptim.app.comparison.intervals import mean_interval
from experiments import plot_style as style
from experiments.fashion_mnist.cells import DELTA, ROWS, Row, fastest, of
from experiments.fashion_mnist.models import MODELS
from experiments.markdown import made_by, number, table
from experiments.results_file import Line

_SCALED = style.METHODS["scale_then_privatize"]
LOOKS = {"opacus_dp_sgd": (style.METHODS["dp_sgd"], "--"), "opacus_dp_adam": (style.METHODS["post_processing"], "--"),
         "default": (_SCALED, "-."), "cyclic": (_SCALED, ":")}  # fmt: skip
"""Colour and line style of rows that are not a method of `plot_style`."""
SAMPLING = {"Poisson": "Poisson, independent", "default": "shuffled, chosen", "cyclic": "secret, chosen"}


def markdown(lines: Sequence[Line]) -> str:
    """What was compared, a table per model, and the picture."""
    scale, private = lines[0]["scale"], [row for row in ROWS if row.library != "PyTorch"]
    trials = sorted({len(of(lines, "search", model, row.name)) for model in _models(lines) for row in private})
    parts = [
        "" if scale == "paper" else f"**Made at scale {scale}: this shows the layout, not the result.**",
        made_by(lines, f"python -m experiments fashion_mnist --scale {scale}"),
        f"Test accuracy in percent at δ = {number(DELTA)}, mean and 95 % interval over seeds. Settings (learning rate, "
        f"clip norm) tried per private row, at ε = 3 on held-out training images: {' or '.join(map(str, trials))}. "
        "Poisson rows protect against adding or removing one image, as Opacus does, the others against blanking one. "
        "Time and memory are those of a run alone on the device, in Opacus's fastest mode.",
        accuracy_tables(lines),
        "![test accuracy against ε, for every model and method](images/fashion_mnist-accuracy.png)",
    ]
    return "\n\n".join(part for part in (parts if pictures(lines) else parts[:-1]) if part)


def accuracy_tables(lines: Sequence[Line]) -> str:
    """For each model, its best rows and a table."""
    return "\n\n".join(
        f"**{MODELS[model].label}.** {_best(lines, model)}\n\n{_table(lines, model)}" for model in _models(lines)
    )


def short_tables(lines: Sequence[Line]) -> str:
    """For each model, accuracy and time alone."""
    tables = []
    for model in _models(lines):
        epsilons, rows, times = _epsilons(lines, model), [], fastest(lines)
        for row in ROWS:
            found, ms = accuracies(lines, model, row.name), times.get((model, row.name), {}).get("ms_per_step")
            shown = [_shown(found.get(0.0 if row.library == "PyTorch" else epsilon)) for epsilon in epsilons]
            rows.append([row.label, *shown, number(ms, 2)])
        titles = [MODELS[model].label, *(f"ε = {epsilon:g}" for epsilon in epsilons), "ms per step"]
        tables.append(table(titles, rows))
    return "\n\n".join(tables)


def accuracies(lines: Sequence[Line], model: str, row: str) -> dict[float, list[float]]:
    """Test accuracies, seed by seed, by ε (0 stands for no privacy)."""
    found: dict[float, list[float]] = {}
    for line in of(lines, "final", model, row):
        found.setdefault(line["cell"].get("epsilon", 0.0), []).append(line["result"]["accuracy"])
    return found


def _means(lines: Sequence[Line], model: str, rows: Sequence[Row], epsilon: float) -> dict[str, float]:
    """The mean accuracy by the label of the row, where there is one."""
    found = {row.label: accuracies(lines, model, row.name).get(epsilon) for row in rows}
    return {label: mean_interval(values).mean for label, values in found.items() if values}


def _best(lines: Sequence[Line], model: str) -> str:
    """The best row of either library at each ε, with independent noise for both, and the accuracy without privacy."""
    texts = []
    for epsilon in _epsilons(lines, model):
        for library in ("dpoptim", "Opacus"):
            rows = [row for row in ROWS if (row.library, row.noise) == (library, "Poisson")]
            if means := _means(lines, model, rows, epsilon):
                label = max(means, key=means.__getitem__)
                texts.append(f"{library} {means[label]:.2f} at ε = {epsilon:g} ({label.removeprefix('Opacus, ')})")
    free = [f"{mean:.2f} without privacy" for mean in _means(lines, model, ROWS, 0.0).values()]
    return (
        f"Best with Poisson samples and independent noise, of four rows and Opacus's two: {'; '.join(texts + free)}."
        if texts
        else ""
    )


def _table(lines: Sequence[Line], model: str) -> str:
    epsilons, rows = _epsilons(lines, model), []
    for row in ROWS:
        found, speed = accuracies(lines, model, row.name), fastest(lines).get((model, row.name), {})
        if row.library == "PyTorch" or not (found or speed):
            continue
        mode = f" ({speed['mode']})" if "mode" in speed else ""
        rows.append([
            row.label, SAMPLING[row.noise], *(_shown(found.get(epsilon)) for epsilon in epsilons),
            number(speed.get("ms_per_step"), 3) + mode, number(speed.get("gib"), 3),
            next((_setting(row, line["cell"]) for line in of(lines, "final", model, row.name)), "–"),
        ])  # fmt: skip
    by_epsilon = [f"ε = {epsilon:g}" for epsilon in epsilons]
    return table(["method", "batches, noise", *by_epsilon, "ms per step", "GiB", "lr, clip norm"], rows, left=2)


def _shown(values: Sequence[float] | None) -> str:
    if values is None:
        return "–"
    found = mean_interval(values)
    return f"{found.mean:.2f}" + ("" if found.half_width is None else f" ± {found.half_width:.2f}")


def _setting(row: Row, cell: Mapping[str, Any]) -> str:
    """The chosen setting; a rate at an end of its grid might have been better beyond it."""
    rates = [lr for lr, clip_norm in row.settings() if clip_norm == cell["clip_norm"]]
    end = " (end of its grid)" if cell["lr"] in (rates[0], rates[-1]) else ""
    return f"{number(cell['lr'], 3)}{end}, {number(cell['clip_norm'])}"


def _models(lines: Sequence[Line]) -> list[str]:
    """The models with final runs, or all models if there are none yet."""
    seen = {line["cell"]["model"] for line in of(lines, "final") or lines}
    return [model for model in MODELS if model in seen]


def _epsilons(lines: Sequence[Line], model: str) -> list[float]:
    return sorted({line["cell"]["epsilon"] for line in of(lines, "final", model) if "epsilon" in line["cell"]})


def pictures(lines: Sequence[Line]) -> Mapping[str, Callable[[], Any]]:
    """One picture, once there are final runs."""
    return {"accuracy": lambda: draw(lines)} if any(_epsilons(lines, model) for model in _models(lines)) else {}


def draw(lines: Sequence[Line]) -> Any:
    """A panel per model: mean accuracy against ε, with bars from the worst to the best seed."""
    models = [model for model in _models(lines) if _epsilons(lines, model)]
    figure = style.new_figure(4.2 * len(models) + 1, 4.4)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        for row in ROWS:
            found = sorted(accuracies(lines, model, row.name).items())
            if found and row.library == "PyTorch":
                axes.axhline(mean_interval(found[0][1]).mean, color=style.BLACK, lw=1, label=row.label)
            elif found:
                colour, dashes = LOOKS.get(row.name) or (style.METHODS[row.name], "-")
                means = [mean_interval(values).mean for _, values in found]
                reach = [[abs(end(values) - mean) for (_, values), mean in zip(found, means, strict=True)]
                         for end in (min, max)]  # fmt: skip
                axes.errorbar([epsilon for epsilon, _ in found], means, reach, color=colour, ls=dashes, marker="o",
                              ms=4, label=row.label)  # fmt: skip
        style.label(axes, MODELS[model].label, "ε", "test accuracy, %", log="x")
        ticks = _epsilons(lines, model)
        axes.set_xticks(ticks, [f"{epsilon:g}" for epsilon in ticks])
        axes.minorticks_off()
    style.legend_below(figure, *panels, columns=3)
    return figure
