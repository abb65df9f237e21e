"""The privacy statement: one page that an auditor can check against the code."""

from __future__ import annotations

import math
import re
import textwrap
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING

from dpoptim.arguments import check_delta
from dpoptim.privacy import accounting, release_types
from dpoptim.privacy.accounting import GaussianRun, TruncatedPoissonRun
from dpoptim.privacy.release_types import IndependentMoments, JointMoments, NoiselessSquare
from dpoptim.privacy.sampling import CyclicPoisson

if TYPE_CHECKING:
    from dpoptim.privacy.plan import PrivacyPlan

_WIDTH = 100


def format_epsilon(epsilon: float) -> str:
    """Return ε rounded up to four decimals, or more below 0.01.

    Guarantee: the text never claims a smaller ε than the accountant's.

    >>> [format_epsilon(value) for value in (7.99991, 8.0, 8.00001, 0.000123456, math.inf)]
    ['8.0000', '8.0000', '8.0001', '0.0001235', '∞']
    """
    if not math.isfinite(epsilon):
        return "∞"
    exact = Decimal(epsilon)
    decimals = 4 if exact == 0 or exact >= Decimal("0.01") else 3 - exact.adjusted()
    return format(exact.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_CEILING), "f")


def privacy_statement(plan: PrivacyPlan, *, delta: float | None = None) -> str:
    """Return the guarantee of a plan: the answer, then how it is reached, then its assumptions.

    Args:
        plan: A plan with a noise multiplier.
        delta: δ, by default the plan's.

    Guarantee: the first line says NOT PRIVATE whenever ε is infinite. No number depends on data.

    >>> from dpoptim.privacy.plan import PrivacyPlan
    >>> plan = PrivacyPlan(num_examples=1000, batch_size=100, steps=30).calibrate(epsilon=8.0, delta=1e-6)
    >>> print(privacy_statement(plan).splitlines()[0])
    Differentially private: epsilon = 8.0000 at delta = 1e-06
    >>> print(privacy_statement(plan.replace(noise_multiplier=0.0)).splitlines()[0])
    NOT PRIVATE: epsilon = inf (noise_multiplier is 0)
    """
    delta = plan.delta if delta is None else delta
    check_delta(delta, plan.num_examples if plan.is_private else None, optional=True)
    by_user = plan.unit == "user"
    answer = {
        "Protected": "one user (all records with one id)" if by_user else "one example (one index of the dataset)",
        "Neighbours": plan.adjacency.describe(),
        "Sampling": _sampling(plan),
        "Accountant": f"{accounting.describe_accountant(plan.run)}. {_second_opinion(plan, delta)}",
    }
    details = {} if plan.counts is None else {"Before training": plan.counts.describe(plan.adjacency)}
    details |= {
        "Participation": _participation(plan),
        "Released each step": _released(plan),
        "Sensitivity": _sensitivity(plan),
        "Noise": _noise(plan),
    }
    lines = [headline(plan, plan.epsilon(delta=delta), delta)]
    if plan.allow_mixing is not None:
        warning = (
            "NOT COVERED: examples may mix in the model, so one example can change the gradients of others, which "
            f"clipping does not bound. The guarantee holds only if they do not. Reason given: {plan.allow_mixing}"
        )
        lines += textwrap.wrap(warning, width=_WIDTH)
    lines += [*_section(answer, by_user), "", *_section(details, by_user), ""]
    lines.append("Assumptions:")
    for assumption in _assumptions(plan):
        lines += textwrap.wrap(f"  - {assumption}", width=_WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)


def headline(plan: PrivacyPlan, epsilon: float, delta: float | None) -> str:
    """Return the first line of the statement for the plan's ε, rounded up."""
    if isinstance(plan.release, NoiselessSquare):
        return "NOT PRIVATE: epsilon = inf (the squared gradient is released without noise)"
    if math.isinf(epsilon):
        reason = "noise_multiplier is 0" if plan.noise_multiplier == 0 else "too little noise to account for"
        return f"NOT PRIVATE: epsilon = inf ({reason})"
    return f"Differentially private: epsilon = {format_epsilon(epsilon)} at delta = {delta:g}"


def _of_users(text: str) -> str:
    """Say "user" where a text says "example"."""
    return re.sub(r"\bexample", "user", re.sub(r"\b([Aa])n example", r"\1 user", text))


