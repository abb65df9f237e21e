"""The report of the table with scheduled learning rates: losses, larger batches, claims, and where the search ended.

A claim is decided by seeds and by tuning. A parabola through the best learning rate and the next ones on either side
estimates how much lower a place would be if its rate were tuned perfectly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.framework import MissingInput, marks_named, replaced
from experiments.markdown import made_by, table, thousandths
from experiments.results_file import Line
from experiments.tinybert.grid import CURVE, DELTA, EPSILONS, SIZES, column, row
from experiments.tinybert.report import (
    CLAIMS,
    Claim,
    Gains,
    Scores,
    behind,
    by_place,
    claims_table,
    command,
    epsilons,
    main_table,
    margin_over,
    mean,
    scores,
    shown_losses,
)
from experiments.tinybert.schedule import Place, Setting, on_edge, setting_of, tuning_losses, wanted
from experiments.tinybert.scheduled import (
    BUDGET,
    FINAL,
    ROWS_SCHEDULED,
    SEARCH,
    SIZES_SCHEDULED,
    at_full_size,
    best_setting,
    lines_in,
    places_scheduled,
    row_scheduled,
)

LARGER_BATCHES = tuple(
    (name, (noise, f"{noise}_x4", f"{noise}_x16"))
    for noise in ("banded", "independent")
    for name in ("scale_then_privatize", "post_processing", "dp_sgd")
)
"""Rows whose batches grow, and their columns."""
CLAIMS_SCHEDULED = (
    *CLAIMS,
    Claim(
        "bias correction is better than post-processing (in the paper only with little noise): ahead by",
        ("bias_correction", "post_processing"),
        behind("post_processing", "bias_correction"),
    ),
    Claim(
        "(ours) and better than post-processing with ε_s tuned: ahead by",
        ("bias_correction", "post_processing_eps"),
        behind("post_processing_eps", "bias_correction"),
        ours=True,
    ),
)


def render(page: Path | None, out: Path, scale: str) -> None:
    """Put the report between its marks in a page, or print it without a page."""
    lines, search, constant = (lines_in(out, name, scale) for name in (FINAL, SEARCH, "tinybert"))
    if not lines or not search:
        raise MissingInput(f"{out} has no final runs of scale {scale}; run `search` and `final` first")
    report = markdown(lines, search, constant)
    if page is None:
        print(report)
        return
    text = page.read_text(encoding="utf-8")
    page.write_text(replaced(text, *marks_named(text, FINAL), report), encoding="utf-8")


def markdown(lines: Sequence[Line], search: Sequence[Line], constant: Sequence[Line]) -> str:
    """The whole section; `constant` are the lines of the table with constant rates."""
    scale = lines[0]["scale"]
    best = at_best_settings(lines)
    found = scores(best)
    gains = {place: gain_at(lines, search, place, scale) for place in found if place != ("none", "none")}
    parts = [
        _what(lines, scale),
        main_table(best),
        _other_losses(best, found),
        _larger_batches(found, gains, scale),
        _curve(found),
        _claims(lines, found, gains),
        _against_constant(best, constant, scale),
        _settings(lines, search, gains, scale),
        *(made_by(own, command(f"experiments.tinybert.scheduled {what}", own))
          for what, own in (("final", lines), ("search", search))),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def best_at_full_size(lines: Sequence[Line], place: Place) -> Setting | None:
    """The setting with the best validation loss among the final runs of the first seed that did not diverge."""
    tried = {setting: loss for setting, loss in at_full_size(lines, place).items() if math.isfinite(loss)}
    return min(tried, key=lambda setting: tried[setting], default=None)


def at_best_settings(lines: Sequence[Line]) -> list[Line]:
    """The final runs with the best setting of their place, and the model without fine-tuning."""
    best = {place: best_at_full_size(lines, place) for place in places_scheduled()}
    return [line for line in lines if line["cell"]["purpose"] != "final"
            or setting_of(line["cell"]) == best[line["cell"]["row"], line["cell"]["column"]]]  # fmt: skip


def rates_at_full_size(lines: Sequence[Line], place: Place) -> list[float]:
    """The learning rates of the final runs of the first seed, the best first."""
    tried = at_full_size(lines, place)
    return [dict(setting)["lr"] for setting in sorted(tried, key=lambda setting: tried[setting])]


# How much better tuning could be.


def beside_best(losses: Mapping[float, float]) -> dict[float, float]:
    """The best learning rate and the next ones on either side, as far as they were tried.

    >>> beside_best({0.1: 3.5, 0.2: 3.4, 0.5: 3.6, 1.0: 4.0})
    {0.1: 3.5, 0.2: 3.4, 0.5: 3.6}
    """
    rates = sorted(losses)
    at = min(range(len(rates)), key=lambda index: losses[rates[index]])
    return {rate: losses[rate] for rate in rates[max(at - 1, 0) : at + 2]}


def gain(losses: Mapping[float, float]) -> float | None:
    """The best loss minus the minimum of a parabola through it and its neighbours, over the logarithm of the rate.

    None if a neighbour is missing or diverged.

    >>> round(gain({1.0: 3.25, math.e: 3.0, math.e**2: 3.25}), 6), gain({1.0: 3.0, 2.0: 3.1})
    (0.0, None)
    """
    near = beside_best(losses)
    if len(near) < 3 or not all(map(math.isfinite, near.values())):
        return None
    (low, below), (best, least), (high, above) = near.items()
    left, right = (below - least) / math.log(low / best), (above - least) / math.log(high / best)
    curvature = (right - left) / math.log(high / low)
    slope = left - curvature * math.log(low / best)  # of the parabola at the best rate
    return slope**2 / (4 * curvature)


def gain_at(lines: Sequence[Line], search: Sequence[Line], place: Place, scale: str) -> float | None:
    """The gain of a place at full size if both neighbours of its best rate were run there, or else in the search."""
    best = best_at_full_size(lines, place)
    assert best is not None
    full, tuned = (  # the rate is the first in a setting
        {dict(setting)["lr"]: loss for setting, loss in tried.items() if setting[1:] == best[1:]}
        for tried in (at_full_size(lines, place), tuning_losses(search, place, SIZES_SCHEDULED[scale]))
    )
    return gain(full if len(beside_best(full)) == 3 else tuned)


# The parts of the section.


def _what(lines: Sequence[Line], scale: str) -> str:
    final = [line for line in lines if line["cell"]["purpose"] == "final"]
    return (
        f"{len(final)} final runs, of {SIZES_SCHEDULED[scale].steps} steps unless batches are larger. Losses are means "
        f"over the masked tokens of {lines[0]['result']['test_examples']:,} test texts, after the last step. ± is "
        "Student's 95 % interval over seeds; a loss without it has one seed. A dash is a run that is not there yet."
    )


def _other_losses(best: Sequence[Line], found: Scores) -> str:
    """The mean over texts, and what averaging weights changes."""
    examples = scores(best, lambda result: result["test"]["examples"])
    averaged = scores(best, lambda result: result.get("test_average", result["test"])["tokens"])
    moved = {place: mean(averaged[place]) - mean(found[place]) for place in found if place != ("none", "none")}
    moved = {place: by for place, by in moved.items() if math.isfinite(by)}
    if not moved:
        return ""
    least, most = (choose(moved, key=lambda place: moved[place]) for choose in (min, max))
    titles, rows = by_place(
        "mean over texts (averaged weights minus last)",
        lambda place: f"{shown_losses(examples[place])} ({thousandths(moved[place])})" if place in moved else "–",
    )
    return (
        "The same runs by the mean over texts of each text's mean. In parentheses: what exponential averages of the "
        "weights change in the loss over tokens. Over all runs that is "
        f"{' to '.join(f'{thousandths(moved[place])} ({_named(place)})' for place in (least, most))}.\n\n"
        + table(titles, rows)
    )


def _named(place: Place) -> str:
    return f"{row(place[0]).label}, {column(place[1]).label}"


def _larger_batches(found: Scores, gains: Gains, scale: str) -> str:
    rows = []
    for name, columns in LARGER_BATCHES:
        first, *others = [(name, each) for each in columns]
        cells = [shown_losses(found[first]) if first in found else "–"]
        for place in others:
            own = {"larger": place, "first": first}
            change = margin_over(
                behind("larger", "first"),
                {key: found.get(each, {}) for key, each in own.items()},
                {key: gains.get(each) or 0.0 for key, each in own.items()},
            )
            shown = "–" if change is None else change.in_brackets()
            cells.append(f"{shown_losses(found[place])} ({shown})" if place in found else "–")
        rows.append([row(name).label, column(columns[0]).label, *cells])
    batches = [f"{SIZES_SCHEDULED[scale].batch_size * column(each).larger}" for each in LARGER_BATCHES[0][1]]
    return (
        "**Larger batches.** As many passes over the texts in fewer steps, at the same σ and ε. In parentheses is the "
        f"change from a batch of {batches[0]}; brackets are as for the claims below. BandMF has fewer bands in fewer "
        "steps.\n\n" + table(["test loss", "noise", *batches], rows, left=2)
    )


def _curve(found: Scores) -> str:
    """Losses by ε of the rows and noises of the curve that have runs."""
    kinds = dict.fromkeys(each.name.rpartition("_at_")[0] for each in CURVE)
    rows = []
    for each in ROWS_SCHEDULED:
        for kind in kinds:
            losses = [found.get((each.name, f"{kind}_at_{epsilon:g}")) for epsilon in EPSILONS]
            if any(losses):
                label = column(f"{kind}_at_{EPSILONS[0]:g}").label.rpartition(", ε")[0]
                rows.append([each.label, label, *("–" if one is None else shown_losses(one) for one in losses)])
    if not rows:
        return ""
    return (
        f"**Loss against ε,** at δ = {DELTA:g}, adjacency zero-out, with the same number of passes over the texts.\n\n"
        + table(["test loss", "noise", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)], rows, left=2)
    )


def _claims(lines: Sequence[Line], found: Scores, gains: Gains) -> str:
    unknown = sum(each is None for each in gains.values())
    largest = sum(rates[0] == max(rates) for place in gains if (rates := rates_at_full_size(lines, place)))
    return (
        f"**Claims.**\n\n{claims_table(CLAIMS_SCHEDULED, found, gains)}\n\n"
        "- Brackets are the 95 % interval over seeds, widened by tuning errors. A perfectly tuned row may be lower by "
        "its gain, never higher. One seed gives no verdict.\n"
        "- The gain is the best validation loss minus the minimum of a parabola through it and its two neighbours, "
        "over the logarithm of the learning rate. Neighbours are full-size runs if both exist, or else search runs.\n"
        f"- The gain is unknown in {unknown} of {len(gains)} places, because a neighbour diverged, was abandoned or is "
        "missing. There it counts as 0, and a star marks verdicts that need it.\n"
        f"- In {largest} places the best rate is the largest that ran at full size, so the gain may be larger."
    )


def _against_constant(best: Sequence[Line], constant: Sequence[Line], scale: str) -> str:
    """Both losses where both tables have runs."""
    before, after = scores(constant), scores(best)

    def cell(place: Place) -> str:
        if place not in before or place not in after:
            return "–"
        losses = mean(before[place]), mean(after[place])
        return f"{' → '.join(map(thousandths, losses))} ({thousandths(losses[1] - losses[0])})"

    titles, rows = by_place("test loss, constant → scheduled (change)", cell)
    if not rows:
        return ""
    sizes = [
        f"{size[scale].steps} steps and ε {', '.join(epsilons(own))}"
        for size, own in ((SIZES, constant), (SIZES_SCHEDULED, best))
    ]
    return (
        f"**Constant against scheduled learning rates.** The constant table has {sizes[0]} (one per column); the "
        f"scheduled one has {sizes[1]}. σ is the same.\n\n" + table(titles, rows)
    )


def _settings(lines: Sequence[Line], search: Sequence[Line], gains: Gains, scale: str) -> str:
    """Where the search ended, and the learning rates at full size."""
    size, budget, rows = SIZES_SCHEDULED[scale], BUDGET[scale], []
    for place in places_scheduled():
        tried = tuning_losses(search, place, size)
        if not tried:
            continue
        each, setting = row_scheduled(place[0]), best_setting(search, place, size)
        edge, more = on_edge(each, setting), wanted(each, place[1], tried)
        chosen = ", ".join(f"{name} {value:g}{'*' if name in edge else ''}" for name, value in setting)
        state = ("†" if len(tried) >= budget else " so far") if more else ""
        rates = [f"{rate:g}" for rate in rates_at_full_size(lines, place)]
        own = gains.get(place)
        label = each.label + (" (NOT private)" if each.note else "")
        rows.append([label, column(place[1]).label, chosen, f"{len(tried)}{state}", ", ".join(rates) or "–",
                     "–" if own is None else thousandths(own)])  # fmt: skip
    head = (
        "**Where the search ended.** Final runs use the best setting of the search. The first seed also tries larger "
        "learning rates (lr, the best first). * is an end of a grid, † a search that used up its "
        f"budget of {budget} runs, and a dash under gain one that is unknown."
    )
    titles = ["optimizer", "noise", "chosen", "runs", "lr at full size", "gain"]
    return f"{head}\n\n" + table(titles, rows, left=3)
