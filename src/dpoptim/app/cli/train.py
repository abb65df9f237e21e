"""Train a model privately.

Only a model, data and epsilon are required. All other settings come from flags, from RECIPE (a TOML file) or from
defaults. Without arguments, a demonstration fine-tunes a small language model privately, offline.

The run directory holds recipe, plan, privacy statement, log, checkpoints and the model. RUN.secret beside it holds the
noise key: never publish it. Ctrl-C saves at the end of the step; --resume continues with the next step.

examples:
  dpoptim train
      the demonstration: masked language modelling with several variants
  dpoptim train --model ./bert-tiny --data notes.jsonl --epsilon 8
      defaults for everything else; 5 % of the records are held out for scores
  dpoptim train recipe.toml --epsilon 3 --run-dir runs/eps3
      a recipe with one setting overridden
  dpoptim train recipe.toml --dry-run
      prints the plan and estimates memory and time; trains and writes nothing
  dpoptim train --resume runs/eps3
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpoptim.app.cli.options import add_setting, output_console, say, silence_libraries
from dpoptim.app.format import duration, plain
from dpoptim.app.recipes.recipe import Recipe, flags, read_recipe

if TYPE_CHECKING:
    from dpoptim.app.progress import ProgressReporter
    from dpoptim.app.runs.estimate import Estimate
    from dpoptim.app.runs.setup import RunSetup


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting of a recipe, and those of the run itself."""
    parser.usage = "%(prog)s [RECIPE] [options]"
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a TOML file; flags override its settings")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag, field in flags().items():
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        add_setting(groups[group], flag)
    run = parser.add_argument_group("command")
    run.add_argument("--run-dir", metavar="DIR", help="where to write the run (default: runs/MODEL-TIME)")
    run.add_argument("--resume", metavar="DIR", help="continue a run; takes only --device and --micro-batch-*")
    run.add_argument(
        "--dry-run", action="store_true", help="print the plan and estimates of memory and time; write nothing"
    )
    run.add_argument("--quick", action="store_true", help="run the demonstration with little text and few steps")
    run.add_argument("--verbose", action="store_true", help="with --dry-run, also print the statement and the recipe")
    run.add_argument("--json", action="store_true", help="print JSON, and nothing else, to standard output")


def run(options: argparse.Namespace) -> int:
    """Train, resume, estimate or demonstrate; return 128 + the signal if a run was interrupted."""
    from rich.console import Console

    from dpoptim.app.progress import ProgressReporter

    names = {field.name for field in dataclasses.fields(Recipe)}
    over = {name: value for name, value in vars(options).items() if name in names and value is not None}
    silence_libraries()
    is_first = int(os.environ.get("RANK", "0")) == 0  # of torchrun's processes
    console = Console(stderr=True)
    progress = ProgressReporter(console if is_first else None)
    if options.resume is not None:
        return _resume(options, over, progress)
    if options.recipe is None and not over.keys() - {"seed", "epsilon", "delta"}:
        from dpoptim.app.demo import demonstration

        if options.dry_run:
            raise ValueError("--dry-run needs a recipe, or --model, --data and --epsilon")
        return demonstration.main(
            json_wanted=options.json, quick=options.quick, console=console, keep=options.run_dir, **over
        )
    if options.quick:
        raise ValueError("--quick is for the demonstration, which takes no recipe, model or data; leave it out")
    recipe = read_recipe(options.recipe, **over)
    if options.dry_run:
        return _dry_run(recipe, options, progress)
    from dpoptim.app import train

    name = re.sub("[^A-Za-z0-9.-]+", "-", Path(recipe.model).name) or "model"
    directory = options.run_dir or f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    summary = train(recipe, directory, progress=progress)
    return _report(summary, options) if is_first else 0


def _resume(options: argparse.Namespace, over: dict[str, Any], progress: ProgressReporter) -> int:
    from dpoptim.app import resume
    from dpoptim.app.runs.run_log import last_reason

    allowed = {"device", "micro_batch_size", "micro_batch_tokens"}
    settings = [flag for flag, field in flags().items() if field.name in over.keys() - allowed]
    if options.recipe is not None or options.run_dir is not None or options.dry_run or options.quick or settings:
        given = settings[0] if settings else "other arguments"
        raise ValueError(f"--resume uses the run's own recipe and takes no {given}; leave it out")
    if Path(options.resume, "request.json").is_file():
        raise ValueError(f"{options.resume} is a comparison; resume it with the `dpoptim compare` command that made it")
    directory = Path(options.resume).expanduser()
    was_finished = last_reason(directory) == "finished" and (directory / "model").is_dir()
    summary = resume(options.resume, **over, progress=progress)
    if int(os.environ.get("RANK", "0")) > 0:
        return 0
    if was_finished:
        say(f"already finished: all {summary['steps']} steps were taken")
    return _report(summary, options)