def _section(texts: dict[str, str], by_user: bool) -> list[str]:
    lines = []
    for title, text in texts.items():
        text = _of_users(text) if by_user else text
        lines += textwrap.wrap(
            f"{title + ':':<20}{text}",
            width=_WIDTH,
            subsequent_indent=" " * 20,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _sampling(plan: PrivacyPlan) -> str:
    cyclic = f"{plan.sampling.bands}*" if isinstance(plan.sampling, CyclicPoisson) else ""
    return (
        f"{plan.sampling.describe()}. num_examples = {plan.num_examples}, batch_size = {plan.batch_size}, "
        f"{cyclic}batch_size/num_examples = {plan.sampling_prob:.6g}, steps = {plan.steps}"
    )


def _second_opinion(plan: PrivacyPlan, delta: float | None) -> str:
    second = plan.rdp_epsilon(delta=delta)
    if second is None:
        what = "counts" if plan.counts is not None else "this sampling and adjacency"
        return f"No second bound is implemented for {what}"
    return f"A second proof, by Rényi divergences, gives epsilon <= {format_epsilon(second)}"


def _participation(plan: PrivacyPlan) -> str:
    if isinstance(plan.run, GaussianRun):
        return (
            f"an example takes part in at most {plan.max_participations} steps, at least {plan.min_separation} steps "
            "apart"
        )
    if isinstance(plan.sampling, CyclicPoisson):
        return (
            f"an example may take part in at most {plan.max_participations} of the {plan.steps} steps, every "
            f"{plan.min_separation} steps at its group's turn, with probability {plan.sampling_prob:.6g} each; secret "
            f"sampling amplifies, as {plan.max_participations} Poisson-sampled Gaussian steps (Choquette-Choo et al. "
            "2023)"
        )
    return f"an example may take part in any of the {plan.steps} steps; secret sampling amplifies"


def _released(plan: PrivacyPlan) -> str:
    text = f"{plan.release.describe()}, each {plan.clipping.describe(plan.clip_norm)}"
    if plan.unit == "user":
        text += " (a user's gradient is the mean over the user's records in the step, at most "
        text += f"{plan.records_per_user}, drawn at random)"
    if isinstance(plan.release, IndependentMoments) and plan.release.squares == "of_average":
        text += f"; the averaged gradient is projected onto norm {plan.clip_norm:g} before it is squared"
    return f"{text}; averages are over the expected batch size"


def _sensitivity(plan: PrivacyPlan) -> str:
    factor = plan.adjacency.sensitivity_factor
    text = f"one participation moves the clipped sum by at most {factor * plan.clip_norm:g}"
    if isinstance(plan.run, TruncatedPoissonRun):
        text += f", or {2 * plan.clip_norm:g} where it takes another example's place in a full batch"
    if isinstance(plan.release, IndependentMoments):
        square = release_types.square_sensitivity(squares=plan.release.squares, **plan._release_setting)
        text += f", and the square by at most {square:.6g}"
    if isinstance(plan.release, JointMoments):
        weight = release_types.default_square_weight(plan.release, plan.clip_norm)
        joint = release_types.joint_sensitivity(
            square_weight=weight, sampling=plan.sampling, adjacency=plan.adjacency, clip_norm=plan.clip_norm
        )
        text += f", and the joint vector (weight of the square {weight:.6g}) by at most {joint:.6g}"
    if isinstance(plan.release, NoiselessSquare):
        text += "; no noise covers the square"
    if isinstance(plan.run, GaussianRun):
        pattern = {"max_participations": plan.max_participations, "min_separation": plan.min_separation}
        exact = plan.square_strategy is plan.strategy and plan.strategy.is_exact_for(**pattern)
        kind = "exact" if exact else "an upper bound"
        text += f". Over all steps, per clip_norm, with unit columns: {plan.run.sensitivity:.6g} ({kind})"
    return text


def _noise(plan: PrivacyPlan) -> str:
    stds = plan.noise_stddevs()
    text = f"Gaussian matrix mechanism, {plan.noise!r}, column norm {plan.strategy.column_norm:.6g}"
    each = ""
    if isinstance(plan.release, IndependentMoments) and plan.square_strategy is not plan.strategy:
        norm = plan.square_strategy.column_norm
        text += f"; on the square {plan.release.square_noise!r}, column norm {norm:.6g}, accounted for jointly"
        each = " of each strategy"
    text += f". noise_multiplier = {plan.noise_multiplier:.6g}; standard deviation {stds.gradient_sum:.6g} on the "
    text += "clipped sum"
    if stds.square is not None:
        text += f" and {stds.square:.6g} on the averaged square"
    text += f", times column norm times row t of the noising matrix{each}"
    if plan.exact_noise and plan.is_private:
        text += ". It is added without floating-point errors: each number is the clipped sum plus real-valued noise, "
        text += "rounded to a grid"
    return text


def _assumptions(plan: PrivacyPlan) -> list[str]:
    secret = "The noise key is secret, comes from the operating system and is used for this run only."
    if plan.sampling.is_random:
        secret += " Nobody learns which examples were in which batch."
    own = []
    if plan.unit == "user":
        secret = _of_users(secret)
        own = [
            "All records of a user have the same id, neighbours have the same ids, and the rows of a batch stay in the "
            "loader's order."
        ]
    return [
        *own,
        "Each record's loss depends only on that record and the parameters (no batch statistics). Losses are summed "
        "before the backward pass, or averaged if the optimizer has loss_reduction='mean'.",
        "Random draws of the model and the collator (dropout, masks) are secret and new at each step. dpoptim train, "
        "PrivateTrainer and the Opacus interface ensure this; your own loop needs "
        "dpoptim.secret_randomness(loader, optimizer).",
        "A gradient that is not finite gets weight 0, and its existence is not reported.",
        f"The run takes no more than {plan.steps} steps on batches from its loader. A step is repeated, after resuming "
        "an older checkpoint, only with the same data and settings, and no copy of the run continues elsewhere.",
        secret,
        "The starting weights do not depend on these records; otherwise the ε of their training adds to this one.",
        "num_examples, batch_size and the other numbers above are public and were not chosen by looking at the data. "
        "So are the names of labels, columns and classes, the vocabulary and the longest length, even if they were "
        "read from the data. Ranges and categories of columns are public too, or were estimated in this run; if an "
        "earlier run estimated them, its ε adds to this one.",
        "Only the released values are covered. Raw losses, gradient norms, evaluation on the training records, step "
        "times, and hyperparameters chosen over several runs are not.",
        "Gradients are clipped and summed in float64. What rounding reveals there or in the model is not covered."
        if plan.exact_noise and plan.is_private
        else "The noise is Gaussian over the real numbers; what floating-point rounding reveals is not covered.",
    ]
