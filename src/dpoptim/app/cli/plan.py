"""Compare noise mechanisms for a run, all at the same (epsilon, delta), and recommend one.

RMSE is the root mean square error that the noise causes in prefix sums of averaged gradients (sums from step 1 to each
step) at clip norm 1. --workload chooses different sums. RMSE includes the noise multiplier and the sensitivity.

examples:
  dpoptim plan --steps 2000 --batch-size 2048 --num-examples 1700000 --epsilon 10 --delta 1e-7
      shuffled batches: no amplification, and the order need not be secret
  dpoptim plan ... --sampling poisson
      secret sampling: finds the number of bands that best balances correlation and amplification
  dpoptim plan ... --parameters 124M --memory-budget 2GB --plot plan.png
  dpoptim plan ... --parameters 7e9 --gpus 64
      also prints the memory per GPU and the bytes that each GPU sends per step
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from rich.console import Console

from dpoptim.app.cli import options as shared
from dpoptim.app.plot_style import new_figure
from dpoptim.app.progress import ProgressReporter
from dpoptim.arguments import check_whole
from dpoptim.integrations.named_settings import name_of_noise, name_of_sampling
from dpoptim.noise import Banded, DecayedSums, Dense, NoiseMemory, PrefixSums, StrategySpec, Workload
from dpoptim.privacy import Adjacency, PrivacyPlan, Shuffled
from dpoptim.privacy.statement import format_epsilon
from dpoptim.theory import Candidate, Choice, choose_noise, format_bytes

_DENSE_STEPS = 2_000  # searched in a minute if each example participates once
LEGEND = """\
RMSE: the error that noise leaves on prefix sums (or --workload) of averaged
gradients at clip norm 1; lower is better. σ: the noise multiplier.
normals per step: rows of random numbers, which decide how long the noise takes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    training = shared.add_training(parser, required=True, title="training")
    shared.add_sampling(training)
    noise = parser.add_argument_group("noise")
    noise.add_argument(
        "--parameters",
        type=shared.count,
        default=4_400_000,
        metavar="N",
        help="trained parameters, which determine the memory (default: 4.4M, BERT-Tiny)",
    )
    shared.add_noise_memory(noise)
    noise.add_argument(
        "--gpus", type=shared.count, metavar="N", help="print memory and communication of each of N GPUs"
    )
    noise.add_argument(
        "--workload",
        type=_workload,
        default=PrefixSums(),
        metavar="W",
        help="what the error is measured on: prefix (default), momentum:BETA, or moments:BETA2 for Adam's averages",
    )
    noise.add_argument(
        "--all",
        action="store_true",
        help=f"also compare Banded and, if examples participate once in up to {_DENSE_STEPS:,} steps, Dense; they take "
        "longer to optimize, and need shuffled sampling",
    )
    shared.add_output(parser, verbose="show every mechanism")


def run(options: argparse.Namespace) -> int:
    """Print the comparison as a table or as JSON, and draw it if asked."""
    plan = shared.uncalibrated_plan(options)
    shared.check_plot(options.plot)
    if options.gpus is not None:
        check_whole("gpus", options.gpus)
    with ProgressReporter(Console(stderr=True)) as progress:
        choice = choose_noise(
            plan,
            epsilon=options.epsilon,
            delta=options.delta,
            parameters=options.parameters,
            memory_budget=options.memory_budget,
            memory=NoiseMemory(bits=options.noise_bits),
            workload=options.workload,
            more=_slow_mechanisms(plan, options.workload) if options.all else (),
            progress=lambda name: progress.stage(f"optimizing and calibrating {name}"),
        )
    if options.json:
        print(json.dumps(as_json(choice, options), indent=2))
    else:
        _print_choice(choice, options)
    shared.draw(options, lambda: draw_plan(choice))
    return 0