def _dry_run(recipe: Recipe, options: argparse.Namespace, progress: ProgressReporter) -> int:
    from dpoptim.app import prepare_run
    from dpoptim.app.runs.estimate import estimate

    with progress:
        setup = prepare_run(recipe, estimate_columns=False, stage=progress.stage)
        progress.stage("timing a step on random examples")
        found = estimate(setup)
    for line in setup.messages:
        say(line)
    if options.json:
        print(json.dumps(plain(_estimate_values(setup, found)), indent=2))
    else:
        print(_estimate_text(setup, found, verbose=options.verbose, width=output_console().width))
    return 0


def _estimate_values(setup: RunSetup, found: Estimate) -> dict[str, Any]:
    """The whole recipe, the plan and the estimate as plain values, in bytes and seconds."""
    from dpoptim.theory import Candidate

    plan = setup.plan
    return {
        "recipe": setup.recipe.to_dict(),
        "plan": plan.to_dict(),
        "epsilon": plan.epsilon(),
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "mechanism": setup.recipe.noise,
        "rmse": Candidate(plan=plan, parameters=setup.trained_parameters).rmse_mean,
        "trained_parameters": setup.trained_parameters,
        "validation_examples": _held_out(setup),
        "noise_to_signal": plan.outlook(parameters=setup.trained_parameters).noise_to_signal,
        "estimate": dataclasses.asdict(found),
    }


def _estimate_text(setup: RunSetup, found: Estimate, *, verbose: bool, width: int) -> str:
    """The answer in one screenful: guarantee, outlook, time and memory, then what they follow from."""
    from dpoptim.theory import format_bytes

    recipe, plan = setup.recipe, setup.plan
    statement = plan.statement()
    units, most = "records", ""
    held_out = _held_out(setup)
    more = f"{held_out:,} more {'record is' if held_out == 1 else 'records are'} held out for scores"
    if plan.unit == "user":
        units, most = "users", f", at most {plan.records_per_user} records of each,"
    lines = [
        statement.splitlines()[0],
        f"outlook    {plan.outlook(parameters=setup.trained_parameters)}",
        f"time       about {duration(found.run_seconds)} on {setup.device} in {recipe.dtype}, "
        f"{found.step_seconds:.3g} s per step (measured on random examples, without evaluations)",
        f"memory     about {format_bytes(found.memory_bytes)}: parameters {format_bytes(found.parameter_bytes)}, "
        f"optimizer {format_bytes(found.optimizer_bytes)}, noise {format_bytes(found.noise_bytes)}, "
        f"one micro-batch {format_bytes(found.working_bytes)}",
        f"task       {recipe.task}, {setup.trained_parameters:,} trained parameters",
        f"data       {plan.num_examples:,} training {units}; {more}",
        f"training   {plan.steps:,} steps of {plan.batch_size:,} {units}{most} with {recipe.variant}, learning rate "
        f"{recipe.learning_rate:g}",
        f"noise      {recipe.noise}, multiplier {plan.noise_multiplier:.4f}; {recipe.sampling} sampling, "
        f"{recipe.adjacency.replace('_', '-')} adjacency",
        "",
        "Nothing was written. Leave out --dry-run to train.",
    ]
    lines = [textwrap.fill(line, width, subsequent_indent=" " * 11) for line in lines]
    if verbose:
        return "\n".join([*lines, "", statement, "", "The whole recipe:", "", recipe.to_toml()])
    return "\n".join([*lines, "--verbose also prints the privacy statement and the whole recipe."])


def _held_out(setup: RunSetup) -> int:
    return 0 if setup.validation is None else len(setup.validation.records)


def _report(summary: dict[str, Any], options: argparse.Namespace) -> int:
    """Print the summary of a run, and how to resume it if it was interrupted."""
    from dpoptim.app.progress import scores_line
    from dpoptim.app.runs.run_directory import RunDirectory

    if options.json:
        print(json.dumps(plain(summary), indent=2, ensure_ascii=False))
    if summary["reason"] != "finished":
        say(f"interrupted after step {summary['step']} of {summary['steps']}, which is saved; resume with:")
        say(f"  dpoptim train --resume {summary['run']}")
        return 128 + summary.get("signal", 2)
    say(summary["guarantee"])
    if summary["validation"] is not None:
        first, last = summary["validation"]["first"], summary["validation"]["last"]
        say(f"before: {scores_line(first)}")
        records = f"{last['examples']:,} {'record' if last['examples'] == 1 else 'records'}"
        say(f"after:  {scores_line(last)} (on {records} outside the guarantee)")
        if last["loss"] is None:
            say("the model diverged and is useless; train a new run with a smaller --learning-rate (epsilons add up)")
    say(f"model: {summary['model']}; statement and log: {summary['run']}")
    secret = RunDirectory(Path(summary["run"])).secret_folder
    if secret.is_dir():
        say(f"{secret} holds the noise key: keep it or delete it, but never share it")
    return 0
