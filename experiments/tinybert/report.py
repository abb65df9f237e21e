"""The table of BERT-Tiny beside the paper's, whether its claims hold, the tuning behind it, and what is beyond it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpoptim.app.comparison.intervals import mean_interval
from experiments.markdown import epsilon_shown, made_by, number, spread, table
from experiments.result_files import Line, cell_key
from experiments.tinybert.claims import CLAIMS, LEVEL, compared
from experiments.tinybert.command import command
from experiments.tinybert.proxy import how_near
from experiments.tinybert.schedule import SWEEP, chosen, final_lines, tuning_lines, tuning_losses
from experiments.tinybert.scores import Losses, Scores, mean, scores
from experiments.tinybert.search import on_edge, wanted
from experiments.tinybert.sizes import SIZES, Size
from experiments.tinybert.table_of_cells import (
    COLUMNS,
    DELTA,
    NON_PRIVATE,
    PAPER_GRADIENT,
    PAPER_WITHOUT_NOISE,
    ROWS,
    WITH_NOISE,
    Column,
    column,
    places,
    row,
)

BESIDE = {
    "post_processing": "post-processing, which is p = 0",
    "scale_then_privatize": "scale-then-privatize, p = 1/2",
    "independent_moments": "IME, square of the average",
}
"""Rows of the table that those beyond it are held against, as they are called there."""
BEHIND = "behind the first by"


def markdown(lines: Sequence[Line]) -> str:
    """All of it; a place without a final run is a dash."""
    scale = lines[0]["scale"]
    found = scores(lines)
    parts = [
        made_by(lines, command("tinybert", lines)),
        _what(lines, SIZES[scale]),
        main_table(lines),
        _signal(lines),
        _in_both_precisions(lines),
        _guarantees(lines),
        _claims(found),
        _beyond(lines, found),
        _tuning(lines, SIZES[scale]),
        how_near(lines, SIZES[scale]),
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
            f"were given up on the way and {cut[1]} diverged)"
        )
    if swept:
        text += f" and {swept} runs against the clip norm, for a picture"
    return (
        f"{text}, on {lines[0]['cell']['num_examples']:,} texts. Losses are means over the masked tokens of {tested:,} "
        "test texts; ± is Student's 95 % interval over seeds, where there are several."
    )


def _is_tuning(line: Line) -> bool:
    return bool(line["cell"]["purpose"] == "tuning")


def main_table(lines: Sequence[Line]) -> str:
    """Our test losses beside the paper's, by optimizer and noise."""
    found = scores(lines)
    titles = ["test loss, ours (the paper's)", *(each.label for each in WITH_NOISE)]
    rows = [["no fine-tuning", _beside(found.get(("none", "none")), PAPER_WITHOUT_NOISE["none"]), "", ""]]
    for name in NON_PRIVATE:
        rows.append([row(name).label, _beside(found.get((name, "none")), PAPER_WITHOUT_NOISE[name]), "", ""])
    for each in ROWS:
        if each.beyond or each.name in NON_PRIVATE:
            continue
        cells = [_beside(found.get((each.name, kind.name)), kind.paper.get(each.name)) for kind in WITH_NOISE]
        if set(cells) != {"– (–)"}:
            rows.append([each.label + (" (NOT private)" if each.note else ""), *cells])
    private = [_private_line(lines, kind) for kind in WITH_NOISE]
    epsilons = [epsilon_shown(line["epsilon"] if line else None) for line in private]
    rows.append([f"ε of a private row (δ = {DELTA:g}, zero-out)", *epsilons])
    return table(titles, rows)


def _private_line(lines: Sequence[Line], kind: Column) -> Line | None:
    """The first of a column with an ε, which all its private rows share; None where none was run."""
    own = (line for line in lines if line["cell"]["column"] == kind.name)
    return next((line for line in own if line["epsilon"] is not None), None)


def _beside(losses: Losses | None, paper: float | None) -> str:
    return f"{_shown(losses) if losses else '–'} ({'–' if paper is None else f'{paper:.3f}'})"


def _shown(losses: Losses) -> str:
    return spread(mean_interval(list(losses.values())))


def _signal(lines: Sequence[Line]) -> str:
    """How much of an average of clipped gradients is left, which noise is to be compared with."""
    means = []
    for kind in WITH_NOISE:
        norms = [norm for line in final_lines(lines, ("noiseless", kind.name))
                 for _, norm in line["result"].get("gradient_norms", [])]  # fmt: skip
        if norms:
            means.append(f"{sum(norms) / len(norms):.3f} ({kind.label})")
    if not means:
        return ""
    return (
        "The clipped average gradient's length over the clip norm, mean over the run with a noiseless preconditioner "
        f"(NOT private): {', '.join(means)}; the paper's is about {PAPER_GRADIENT:g}."
    )