def _workload(text: str) -> Workload:
    kind, _, value = text.partition(":")
    try:
        if kind == "momentum":
            return PrefixSums(momentum=float(value))
        if kind == "moments":
            return DecayedSums(beta=float(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if text != "prefix":
        raise argparse.ArgumentTypeError(f"{text!r} is not prefix, momentum:BETA or moments:BETA2")
    return PrefixSums()


def _slow_mechanisms(plan: PrivacyPlan, workload: Workload) -> list[StrategySpec]:
    if not isinstance(plan.sampling, Shuffled):
        return []
    banded = Banded(bands=min(128, plan.min_separation, plan.steps), workload=workload)
    is_quick = plan.max_participations == 1 and plan.steps <= _DENSE_STEPS
    return [banded, Dense(workload=workload)] if is_quick else [banded]


def as_json(choice: Choice, options: argparse.Namespace) -> dict[str, Any]:
    """The comparison as plain values; see `mechanism_values` for the numbers of each mechanism."""
    return {
        **shared.fields(options, "epsilon", "delta", "steps", "batch_size", "num_examples"),
        "adjacency": choice.plan.adjacency.value,
        "unit": choice.plan.unit,
        "workload": repr(choice.chosen.workload),
        "parameters": choice.chosen.parameters,
        "noise_to_signal": choice.plan.outlook(parameters=choice.chosen.parameters).noise_to_signal,
        "chosen": choice.chosen.name,
        "reason": choice.reason,
        **({} if options.gpus is None else {"per_gpu": costs_per_gpu(choice, options.gpus, options.memory_budget)}),
        "mechanisms": [mechanism_values(candidate, delta=options.delta) for candidate in choice.candidates],
    }


def main_candidates(choice: Choice) -> list[Candidate]:
    """At most ten mechanisms: independent noise, the chosen one, and the eight with the least error."""
    best = sorted(choice.candidates, key=lambda candidate: candidate.rmse_mean)[:8]
    wanted = (*best, choice.chosen, choice.independent)
    return [one for one in choice.candidates if any(one is other for other in wanted)]


def _print_choice(choice: Choice, options: argparse.Namespace) -> None:
    plan, independent = choice.plan, choice.independent.rmse_mean
    shown = choice.candidates if options.verbose else main_candidates(choice)
    rows = [mechanism_row(one, {"ratio": f"{one.rmse_mean / independent:.4f}"}, mechanism=one.name) for one in shown]
    table = shared.table_of(rows, words=1, chosen=[one is choice.chosen for one in shown].index(True))
    console = shared.output_console()
    console.print(f"Use {choice.reason}.", highlight=False, markup=False)
    print(f"  {plan_line(plan, options)}")  # to be copied: never wrapped
    print(f"  or: dpoptim train ... --sampling {name_of_sampling(plan.sampling)} --noise {name_of_noise(plan.noise)}\n")
    console.print(headline(plan, options), highlight=False, markup=False)
    outlook = plan.outlook(parameters=choice.chosen.parameters)
    if outlook.verdict != "good":
        console.print(f"Outlook for {outlook.parameters:,} parameters: {outlook}.", highlight=False, markup=False)
    console.print(table)
    print(LEGEND)
    print("ratio: mean RMSE over that of independent noise.")
    if len(shown) < len(choice.candidates):
        print(f"{len(shown)} of {len(choice.candidates)} mechanisms are shown; --verbose shows all.")
    if options.gpus is not None:
        print(f"\nEach of {options.gpus:,} GPUs, with bf16 weights and scale-then-privatize:")
        for name, found in costs_per_gpu(choice, options.gpus, options.memory_budget).items():
            numbers = {what: number for what, number in found.items() if not isinstance(number, str)}
            cost = {what: format_bytes(number) if number else "nothing" for what, number in numbers.items()}
            print(
                f"  {name:8} {cost['memory']}: weights {cost['weights']}, optimizer {cost['optimizer']}, clipped sums "
                f"{cost['sums']}, past noise {cost['noise']}\n           {found['mechanism']}; sends {cost['sent']} "
                f"per {'step' if name == 'whole' else 'micro-batch'}, without privacy {cost['sent_without_privacy']}"
            )
        print("whole: a whole model on each GPU. sharded: FSDP2. Activations come on top.")


def costs_per_gpu(choice: Choice, gpus: int, memory_budget: int | None) -> dict[str, dict[str, int | str]]:
    """Bytes that each GPU holds and sends with bf16 weights and Adam: for a whole model on each, and with FSDP2.

    The mechanism is the best whose past noise fits a memory budget on each GPU, of which FSDP2 stores a part.
    To gather n bytes, or to add them up and divide them, each of N devices sends (N−1)/N·n; an all-reduce is both.
    Noise is made on each GPU and not sent. FSDP2 gathers the weights twice in a micro-batch.
    """
    numel = choice.chosen.parameters
    gathers, scale, sums, gradients = 2 * 2, 4, 4, 2  # bytes per parameter; gradients: without privacy, in bf16
    sent = {"whole": (2 * sums, 2 * gradients), "sharded": (gathers + scale + sums, gathers + gradients)}
    found: dict[str, dict[str, int | str]] = {}
    for name, (private, ordinary) in sent.items():
        holders, kept = (1, 10) if name == "whole" else (gpus, 14)  # FSDP2 also stores the scale
        candidate = choice.chosen if memory_budget is None else choice.within(memory_budget * holders).chosen
        held = {"weights": 2 * numel, "optimizer": kept * numel, "sums": 4 * numel, "noise": candidate.memory_bytes}
        own = {what: -(-number // holders) for what, number in held.items()}
        each = {"sent": private, "sent_without_privacy": ordinary}
        counted = {what: number * (gpus - 1) * numel // gpus for what, number in each.items()}
        found[name] = {"mechanism": candidate.name, **own, "memory": sum(own.values()), **counted}
    return found


def mechanism_values(candidate: Candidate, *, delta: float) -> dict[str, Any]:
    """The mechanism as plain values.

    rmse_mean = noise_multiplier·sensitivity·mean error/batch size, with the sensitivity of one participation.
    `total_sensitivity`, given where sampling does not amplify, is how far one neighbour moves the whole run.
    """
    plan, strategy = candidate.plan, candidate.plan.strategy
    total = None
    if isinstance(plan.sampling, Shuffled):
        total = plan.adjacency.sensitivity_factor * plan.sensitivity_ratio(strategy) * strategy.column_norm
    return {
        "name": candidate.name,
        "sampling": repr(plan.sampling),
        "noise_multiplier": plan.noise_multiplier,
        "sensitivity": strategy.column_norm,
        "total_sensitivity": total,
        **shared.fields(candidate, "rmse_mean", "rmse_max", "memory_bytes", "normal_rows"),
        "epsilon": plan.epsilon(delta=delta),
    }


def mechanism_row(candidate: Candidate, errors: dict[str, str], **names: str) -> dict[str, str]:
    """The mechanism's row of a table: these names, its errors and more of them, and what the noise costs."""
    return {
        **names,
        "noise σ": f"{candidate.plan.noise_multiplier:.4f}",
        "RMSE mean": f"{candidate.rmse_mean:.4g}",
        "RMSE max": f"{candidate.rmse_max:.4g}",
        **errors,
        "memory": "-" if candidate.memory_bytes == 0 else format_bytes(candidate.memory_bytes),
        "normals per step": f"{candidate.normal_rows:.0f}",
    }


def headline(plan: PrivacyPlan, options: argparse.Namespace) -> str:
    """The guarantee and the training in two lines."""
    sampling = "Secret Poisson sampling, in cycles if the noise is correlated."
    if isinstance(plan.sampling, Shuffled):
        repeats = f"each {plan.unit} participates once"
        if plan.max_participations > 1:
            repeats = f"{plan.max_participations} participations at least {plan.min_separation:,} steps apart"
        sampling = f"Shuffled batches, not amplified: {repeats}."
    adjacency = plan.adjacency.value.replace("_", "-")
    return (
        f"epsilon = {options.epsilon:g} at delta = {options.delta:g}, {adjacency} adjacency; "
        f"{plan.steps:,} steps of {plan.batch_size:,} from {plan.num_examples:,} {plan.unit}s.\n{sampling}"
    )


def plan_line(plan: PrivacyPlan, options: argparse.Namespace) -> str:
    """Python code for the plan, with all digits; its sizes are left out."""
    clip_norm = "" if plan.clip_norm == 1 else f"clip_norm={plan.clip_norm!r}, "
    adjacency = "" if plan.adjacency is Adjacency.ZERO_OUT else f"adjacency=Adjacency.{plan.adjacency.name}, "
    users = "" if plan.unit == "example" else f"unit='user', records_per_user={plan.records_per_user}, "
    return (
        f"PrivacyPlan(..., {clip_norm}{adjacency}{users}sampling={plan.sampling!r}, noise={plan.noise!r})"
        f".calibrate(epsilon={options.epsilon!r}, delta={options.delta!r})"
    )


def draw_plan(choice: Choice) -> Any:
    """Draw the error at each step, and the mean error against memory; the chosen mechanism is thick."""
    candidates = main_candidates(choice)
    figure = new_figure(11, 5)
    by_step, by_memory = figure.subplots(1, 2, width_ratios=[3, 2])
    for index, candidate in enumerate(candidates):
        colour, is_chosen = f"C{index % 10}", candidate is choice.chosen
        steps = np.arange(1, len(candidate.errors) + 1)
        by_step.plot(steps, candidate.errors, label=candidate.name, color=colour, linewidth=3.0 if is_chosen else 1.3)
        place = (candidate.memory_bytes / 1e6, candidate.rmse_mean)
        by_memory.plot(*place, marker="o", markersize=10 if is_chosen else 6, color=colour)
    plan = choice.plan
    by_step.set(xlabel="step", ylabel="RMSE, prefix sums of averaged gradients", yscale="log")
    by_step.set_title(f"noise at ε = {format_epsilon(plan.epsilon())}, δ = {plan.delta:g}, clip norm 1", fontsize=10)
    figure.legend(*by_step.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    by_memory.set(xlabel="memory for the noise, MB", ylabel="mean RMSE", yscale="log")
    by_memory.set_xscale("symlog", linthresh=1.0)
    by_memory.set_xlim(-0.3, 3 + 3 * max(candidate.memory_bytes for candidate in candidates) / 1e6)
    by_memory.set_title(f"{choice.chosen.parameters:,} parameters; the large dot is the choice", fontsize=10)
    for axes in (by_step, by_memory):
        axes.grid(alpha=0.3, which="both")
    return figure
