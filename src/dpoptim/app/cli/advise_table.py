"""The advice as text: what to use, why, the numbers, and what to try."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpoptim.app.cli import mechanism_rows
from dpoptim.app.cli.training_text import headline, plan_line, wide_console
from dpoptim.privacy.format_epsilon import format_epsilon
from dpoptim.theory import Advice

_WHERE = {
    "in": "in the window",
    "in if examples agree": "in the window if examples agree",
    "above": "above the window",
    "below": "below the window",
}
_CONSTANTS = {
    "scale_then_privatize": "eps_scale={}",
    "bias_correction": "rule=Adam(eps={})",
    "post_processing": "",
}


def print_advice(advice: Advice, *, train: str, counted: str | None = None) -> None:
    """Print on standard output, once all of it is made.

    `train` is the command that follows the advice, `counted` the class whose parameters they are.
    """
    console = wide_console()
    for part in list(_parts(advice, train, counted)):
        if isinstance(part, str):
            print(part)  # to be typed: never wrapped
        else:
            console.print(part, highlight=False)


def _parts(advice: Advice, train: str, counted: str | None) -> Iterator[RenderableType]:
    plan = advice.plan
    of = "" if counted is None else f" of {counted}"
    known = "measured" if advice.signal.measured else "ASSUMED"
    yield Text(headline(plan, epsilon=advice.epsilon, delta=advice.delta))
    yield Text(f"{advice.signal.parameters:,} parameters{of}; clip norm {plan.clip_norm:g}; gradients {known}\n")
    yield _said(f"Use {advice.variant}", advice.reason)
    yield _said("with", advice.choice.reason)
    yield f"  plan = {plan_line(plan, epsilon=advice.epsilon, delta=advice.delta)}"
    yield f"  optimizer = {_optimizer_line(advice)}"
    yield f"  or: {train}"
    if advice.variant == "scale_then_privatize":
        yield Text(f"  {why_default(advice)}")
    yield ""
    yield _numbers(advice)
    yield ""
    yield _to_try(advice)
    yield ""
    yield _mechanisms(advice)
    yield Text(
        "normals a step: rows of random numbers, the time that noise takes. epsilon*: what the mechanism would cost at "
        f"the chosen one's mean RMSE. Every row at {plan.adjacency.value} adjacency; accountants:"
    )
    for accountant in dict.fromkeys(row.accountant for row in advice.alternatives):
        samplings = dict.fromkeys(
            row.sampling.partition("(")[0] for row in advice.alternatives if row.accountant == accountant
        )
        yield Text(f"  {', '.join(samplings)}: {accountant}")
    yield ""
    for note in advice.notes:
        yield Text(f"- {note}")


def _said(head: str, text: str) -> Text:
    return Text.assemble((head, "bold green"), f": {text}.")


def why_default(advice: Advice) -> str:
    """Why the library's own eps_scale is offered, whichever side of the window it is on."""
    window = advice.window
    place = window.place(window.default)
    told = f"eps_scale={window.default:.3g} is the library's default, twice the noise's level: "
    if place == "in":
        return told + "in the window, where the second moment rests"
    return told + (
        f"{_WHERE[place]}. The window is that of a constant gradient, equal for all examples, which real ones are "
        "not; below it noise diverges, above it scaling fades gracefully towards post_processing, so the default keeps "
        "clear of the lower end"
    )


def _optimizer_line(advice: Advice) -> str:
    constant = advice.window.default if advice.variant == "scale_then_privatize" else advice.eps_to_try[1]
    shown = _CONSTANTS[advice.variant].format(f"{constant:.3g}")
    return f"{advice.variant}(model, plan, lr=...{', ' if shown else ''}{shown})"


def _numbers(advice: Advice) -> Table:
    table = mechanism_rows.plain_table(words=("", ""))
    table.show_header = False
    plan, window, signal = advice.plan, advice.window, advice.signal
    level = f"{advice.noise_variance:.3g}"
    rows = [
        ("noise multiplier", f"{plan.noise_multiplier:.4f}, times column norm {plan.strategy.column_norm:.4g}"),
        ("noise variance phi", f"{level} on a coordinate of the averaged gradient (last step)"),
        (
            "squared gradient",
            f"{signal.mean * plan.clip_norm**2:.3g} a coordinate on average, {advice.snr:.3g} times phi; norm "
            f"{signal.norm:.3g} clip norms",
        ),
    ]
    shown = sorted({1, max(1, plan.steps // 4), plan.steps})
    for name, kind in (("bias correction", "bias_correction"), ("IME", "independent_moments")):
        found = {f.step: getattr(f, kind) for f in advice.forecasts if f.step in shown}
        if None not in found.values():
            parts = ", ".join(f"{value:.1%} at step {step:,}" for step, value in found.items())
            rows.append((f"negative by {name}", parts))
    if signal.measured:
        rows.append(
            (
                "signal in an update",
                f"{advice.signal_share:.3f} of it on average, at most {advice.scaled_share:.3f} where scaling evens it",
            )
        )
    low, high, likely = _apart(window.low, window.high, window.likely_high)
    least, most = _apart(*window.clip_norms)
    rows += [
        (
            "window of eps_scale",
            f"({low}, {high}] at clip norm {plan.clip_norm:g}, up to {likely} if examples agree as little as "
            f"{signal.agreement:.2g}; clip norm/eps_scale in [{least}, {most})",
        ),
        ("its default", f"{window.default:.4g}, {window.describe(window.default)}"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _apart(*values: float) -> list[str]:
    """To four digits, or as many as tell them apart.

    >>> _apart(0.02331, 0.0233105)
    ['0.023310', '0.023311']
    """
    told = ([f"{value:#.{digits}g}" for value in values] for digits in range(4, 18))
    return next((shown for shown in told if len(set(shown)) == len(set(values))), [repr(value) for value in values])


def _to_try(advice: Advice) -> Table:
    table = mechanism_rows.plain_table(words=("to try", "for", "values"))
    window = advice.window
    marked = ", ".join(f"{value:.6g} ({_WHERE[window.place(value)]})" for value in window.to_try)
    if window.too_narrow:
        marked += "; the window is too narrow to try a value in it that is clear of divergence"
    table.add_row("eps_scale", "scale_then_privatize", marked)
    table.add_row("eps", "bias_correction, IME", f"{_listed(advice.eps_to_try)} (0.3, 1 and 3 times the noise)")
    source = "10, 50 and 90 % of the public norms; " if advice.signal.example_norms else ""
    table.add_row("clip_norm", "all", f"{_listed(advice.clip_norms_to_try)} ({source}eps_scale and eps in proportion)")
    return table


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _mechanisms(advice: Advice) -> Table:
    table = mechanism_rows.plain_table(words=("mechanism", "sampling"), numbers=(*mechanism_rows.COLUMNS, "epsilon*"))
    for row in advice.alternatives:
        cost = row.epsilon_at_chosen_error
        table.add_row(
            row.name,
            row.sampling,
            *mechanism_rows.as_cells(row.candidate, delta=advice.delta),
            "-" if cost is None else format_epsilon(cost),
            style="bold green" if row.chosen else None,
        )
    return table
