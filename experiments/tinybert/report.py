"""The table of BERT-Tiny next to the paper's: whether its claims hold, the tuning behind it, and further rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpoptim.app.comparison.intervals import Interval, mean_interval
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient
from dpoptim.theory import Candidate
from experiments import provenance
from experiments.markdown import epsilon_shown, made_by, number, spread, table, thousandths
from experiments.results_file import Line, cell_key
from experiments.tinybert.grid import (
    COLUMNS,
    DELTA,
    NON_PRIVATE,
    ONLY_SCHEDULED,
    PAPER_GRADIENT,
    PAPER_WITHOUT_NOISE,
    ROWS,
    SIZES,
    WITH_NOISE,
    Column,
    Size,
    column,
    places,
    plan_of,
    row,
)
from experiments.tinybert.schedule import (
    SWEEP,
    Cell,
    Place,
    Setting,
    chosen,
    final_lines,
    on_edge,
    setting_of,
    tuning_lines,
    tuning_losses,
    wanted,
)

Losses = Mapping[int, float]  # by seed
Scores = Mapping[Place, Losses]


def masked_token_loss(result: Mapping[str, Any]) -> float | None:
    """The mean over masked tokens; None if the run diverged."""
    loss: float | None = result["test"]["tokens"]
    return loss


def scores(lines: Sequence[Line], loss_in: Callable[[Mapping[str, Any]], float | None] = masked_token_loss) -> Scores:
    """Test losses of the final runs; ("none", "none") is the model without fine-tuning.

    A run that diverged counts as infinite. Of two runs of one seed, and of two settings, the later one counts.
    """
    found: dict[tuple[str, str], dict[int, float]] = {}
    settings: dict[tuple[str, str], Setting] = {}
    for line in lines:
        cell, result = line["cell"], line["result"]
        if cell["purpose"] in ("final", "no fine-tuning"):
            place = (cell["row"], cell["column"])
            setting = setting_of(cell) if cell["purpose"] == "final" else ()
            if settings.setdefault(place, setting) != setting:
                settings[place], found[place] = setting, {}
            loss = loss_in(result)
            own = found.setdefault(place, {})
            own[cell["seed"]] = math.inf if loss is None or result["ended"] == "diverged" else loss
    return found


def mean(losses: Losses) -> float:
    """Over the seeds."""
    return sum(losses.values()) / len(losses)


def command(module: str, lines: Sequence[Line]) -> str:
    """The command that made the lines; the number of workers is not recorded.

    >>> command("experiments tinybert", [{"scale": "paper", "setting": {"machine": "NVIDIA H200"}}])
    'python -m experiments tinybert --scale paper --data DIR --model DIR --device cuda'
    """
    scale = lines[0]["scale"]
    given = "" if scale == "smoke" else " --data DIR --model DIR"
    on_gpu = any(provenance.is_gpu(line["setting"]["machine"]) for line in lines)
    return f"python -m {module} --scale {scale}{given}{' --device cuda' if on_gpu else ''}"


LEVEL = 0.005
"""Losses this close count as level; the paper calls rows within .004 of each other equal."""


@dataclass(frozen=True)
class Claim:
    """A statement about the rows of one column; `needs` are the rows it depends on."""

    text: str
    needs: tuple[str, ...]
    margin: Callable[[Mapping[str, float]], float]  # by how much it holds
    holds_above: float = 0.0
    fails_below: float = LEVEL
    ours: bool = False  # not in the paper, which lacks one of the rows


_PRIVATE = ("post_processing", "independent_moments", "bias_correction", "scale_then_privatize", "dp_sgd")


def behind(worse: str, better: str) -> Callable[[Mapping[str, float]], float]:
    """By how much a row is behind a better one."""
    return lambda loss: loss[worse] - loss[better]


CLAIMS = (
    Claim(
        "scale-then-privatize is the best private row: ahead of the next by",
        _PRIVATE,
        lambda loss: (
            min(loss[name] for name in _PRIVATE if name != "scale_then_privatize") - loss["scale_then_privatize"]
        ),
    ),
    Claim(
        "(ours) and ahead of post-processing with ε_s tuned by",
        ("scale_then_privatize", "post_processing_eps"),
        behind("post_processing_eps", "scale_then_privatize"),
        ours=True,
    ),
    Claim(
        "IME is worse than post-processing: behind by",
        ("independent_moments", "post_processing"),
        behind("independent_moments", "post_processing"),
    ),
    Claim(
        "a noiseless preconditioner is no better than post-processing: behind by",
        ("noiseless", "post_processing"),
        behind("noiseless", "post_processing"),
        holds_above=-LEVEL,
        fails_below=-LEVEL,
    ),
    Claim(
        "(ours) nor better than post-processing with ε_s tuned in the same way: behind by",
        ("noiseless", "post_processing_eps"),
        behind("noiseless", "post_processing_eps"),
        holds_above=-LEVEL,
        fails_below=-LEVEL,
        ours=True,
    ),
    Claim(
        "with scale-then-privatize a noiseless one helps: ahead by",
        ("noiseless_scaled", "scale_then_privatize"),
        behind("scale_then_privatize", "noiseless_scaled"),
    ),
    Claim(
        "DP-SGD is worse than post-processing: behind by",
        ("dp_sgd", "post_processing"),
        behind("dp_sgd", "post_processing"),
    ),
    Claim(
        "(ours) and worse than post-processing with ε_s tuned: behind by",
        ("dp_sgd", "post_processing_eps"),
        behind("dp_sgd", "post_processing_eps"),
        ours=True,
    ),
)


@dataclass(frozen=True)
class Margin:
    """A margin over seeds. Its bounds also contain the tuning errors of its rows; one seed has no bounds."""

    over_seeds: Interval
    bounds: tuple[float, float] | None

    def in_brackets(self) -> str:
        """The mean and the bounds."""
        shown = thousandths(self.over_seeds.mean)
        return shown if self.bounds is None else f"{shown} [{', '.join(map(thousandths, self.bounds))}]"


def margin_over(
    margin: Callable[[Mapping[str, float]], float], rows: Mapping[str, Losses], gains: Mapping[str, float]
) -> Margin | None:
    """The margin over the seeds that all rows have; None if there is no such seed.

    A perfectly tuned row may be lower by its gain, never higher. A margin only rises or only falls with each row, so it
    is extreme where each row is as it is or lower by its whole gain.

    >>> rows = {"worse": {0: 4.0, 1: 4.2}, "better": {0: 3.9, 1: 4.1}}
    >>> found = margin_over(lambda loss: loss["worse"] - loss["better"], rows, {"worse": 0.03, "better": 0.01})
    >>> found.in_brackets()
    '0.100 [0.070, 0.110]'
    """
    seeds = sorted(set.intersection(*map(set, rows.values())))
    if not seeds:
        return None

    def less(lower: Sequence[float]) -> Interval:
        losses = [{name: rows[name][seed] - by for name, by in zip(rows, lower, strict=True)} for seed in seeds]
        return mean_interval([margin(each) for each in losses])

    over_seeds = less([0.0] * len(rows))
    if over_seeds.half_width is None:
        return Margin(over_seeds, None)
    means = [less(lower).mean for lower in itertools.product(*((0.0, gains.get(name, 0.0)) for name in rows))]
    return Margin(over_seeds, (min(means) - over_seeds.half_width, max(means) + over_seeds.half_width))


Gains = Mapping[Place, float | None]
"""How much lower a place may be if it were tuned perfectly; None where that is unknown."""


def compared(
    claim: Claim, found: Scores, column: str, paper: Mapping[str, float], gains: Gains | None = None
) -> str | None:
    """Our margin, the mean over the seeds that all rows have, next to the paper's; None if there is none.

    Rows of one seed saw the same batches and normals, so margins are computed seed by seed. One seed decides nothing.
    With several, the 95 % interval decides: a claim that one row is ahead fails if the rows are level. With `gains`,
    the interval also contains them; a star marks a verdict that needs an unknown one.

    >>> scores = {("independent_moments", "x"): {0: 4.0, 1: 4.1}, ("post_processing", "x"): {0: 3.5, 1: 3.59}}
    >>> paper = {"independent_moments": 3.6, "post_processing": 3.5}
    >>> compared(CLAIMS[2], scores, "x", paper), compared(CLAIMS[2], scores, "y", paper)
    ('0.505 ± 0.064 (0.100), holds', None)
    """
    own = [(gains or {}).get((name, column)) for name in claim.needs]
    margin = margin_over(
        claim.margin,
        {name: found.get((name, column), {}) for name in claim.needs},
        {name: gain or 0.0 for name, gain in zip(claim.needs, own, strict=True)},
    )
    if margin is None:
        return None
    if not math.isfinite(margin.over_seeds.mean):
        return "a run diverged"
    verdict = ""
    if margin.bounds is not None:
        holds, fails = margin.bounds[0] > claim.holds_above, margin.bounds[1] < claim.fails_below
        verdict = ", holds" if holds else ", fails" if fails else ", undecided"
        verdict += "*" if gains is not None and None in own else ""
    of_paper = "–" if claim.ours else thousandths(claim.margin(paper))
    return f"{spread(margin.over_seeds) if gains is None else margin.in_brackets()} ({of_paper}){verdict}"


PLAIN = "post_processing"


def how_close(lines: Sequence[Line], size: Size) -> str:
    """How close tuning runs are to final runs: in a step's noise, and in the loss at the same step."""
    levels, gaps = [], {True: 0.0, False: 0.0}  # by whether the row is private
    for place in [*places(beyond=False), *places(beyond=True)]:
        if (pair := _pair(lines, place, size)) is None:
            continue
        tuned, final = pair
        private = row(place[0]).note is None
        gaps[private] = max(gaps[private], _widest_gap(tuned, final))
        if place[0] == "scale_then_privatize":
            levels.append(f"{level(tuned['cell']) / level(final['cell']):.3f} ({column(place[1]).label})")
    if not levels:
        return ""
    return (
        "How close tuning runs are to final runs:\n\n"
        "- The standard deviation of the noise in the average gradient at the noisiest step, divided by that of the "
        f"final run, is {', '.join(levels)}. Correlated noise is optimized for a run's own number of steps.\n"
        "- At the same step, the losses of the chosen tuning run and the final run (seed 0) differ by up to "
        f"{gaps[True]:.2f} in private rows and {gaps[False]:.2f} in others." + _moved(lines, size)
    )