def _in_both_precisions(lines: Sequence[Line]) -> str:
    """The first final runs had parameters in float32; where a cell was run again in bfloat16, how they differ."""
    whole = {key: loss for dtype, key, loss in map(_final_loss, lines) if dtype is None}
    off = [loss - whole[key] for dtype, key, loss in map(_final_loss, lines) if dtype == "bfloat16" and key in whole]
    if not off:
        return ""
    return (
        f"{len(off)} of these runs were also made with parameters in float32 and only products in bfloat16: test "
        f"losses in bfloat16 are {min(off):+.4f} to {max(off):+.4f} from those."
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
        "What a run like these would guarantee with a secret key of its own, tuning not counted, at "
        f"δ = {DELTA:g}, adjacency zero-out. These very runs guarantee NOTHING: their key is made of the seed, so that "
        f"rows share their normals and anyone can make them again{tuned}. Shuffled "
        "batches pass over one fixed order again and again, without amplification; ε is then that of a Gaussian "
        "mechanism at the worst pattern of participations, without any bound in between. With Poisson samples it is "
        "that of composed privacy loss distributions (dp-accounting, rounded to the safe side), with cyclic ones too, "
        "of one step for each turn of a text's group. ε is rounded up; losses on held-out texts are not noised and "
        "stand outside of it. σ is in units of what one participation changes, over all steps:"
    )
    return head + "\n\n" + table(["noise", "sampling", "participations", "σ", "ε"], rows, left=2)


def _claims(found: Scores) -> str:
    rows = []
    for claim in CLAIMS:
        margins = [compared(claim, found, kind.name, kind.paper) for kind in WITH_NOISE]
        if any(margins) or not claim.ours:
            rows.append([claim.text, *(margin or "–" for margin in margins)])
    rule = (
        "Margins are taken seed by seed. A claim holds where the 95 % interval lies above 0 and fails where it lies "
        f"below {LEVEL:g}, a distance that counts as level; “no better” holds above −{LEVEL:g} and fails below. Else "
        "it is undecided."
    )
    return (
        table(["what the paper says; ours (the paper's)", *(kind.label for kind in WITH_NOISE)], rows) + "\n\n" + rule
    )


def _beyond(lines: Sequence[Line], found: Scores) -> str:
    """What the paper has no row or no column for, each beside the rows of the table that it is to be held against."""
    places_beyond = [place for place in places(beyond=True) if place in found]
    if not places_beyond:
        return ""
    of_row = [place for place in places_beyond if row(place[0]).beyond]
    of_column = [place for place in places_beyond if place not in of_row]
    parts = []
    if of_row:
        known = [(name, "independent") for name in BESIDE if (name, "independent") in found]
        in_order = _best_first([*of_row, *known], found)
        rows = [[BESIDE.get(name, row(name).label), _shown(found[name, kind]), behind]
                for (name, kind), behind in in_order]  # fmt: skip
        parts.append(
            f"Beyond the paper, {column('independent').label}, beside rows of the table:\n\n"
            + table(["optimizer", "test loss", BEHIND], rows)
        )
    if of_column:
        rows = []
        for (name, kind), behind in _best_first(of_column, found):
            plan = final_lines(lines, (name, kind))[0]["plan"]
            rows.append([column(kind).label, number(plan["noise_multiplier"], 4), _shown(found[name, kind]), behind])
        parts.append(
            f"Scale-then-privatize at ε = {column(of_column[0][1]).epsilon:g}, δ = {DELTA:g}, adjacency zero-out, the "
            "best noise first:"
            "\n\n" + table(["noise", "σ", "test loss", BEHIND], rows)
        )
    return "\n\n".join(parts)


def _best_first(wanted_places: Sequence[tuple[str, str]], found: Scores) -> list[tuple[tuple[str, str], str]]:
    """The places by their mean loss, each with how far it is behind the first, over the seeds that both have."""
    in_order = sorted(wanted_places, key=lambda place: mean(found[place]))
    best = found[in_order[0]]
    told = [""]
    for place in in_order[1:]:
        margins = [loss - best[seed] for seed, loss in found[place].items() if seed in best]
        told.append(spread(mean_interval(margins)) if margins and all(map(math.isfinite, margins)) else "–")
    return list(zip(in_order, told, strict=True))


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
            notes.append("search not ended")
        best = tuning_losses(lines, place, size).get(setting)
        loss = number(best, 4) if best is not None and math.isfinite(best) else "–"
        label = each.label + (" (NOT private)" if each.note else "")
        rows.append([label, column(place[1]).label, str(len(tried)), _settings(dict(setting)), loss, ", ".join(notes)])
    if not rows:
        return ""
    head = (
        "Tuning, one knob after the other, each on its grid, from neighbour to neighbour until none is better; "
        "the loss is that of validation texts, and the test texts play no part. No tuning run is private, whatever its "
        "row:"
    )
    return head + "\n\n" + table(["optimizer", "noise", "runs", "chosen", "validation loss", "note"], rows, left=4)


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
