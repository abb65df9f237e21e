"""`dpoptim train`: a private training run from a recipe, from flags, or, with neither, the built-in demonstration."""

from __future__ import annotations

import argparse
import datetime
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpoptim.app.cli.quiet import silence_libraries
from dpoptim.app.cli.units import count
from dpoptim.app.format import plain
from dpoptim.app.recipes.recipe import SCHEDULES, VARIANTS
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import CLIP_NORM, noise_words
from dpoptim.privacy import Adjacency

if TYPE_CHECKING:
    from argparse import Namespace

_DESCRIPTION = """\
Train a model privately, with every setting from RECIPE (a TOML file), from flags over it, or by default: a model, data
and epsilon are enough. Without any of them, a small BERT is pretrained on public text and fine-tuned privately on other
text, offline, as a demonstration.

The run directory holds recipe, plan, privacy statement, log, checkpoints and the model. It also holds noise.key, the
secret behind the noise: never publish it. Ctrl-C saves at the end of the step; --resume goes on bit for bit.
"""

_EXAMPLES = """\
examples:
  dpoptim train
      the demonstration: masked language modelling, six ways, in about two minutes
  dpoptim train --model ./bert-tiny --data notes.jsonl --epsilon 8
      everything else by default; a twentieth of the records is held out to see how it goes
  dpoptim train recipe.toml --epsilon 3 --run-dir runs/eps3
      a recipe, with one setting put over it
  dpoptim train recipe.toml --dry-run
      the plan, the noise, memory and time; nothing is trained, nothing is written
  dpoptim train --resume runs/eps3
"""


def add_to(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a model privately: from a recipe, from flags, or a demonstration with neither",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        argument_default=None,
    )
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a TOML file; flags are put over its settings")
    _add_data(parser)
    _add_privacy(parser)
    _add_optimizer(parser)
    _add_run(parser)
    parser.set_defaults(run=run)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and data")
    group.add_argument("--model", metavar="M", help='a folder, a Hugging Face name, "mlp" or "small-cnn"')
    group.add_argument("--data", metavar="D", help=".jsonl, .csv, .parquet, .txt, a folder, or a dataset's name")
    group.add_argument(
        "--task",
        choices=[task.value for task in Task],
        metavar="NAME",
        help=f"{', '.join(task.value for task in Task)} (default: what the model's configuration says)",
    )
    group.add_argument("--split", metavar="NAME", help="of the data (default: train)")
    group.add_argument("--text-column", metavar="NAME")
    group.add_argument("--label-column", metavar="NAME")
    group.add_argument("--validation-data", metavar="D", help="other records to score the model on")
    group.add_argument(
        "--validation-fraction", type=float, metavar="F", help="of the records, held out by place (default: 0.05)"
    )
    group.add_argument("--max-length", type=count, metavar="N", help="tokens a text is cut at")
    group.add_argument("--image-size", type=count, metavar="N", help="pixels a side")
    group.add_argument("--from-scratch", action="store_true", default=None, help="new weights of M's configuration")
    group.add_argument("--lora-rank", type=count, metavar="R", help="train LoRA factors of this rank alone")