def _moved(lines: Sequence[Line], size: Size) -> str:
    """How far rows move between their tuning runs and their final ones, which limits what margins mean."""
    found, moves = scores(lines), {}
    for name, kind in places(beyond=False):
        pairs = [_pair(lines, (each, kind), size) for each in (name, PLAIN)]
        if name == PLAIN or None in pairs:
            continue
        own, plain = (pair[0]["result"]["validation"] for pair in pairs if pair)
        if own is not None and plain is not None:  # None if every run diverged
            moves[name, kind] = (own - plain, mean(found[name, kind]) - mean(found[PLAIN, kind]))
    if not moves:
        return ""
    far = max(moves, key=lambda place: abs(moves[place][1] - moves[place][0]))
    tuned, final = moves[far]
    return (
        f"\n- Relative to {row(PLAIN).label}, a row moves between the two by up to {abs(final - tuned):.2f} "
        f"({row(far[0]).label}, {column(far[1]).label}: {thousandths(tuned)} in tuning, {thousandths(final)} in the "
        "final runs)."
    )


def level(cell: Cell) -> float:
    """Standard deviation of the noise on a coordinate of the average gradient, at the noisiest step of a cell."""
    return noise_level(plan_of(cell), Gradient())


def _pair(lines: Sequence[Line], place: Place, size: Size) -> tuple[Line, Line] | None:
    """The tuning run with the chosen setting, and the final run of the first seed."""
    setting = chosen(lines, place, size)
    tuned = [line for line in tuning_lines(lines, place, size) if setting_of(line["cell"]) == setting]
    final = [line for line in final_lines(lines, place) if line["cell"]["seed"] == 0]
    return (tuned[0], final[-1]) if tuned and final else None


