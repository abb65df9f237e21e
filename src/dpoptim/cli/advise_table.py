"""The advice as text: what to use, why, the numbers, and what to try."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dpoptim.cli.training_options import headline, plan_line, rounded_up, wide_console
from dpoptim.theory import Advice, format_bytes

_CONSTANTS = {
    "scale_then_privatize": "eps_scale={}",
    "bias_correction": "rule=Adam(eps={})",
    "post_processing": "",
}


def print_advice(advice: Advice) -> None:
    """Print on standard output."""
    console, plan = wide_console(), advice.plan
    console.print(headline(plan, epsilon=advice.epsilon, delta=advice.delta), highlight=False)
    console.print(
        f"{advice.signal.parameters:,} parameters; clip norm {plan.clip_norm:g}; gradients "
        f"{'measured' if advice.signal.measured else 'ASSUMED'}\n",
        highlight=False,
    )
    _say(console, f"Use {advice.variant}", advice.reason)
    _say(console, "with", advice.choice.reason)
    print(f"  plan = {plan_line(plan, epsilon=advice.epsilon, delta=advice.delta)}")
    print(f"  optimizer = {_optimizer_line(advice)}\n")
    console.print(_numbers(advice))
    console.print()
    console.print(_to_try(advice))
    console.print()
    console.print(_mechanisms(advice))
    console.print(
        "epsilon*: what the mechanism would cost at the chosen one's mean RMSE. Every row at "
        f"{plan.adjacency.value} adjacency; accountants:",
        highlight=False,
    )
    for accountant in dict.fromkeys(row.accountant for row in advice.alternatives):
        samplings = dict.fromkeys(
            row.sampling.partition("(")[0] for row in advice.alternatives if row.accountant == accountant
        )
        console.print(f"  {', '.join(samplings)}: {accountant}", highlight=False)
    console.print()
    for note in advice.notes:
        console.print(f"- {note}", highlight=False)


def _say(console: Console, head: str, text: str) -> None:
    console.print(f"[bold green]{head}[/]: {text}.", highlight=False)


def _optimizer_line(advice: Advice) -> str:
    constant = advice.window.default if advice.variant == "scale_then_privatize" else advice.eps_to_try[1]
    shown = _CONSTANTS[advice.variant].format(f"{constant:.3g}")
    return f"{advice.variant}(model, plan, lr=...{', ' if shown else ''}{shown})"


def _numbers(advice: Advice) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
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
    low, high = (f"{end:.4g}" for end in window.clip_norms)
    rows += [
        (
            "window of eps_scale",
            f"({window.low:.4g}, {window.high:.4g}] at clip norm {plan.clip_norm:g}, up to {window.likely_high:.4g} if "
            f"examples agree as little as {signal.agreement:.2g}; clip norm/eps_scale in [{low}, {high})",
        ),
        ("its default", f"{window.default:.4g}, {window.describe(window.default)}"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _to_try(advice: Advice) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("to try", "for", "values"):
        table.add_column(title, overflow="fold")
    window = advice.window
    table.add_row("eps_scale", "scale_then_privatize", _listed(window.to_try))
    table.add_row("eps", "bias_correction, IME", f"{_listed(advice.eps_to_try)} (0.3, 1 and 3 times the noise)")
    source = "10, 50 and 90 % of the public norms; " if advice.signal.example_norms else ""
    table.add_row("clip_norm", "all", f"{_listed(advice.clip_norms_to_try)} ({source}eps_scale and eps in proportion)")
    return table


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _mechanisms(advice: Advice) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mechanism", overflow="fold")
    table.add_column("sampling", overflow="fold")
    for title in ("noise multiplier", "RMSE mean", "RMSE max", "memory", "epsilon", "epsilon*"):
        table.add_column(title, justify="right", overflow="fold")
    for row in advice.alternatives:
        candidate, cost = row.candidate, row.epsilon_at_chosen_error
        table.add_row(
            row.name,
            row.sampling,
            f"{candidate.plan.noise_multiplier:.4f}",
            f"{candidate.rmse_mean:.4g}",
            f"{candidate.rmse_max:.4g}",
            "-" if candidate.memory_bytes == 0 else format_bytes(candidate.memory_bytes),
            rounded_up(candidate.plan.epsilon(delta=advice.delta)),
            "-" if cost is None else rounded_up(cost),
            style="bold green" if row.chosen else None,
        )
    return table