def _add_privacy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("privacy")
    group.add_argument("--epsilon", type=float, metavar="E", help="of the whole run: 1 is strong, 8 usual, 20 weak")
    group.add_argument(
        "--delta", type=float, metavar="D", help="below 1/records (default: a power of ten, at most 1/(10 records))"
    )
    group.add_argument("--noise-multiplier", type=float, metavar="S", help="in place of --epsilon")
    group.add_argument("--adjacency", choices=[kind.value for kind in Adjacency], help="default: zero_out")
    group.add_argument("--num-examples", type=count, metavar="N", help="a public size of the data; add_remove needs it")
    group.add_argument(
        "--sampling",
        metavar="S",
        help="auto (default: secret where it is proved for the noise), poisson, shuffled, cyclic, cyclic:GROUPS",
    )
    group.add_argument(
        "--noise",
        metavar="N",
        help=f"auto (default: least error that is proved), {', '.join(noise_words())}; such as banded-toeplitz:32",
    )
    group.add_argument(
        "--clip-norm", type=float, metavar="C", help=f"of one example's gradient (default: {CLIP_NORM:g})"
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument(
        "--variant", choices=VARIANTS, metavar="NAME", help=f"{', '.join(VARIANTS)} (default: {VARIANTS[0]})"
    )
    group.add_argument(
        "--learning-rate", type=float, metavar="LR", help="default: 5e-4; 1e-3 for LoRA or new weights; 1e-2 built-in"
    )
    group.add_argument("--adam-eps", dest="eps", type=float, metavar="E", help="Adam's eps; a floor in bias_correction")
    group.add_argument("--eps-scale", type=float, metavar="E", help="of scale_then_privatize")
    group.add_argument("--betas", type=float, nargs=2, metavar=("B1", "B2"), help="default: 0.9 0.999")
    group.add_argument("--weight-decay", type=float, metavar="W", help="decoupled (default: 0)")
    group.add_argument("--schedule", choices=SCHEDULES, help="default: linear, down to 0")
    group.add_argument("--warmup", type=float, metavar="F", help="share of the steps (default: 0.05)")
    group.add_argument("--batch-size", type=count, metavar="N", help="expected (default: up to 2048, by size of data)")
    group.add_argument("--steps", type=count, metavar="N", help="of the optimizer")
    group.add_argument(
        "--epochs", type=float, metavar="N", help="in place of --steps, rounded up to whole steps (default: 10)"
    )
    group.add_argument("--micro-batch-size", type=count, metavar="N", help="examples that run at once")
    group.add_argument("--micro-batch-tokens", type=count, metavar="N", help="tokens that run at once")


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--run-dir", metavar="DIR", help="where it is written (default: runs/MODEL-TIME)")
    group.add_argument("--resume", metavar="DIR", help="go on with a run; takes no settings but --device")
    group.add_argument("--dry-run", action="store_true", help="print plan, memory and time; write nothing")
    group.add_argument("--dtype", choices=("fp32", "bf16"), help="default: bf16 on a GPU, else fp32")
    group.add_argument("--device", metavar="D", help="auto (default), cpu, cuda, cuda:1")
    group.add_argument("--seed", type=count, metavar="N", help="of new weights and masks, never of noise (default: 0)")
    group.add_argument("--evaluate-every", type=count, metavar="N", help="steps (default: a tenth of the run)")
    group.add_argument("--checkpoint-every", type=count, metavar="N", help="steps (default: a tenth of the run)")
    group.add_argument("--log-every", type=count, metavar="N", help="steps (default: 10)")
    group.add_argument(
        "--debug", action="store_true", default=None, help="also log training losses and clipping: NOT private"
    )
    group.add_argument("--quick", action="store_true", help="the demonstration with little text and few steps")
    group.add_argument("--json", action="store_true", help="print the summary as JSON, and nothing else there")


_NOT_SETTINGS = ("command", "recipe", "run", "run_dir", "resume", "dry_run", "quick", "json")


def run(options: Namespace) -> int:
    """Train, resume, estimate or demonstrate; 128 + the signal where a run was interrupted."""
    over = {name: value for name, value in vars(options).items() if name not in _NOT_SETTINGS and value is not None}
    silence_libraries()
    console = Console(stderr=True)
    if options.resume is not None:
        return _resume(options, over, console)
    if options.recipe is None and not over.keys() - {"seed", "epsilon", "delta"}:
        return _demonstrate(options, over, console)
    if options.quick:
        raise ValueError("--quick is for the demonstration, which takes no recipe, model or data; leave it out")
    from dpoptim.app import read_recipe  # late: it imports much

    recipe = read_recipe(options.recipe, **over)
    if options.dry_run:
        return _dry_run(recipe, options, console)
    from dpoptim.app import train

    directory = options.run_dir or _default_directory(recipe)
    return _report(train(recipe, directory, progress=_progress(console)), options, console)


def _resume(options: Namespace, over: dict[str, Any], console: Console) -> int:
    from dpoptim.app import resume

    strange = sorted(over.keys() - {"device"})
    if options.recipe is not None or options.run_dir is not None or options.dry_run or options.quick or strange:
        given = _flag(strange[0]) if strange else "anything else"
        raise ValueError(f"--resume goes on with the run's own recipe and takes no {given}; leave it out")
    from dpoptim.app.runs.run_log import is_finished

    if Path(options.resume, "request.json").is_file():
        raise ValueError(
            f"{options.resume} is a comparison; the `dpoptim compare` command that made it goes on with it"
        )
    done = is_finished(Path(options.resume).expanduser())
    summary = resume(options.resume, device=options.device, progress=_progress(console))
    if done:
        console.print(f"already finished: all {summary['steps']} steps were taken", highlight=False)
    return _report(summary, options, console)


def _flag(setting: str) -> str:
    return "--adam-eps" if setting == "eps" else f"--{setting.replace('_', '-')}"


def _demonstrate(options: Namespace, over: dict[str, Any], console: Console) -> int:
    from dpoptim.app.demo import demonstration as demo

    if options.dry_run:
        raise ValueError("--dry-run needs a recipe, or --model, --data and --epsilon; there is no dry demonstration")
    return demo.main(json_wanted=options.json, quick=options.quick, console=console, keep=options.run_dir, **over)


def _dry_run(recipe: Any, options: Namespace, console: Console) -> int:
    from dpoptim.app import prepare_run
    from dpoptim.app.cli import train_estimate
    from dpoptim.app.runs.estimate import estimate

    progress = _progress(console)
    with progress:
        setup = prepare_run(recipe, stage=progress.stage)
        progress.stage("timing a step on random examples")
        found = estimate(setup)
    for line in setup.messages:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if options.json:
        print(json.dumps(plain(train_estimate.as_json(setup, found)), indent=2))
    else:
        print(train_estimate.as_text(setup, found), end="")
    return 0


def _report(summary: dict[str, Any], options: Namespace, console: Console) -> int:
    if options.json:
        print(json.dumps(plain(summary), indent=2, ensure_ascii=False))

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if summary["reason"] != "finished":
        say(f"interrupted after step {summary['step']} of {summary['steps']}, which is saved; go on with:")
        say(f"  dpoptim train --resume {summary['run']}")
        return 128 + summary.get("signal", 2)
    from dpoptim.app.progress import scores_line

    say(summary["guarantee"])
    if summary["validation"] is not None:
        first, last = summary["validation"]["first"], summary["validation"]["last"]
        say(f"before: {scores_line(first)}")
        say(f"after:  {scores_line(last)} (on {last['examples']:,} records outside the guarantee)")
    say(f"model: {summary['model']}; statement and log: {summary['run']}")
    say("noise.key in it is a secret: keep it or delete it, but never share it")
    return 0


def _progress(console: Console) -> Any:
    from dpoptim.app.progress import ProgressReporter

    return ProgressReporter(console)


def _default_directory(recipe: Any) -> str:
    name = re.sub("[^A-Za-z0-9.-]+", "-", Path(recipe.model).name) or "model"
    return f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