def _widest_gap(tuned: Line, final: Line) -> float:
    later = dict(final["result"]["curve"])
    both = [(loss, later[step]) for step, loss in tuned["result"]["curve"] if step in later]
    return max((abs(loss - other) for loss, other in both if loss is not None and other is not None), default=0.0)


BESIDE = {
    "post_processing": "post-processing, which is p = 0",
    "scale_then_privatize": "scale-then-privatize, p = 1/2",
    "independent_moments": "IME, square of the average",
}
"""Rows of the table to compare further rows with, and their names there."""
BEHIND = "behind the first by"


def markdown(lines: Sequence[Line]) -> str:
    """The whole section; a place without a final run is a dash."""
    scale = lines[0]["scale"]
    found = scores(lines)
    parts = [
        made_by(lines, command("experiments tinybert", lines)),
        _what(lines, SIZES[scale]),
        main_table(lines),
        _signal(lines),
        _in_both_precisions(lines),
        _guarantees(lines),
        claims_table(CLAIMS, found),
        _equal_errors(lines, found),
        _beyond(lines, found),
        _tuning(lines, SIZES[scale]),
        how_close(lines, SIZES[scale]),
    ]
    return "\n\n".join(part for part in parts if part)


def _what(lines: Sequence[Line], size: Size) -> str:
    final = [line for line in lines if line["cell"]["purpose"] == "final"]
    tuning = [line for line in lines if _is_tuning(line)]
    tested = next((line["result"]["test_examples"] for line in lines if "test_examples" in line["result"]), 0)
    swept = sum(line["cell"]["purpose"] == SWEEP for line in lines)
    text = f"{len(final)} final runs of {size.steps} steps of {size.batch_size} texts"
    if tuning:
        cut = [sum(line["result"]["ended"] == ended for line in tuning) for ended in ("given up", "diverged")]
        text += (
            f", {len(tuning)} tuning runs of {size.tuning_steps} steps of {size.tuning_batch_size} ({cut[0]} of these "
            f"were abandoned and {cut[1]} diverged)"
        )
    if swept:
        text += f" and {swept} runs with other clip norms, for a picture"
    return (
        f"{text}, on {lines[0]['cell']['num_examples']:,} texts. Losses are means over the masked tokens of {tested:,} "
        "test texts; ± is Student's 95 % interval over seeds, if there are several."
    )


