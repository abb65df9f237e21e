"""What the pictures show, in words: a caption for each, and a finding whose numbers are those of its lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.markdown import made_by, thousandths
from experiments.result_files import Line
from experiments.tinybert.claims import LEVEL
from experiments.tinybert.command import command
from experiments.tinybert.pictures import loss_before, of_column, share_above_phi, shown, swept
from experiments.tinybert.table_of_cells import WITH_NOISE, Column, row


@dataclass(frozen=True)
class Words:
    """`title` stands for the picture where it cannot be seen; `finding` is told of the lines that it shows."""

    title: str
    caption: str
    finding: Callable[[Sequence[Line]], str]


def markdown(lines: Sequence[Line]) -> str:
    """Where the lines come from, and each picture with its caption and what it shows."""
    own = shown(lines)
    if not own:
        return "No run has been made yet that a picture shows."
    in_pictures = list({id(line): line for some in own.values() for line in some}.values())
    parts = [made_by(in_pictures, command("tinybert figures", in_pictures))]
    for name, words in WORDS.items():
        if name in own:
            parts += [f"![{words.title}](images/figures-{name}.png)", words.caption, words.finding(own[name])]
    return "\n\n".join(part for part in parts if part)


def _by_noise(begin: str, lines: Sequence[Line], tell: Callable[[list[Line], Column], str]) -> str:
    """A sentence with what is told of each noise; a noise that nothing is told of is left out."""
    told = [(tell(of_column(lines, kind), kind), kind.label) for kind in WITH_NOISE]
    parts = [f"{text} ({label})" for text, label in told if text]
    return f"**{begin}:** {'; '.join(parts)}." if parts else ""


def _of_curves(lines: Sequence[Line]) -> str:
    def order(own: list[Line], kind: Column) -> str:
        private = [line for line in own if not row(line["cell"]["row"]).note and line["result"]["ended"] == "finished"]
        losses = {row(line["cell"]["row"]).label: line["result"]["validation"] for line in private}
        if len(losses) < 2:
            return ""
        best, *others = sorted(losses, key=lambda name: losses[name])
        text = f"{best} at {thousandths(losses[best])}"
        for place, name in (("next", others[0]), ("last", others[-1]))[: len(others)]:
            text += f", {place} {name}, {thousandths(losses[name] - losses[best])} behind"
        plain = row("post_processing").label
        level = [name for name in losses if name != plain and abs(losses[name] - losses.get(plain, math.inf)) <= LEVEL]
        return text + (f", {' and '.join(level)} level with {plain}" if level else "")

    return _by_noise("Lowest of the private ones at the end, on validation texts and of seed 0", lines, order)


def _of_gradients(lines: Sequence[Line]) -> str:
    def fall(own: list[Line], kind: Column) -> str:
        norms = [norm for line in own for _, norm in line["result"]["gradient_norms"]]
        if not norms:
            return ""
        return f"{thousandths(norms[0])} to {thousandths(float(np.mean(norms[len(norms) // 2 :])))}"

    return _by_noise("From the first step to the mean of the second half", lines, fall)


def _of_negatives(lines: Sequence[Line]) -> str:
    def ends(own: list[Line], kind: Column) -> str:
        shares = {row(line["cell"]["row"]).label: line["result"]["negative_fractions"] for line in own}
        return ", ".join(f"{name} {seen[0][1]:.3f} to {seen[-1][1]:.3f}" for name, seen in shares.items())

    return _by_noise("From the first step to the last that was watched", lines, ends)


def _of_moments(lines: Sequence[Line]) -> str:
    def above(own: list[Line], kind: Column) -> str:
        assert kind.noise_multiplier is not None
        return ", ".join(f"{100 * share_above_phi(line, kind.noise_multiplier):.2g} %" for line in own)

    return _by_noise("Second moments above φ of the run's own σ", lines, above)


def _of_clip_norms(lines: Sequence[Line]) -> str:
    before = loss_before(lines)

    def best_and_lost(own: list[Line], kind: Column) -> str:
        points = swept(own, kind)
        if not points:
            return ""
        best, loss = min(points, key=lambda point: point[1])
        lost = [f"{x:g}" for x, own_loss in points if own_loss > before]
        text = f"best at {best:g}, with a loss of {thousandths(loss)}"
        return text + (f", lost at {' and '.join(lost)}" if lost else "")

    return _by_noise("The clip norm over B/σ′", lines, best_and_lost)


WORDS = {
    "curves": Words(
        "loss on validation texts against steps, all optimizers, one panel a noise",
        "Loss on held-out validation texts against steps, all optimizers, one panel a noise (seed 0) with limits "
        "of its own; dotted is NOT private. The test texts are looked at once, at the end.",
        _of_curves,
    ),
    "gradients": Words(
        "length of the clipped average gradient over the clip norm, against steps",
        "Length of the clipped average gradient over the clip norm, at every hundredth part of a run. NOT private: "
        "read off the noiseless rows, which make it public.",
        _of_gradients,
    ),
    "negative": Words(
        "share of negative second moments against steps",
        "Share of coordinates whose second moment, without the noise's known part, is negative.",
        _of_negatives,
    ),
    "moments": Words(
        "histograms of second moments, and φ",
        "Second moments at the end of a run, without noise in them, against φ = (σ/B)², the variance of independent "
        "noise at clip norm 1 (gradients without privacy are not clipped). NOT private.",
        _of_moments,
    ),
    "clipping": Words(
        "loss of scale-then-privatize against the clip norm, and the theory's window",
        "Scale-then-privatize against the clip norm of the paper's parametrisation, in units of B/σ′, σ′ the standard "
        "deviation of a step's noise; all other settings as tuned, the learning rate too. Above, the lost runs, which "
        "ended higher than the model began or were stopped there; below, the theory's window of each noise, "
        "for a constant gradient and independent noise. Tuning runs, NOT private.",
        _of_clip_norms,
    ),
}
"""Of each picture, in the page's order."""