def _is_tuning(line: Line) -> bool:
    return bool(line["cell"]["purpose"] == "tuning")


def main_table(lines: Sequence[Line]) -> str:
    """Our test losses next to the paper's, by optimizer and noise."""
    found = scores(lines)

    def cell(place: Place) -> str:
        of_paper = PAPER_WITHOUT_NOISE if place[1] == "none" else column(place[1]).paper
        return _beside(found.get(place), of_paper.get(place[0]))

    titles, rows = by_place("test loss, ours (the paper's)", cell, empty="– (–)")
    rows.insert(0, ["no fine-tuning", cell(("none", "none")), "", ""])
    rows.append([f"ε of a private row (δ = {DELTA:g}, zero-out)", *epsilons(lines)])
    return table(titles, rows)


def by_place(title: str, cell: Callable[[Place], str], *, empty: str = "–") -> tuple[list[str], list[list[str]]]:
    """Titles and rows of a table like the paper's; rows whose cells are all `empty` are left out."""
    rows = [[row(name).label, cell((name, "none")), "", ""] for name in NON_PRIVATE]
    for each in (*ROWS, *ONLY_SCHEDULED):
        if not each.beyond and each.name not in NON_PRIVATE:
            label = each.label + (" (NOT private)" if each.note else "")
            rows.append([label, *(cell((each.name, kind.name)) for kind in WITH_NOISE)])
    return [title, *(kind.label for kind in WITH_NOISE)], [own for own in rows if set(own[1:]) - {empty, ""}]


def epsilons(lines: Sequence[Line]) -> list[str]:
    """The ε of a private row in each of the paper's columns, or a dash."""
    private = [_private_line(lines, kind) for kind in WITH_NOISE]
    return [epsilon_shown(line["epsilon"] if line else None) for line in private]


def _private_line(lines: Sequence[Line], kind: Column) -> Line | None:
    """The first line of a column with an ε, which all its private rows share; None if none was run."""
    own = (line for line in lines if line["cell"]["column"] == kind.name)
    return next((line for line in own if line["epsilon"] is not None), None)


def _beside(losses: Losses | None, paper: float | None) -> str:
    return f"{shown_losses(losses) if losses else '–'} ({'–' if paper is None else f'{paper:.3f}'})"


def shown_losses(losses: Losses) -> str:
    """The mean over seeds, and its interval."""
    return spread(mean_interval(list(losses.values())))


def _signal(lines: Sequence[Line]) -> str:
    """How long the average of clipped gradients is, to compare with the noise."""
    means = []
    for kind in WITH_NOISE:
        norms = [norm for line in final_lines(lines, ("noiseless", kind.name))
                 for _, norm in line["result"].get("gradient_norms", [])]  # fmt: skip
        if norms:
            means.append(f"{sum(norms) / len(norms):.3f} ({kind.label})")
    if not means:
        return ""
    return (
        "The mean norm of the clipped average gradient over the clip norm, in the run with a noiseless preconditioner "
        f"(NOT private): {', '.join(means)}; the paper's is about {PAPER_GRADIENT:g}."
    )


def _in_both_precisions(lines: Sequence[Line]) -> str:
    """How final runs in float32 and bfloat16 of the same cell differ."""
    whole = {key: loss for dtype, key, loss in map(_final_loss, lines) if dtype is None}
    off = [loss - whole[key] for dtype, key, loss in map(_final_loss, lines) if dtype == "bfloat16" and key in whole]
    if not off:
        return ""
    return (
        f"{len(off)} of these runs were also made with parameters in float32 and only products in bfloat16. Compared "
        f"with those, test losses in bfloat16 differ by {min(off):+.4f} to {max(off):+.4f}."
    )


def _final_loss(line: Line) -> tuple[str | None, str, float]:
    """(dtype, the other settings, test loss) of a final run; the dtype of any other line is empty."""
    cell = dict(line["cell"])
    dtype = cell.pop("dtype", None)
    loss = line["result"].get("test", {}).get("tokens")
    final = cell["purpose"] == "final" and loss is not None
    return dtype if final else "", cell_key(cell), loss if final else 0.0


def _guarantees(lines: Sequence[Line]) -> str:
    rows = []
    for kind in COLUMNS:
        if one := _private_line(lines, kind):
            rows.append([kind.label, one["plan"]["sampling"], str(one["plan"]["max_participations"]),
                         number(one["plan"]["noise_multiplier"], 4), epsilon_shown(one["epsilon"])])  # fmt: skip
    if not rows:
        return ""
    tuned = ", and settings were tuned on the same texts" if any(map(_is_tuning, lines)) else ""
    head = (
        f"What one such run would guarantee with its own secret key, at δ = {DELTA:g}, adjacency zero-out. These runs "
        f"guarantee NOTHING: their key is derived from the seed, so anyone can recompute their noise{tuned}.\n\n"
        "- Tuning is not counted, and losses on held-out texts have no noise.\n"
        "- Shuffled batches repeat one fixed order without amplification. ε is that of a Gaussian mechanism at the "
        "worst pattern of participations, which is exact.\n"
        "- With Poisson samples, ε comes from composed privacy loss distributions (dp-accounting, rounded to the safe "
        "side); with cyclic ones, each turn of a text's group counts as one step.\n"
        "- ε is rounded up. σ is relative to what one participation changes, over all steps."
    )
    return head + "\n\n" + table(["noise", "sampling", "participations", "σ", "ε"], rows, left=2)


def claims_table(claims: Sequence[Claim], found: Scores, gains: Gains | None = None) -> str:
    """Whether claims hold in each of the paper's columns, and the rule."""
    rows = []
    for claim in claims:
        margins = [compared(claim, found, kind.name, kind.paper, gains) for kind in WITH_NOISE]
        rows.append([claim.text, *(margin or "–" for margin in margins)])
    rule = (
        "Margins are computed seed by seed. A claim holds if the 95 % interval lies above 0 and fails if it lies below "
        f"{LEVEL:g}, a distance that counts as level; “no better” holds above −{LEVEL:g} and fails below. Otherwise it "
        "is undecided."
    )
    return (
        table(["claim of the paper; our margin (the paper's)", *(kind.label for kind in WITH_NOISE)], rows)
        + "\n\n"
        + rule
    )


EQUAL_ERRORS = ("independent_low", "banded")
"""Two columns with the same root mean square error of prefix sums: the paper chose σ = .134 for that."""


def _equal_errors(lines: Sequence[Line], found: Scores) -> str:
    """Losses under two kinds of noise whose prefix sums have the same error, and how loud a step of each is."""
    plans, rows = [], []
    for name in EQUAL_ERRORS:
        cells = [line["cell"] for line in final_lines(lines, ("scale_then_privatize", name))]
        if not cells:
            return ""
        plans.append(plan_of(cells[-1]))
    errors = [Candidate(plan=plan, parameters=1).rmse_mean for plan in plans]
    levels = [noise_level(plan, Gradient()) for plan in plans]
    for each in ROWS:
        low, high = (found.get((each.name, name), {}) for name in EQUAL_ERRORS)
        seeds = sorted(set(low) & set(high))
        if seeds:
            values = [mean_interval([one[seed] for seed in seeds]) for one in (low, high)]
            apart = mean_interval([high[seed] - low[seed] for seed in seeds])
            label = each.label + (" (NOT private)" if each.note else "")
            rows.append((apart.mean, [label, *(spread(value) for value in values), spread(apart)]))
    rows.sort(key=lambda row: row[0])
    labels = [column(name).label for name in EQUAL_ERRORS]
    return (
        f"Equal errors of prefix sums do not mean equal losses. The root mean square error is {number(errors[0], 4)} "
        f"({labels[0]}) and {number(errors[1], 4)} ({labels[1]}), but a step of the latter is "
        f"{levels[1] / levels[0]:.0f} times as loud. DP-SGD only adds up what it releases. The others divide by a "
        "second moment, which in most of them contains the noise of single steps. Learning rates are constant:\n\n"
        + table(["test loss", *labels, "difference"], [row for _, row in rows])
    )


def _beyond(lines: Sequence[Line], found: Scores) -> str:
    """Rows and columns that the paper lacks, next to the rows of the table to compare them with."""
    places_beyond = [place for place in places(beyond=True) if place in found]
    if not places_beyond:
        return ""
    of_row = [place for place in places_beyond if row(place[0]).beyond]
    of_column = [place for place in places_beyond if place not in of_row]
    parts = []
    if of_row:
        known = [(name, "independent") for name in BESIDE if (name, "independent") in found]
        in_order = _best_first([*of_row, *known], found)
        rows = [[BESIDE.get(name, row(name).label), shown_losses(found[name, kind]), behind]
                for (name, kind), behind in in_order]  # fmt: skip
        parts.append(
            f"Further rows ({column('independent').label}), next to rows of the table:\n\n"
            + table(["optimizer", "test loss", BEHIND], rows)
        )
    if of_column:
        rows = []
        for (name, kind), behind in _best_first(of_column, found):
            plan = final_lines(lines, (name, kind))[0]["plan"]
            shown = shown_losses(found[name, kind])
            rows.append([column(kind).label, number(plan["noise_multiplier"], 4), shown, behind])
        parts.append(
            f"Scale-then-privatize at ε = {column(of_column[0][1]).epsilon:g}, δ = {DELTA:g}, adjacency zero-out, the "
            "best noise first:"
            "\n\n" + table(["noise", "σ", "test loss", BEHIND], rows)
        )
    return "\n\n".join(parts)


def _best_first(wanted_places: Sequence[tuple[str, str]], found: Scores) -> list[tuple[tuple[str, str], str]]:
    """The places by mean loss, each with its distance to the first, over the seeds that both have."""
    in_order = sorted(wanted_places, key=lambda place: mean(found[place]))
    best = found[in_order[0]]
    behind = [""]
    for place in in_order[1:]:
        margins = [loss - best[seed] for seed, loss in found[place].items() if seed in best]
        behind.append(spread(mean_interval(margins)) if margins and all(map(math.isfinite, margins)) else "–")
    return list(zip(in_order, behind, strict=True))


def _tuning(lines: Sequence[Line], size: Size) -> str:
    rows = []
    for place in [*places(beyond=False), *places(beyond=True)]:
        tried = tuning_lines(lines, place, size)
        if not tried or not size.tuned:
            continue
        each = row(place[0])
        setting = chosen(lines, place, size)
        notes = [f"{name} at the end of its grid" for name in on_edge(each, setting)]
        if wanted(each, place[1], tuning_losses(lines, place, size)):
            notes.append("search not finished")
        best = tuning_losses(lines, place, size).get(setting)
        loss = number(best, 4) if best is not None and math.isfinite(best) else "–"
        label = each.label + (" (NOT private)" if each.note else "")
        rows.append([label, column(place[1]).label, str(len(tried)), _settings(dict(setting)), loss, ", ".join(notes)])
    if not rows:
        return ""
    head = (
        "Tuning varies one setting at a time, moving to a neighbour on its grid, until no neighbour is better. The "
        "loss is that of validation texts; test texts are not used. No tuning run is private, whatever its row:"
    )
    return head + "\n\n" + table(["optimizer", "noise", "runs", "chosen", "validation loss", "note"], rows, left=4)


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
