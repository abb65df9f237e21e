"""`dpoptim compare`: several variants at one privacy budget, several seeds, tuned, with confidence intervals."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpoptim.app.cli.quiet import silence_libraries
from dpoptim.app.cli.training_options import check_plot
from dpoptim.app.cli.units import count

if TYPE_CHECKING:
    from argparse import Namespace

_DESCRIPTION = """\
Train several variants at one (epsilon, delta), with the same sampling, batch and steps, each with several seeds and at
its best setting of a grid, and print a table with 95 % intervals. RECIPE is the recipe of `dpoptim train`; a [compare]
table in it may hold everything below, and flags are put over it.

Trying settings on private records costs privacy too, so --budget-for-tuning must be said where there is a choice:
  EPSILON  all trials of a variant together cost at most this, and have the noise for it
  public   trials run on --tuning-data, records that are not private; no cost
  none     trials run on the private records, and epsilon of a run does NOT cover them

Each seed is a release of its own: the table states epsilon of one run, and of everything in it, composed. Every run is
a run directory in FOLDER; Ctrl-C saves, and the same command goes on. Finished runs are never run again.
"""

_EXAMPLES = """\
examples:
  dpoptim compare recipe.toml --variants scale_then_privatize,post_processing --seeds 5
      at the recipe's own settings
  dpoptim compare recipe.toml --grid learning_rate=3e-4,1e-3 --budget-for-tuning 1
      two learning rates, tried at epsilon 1 a variant
  dpoptim compare recipe.toml --grid learning_rate=3e-4,1e-3 --grid scale_then_privatize.eps_scale=1e-6,1e-5 \\
      --budget-for-tuning public --tuning-data public.jsonl --tuning-steps 200
      chosen on public records, one setting for one variant alone
"""


def add_to(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="compare variants at one privacy budget: seeds, tuning and its cost, intervals",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        argument_default=None,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, with a [compare] table or without")
    what = parser.add_argument_group("what is compared")
    what.add_argument("--variants", type=_names, metavar="A,B", help="names as in `dpoptim train` (default: all)")
    what.add_argument(
        "--seeds", type=count, metavar="N", help="how many, from the recipe's on (default: 3; 5 tell more)"
    )
    what.add_argument("--references", action="store_true", help="also without fine-tuning, and NOT PRIVATE training")
    what.add_argument("--metric", choices=("loss", "accuracy"), help="what decides (default: loss)")
    what.add_argument("--epsilon", type=float, metavar="E", help="of one run, in place of the recipe's")
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument(
        "--grid",
        action="append",
        metavar="NAME=V,V",
        help="values of a setting, for all variants or, as VARIANT.NAME=V,V, for one; may be repeated",
    )
    tuning.add_argument("--budget-for-tuning", type=_budget, metavar="B", help="an epsilon, public, or none")
    tuning.add_argument("--tuning-data", metavar="D", help="public records for the trials")
    tuning.add_argument("--tuning-steps", type=count, metavar="N", help="of a trial (default: as many as a run)")
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", metavar="FOLDER", help="where runs are kept (default: runs/compare-RECIPE)")
    output.add_argument("--device", metavar="D", help="auto, cpu, cuda, cuda:1")
    output.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.png, .svg or .pdf); needs matplotlib")
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Run what is left of the comparison and print it; 128 + the signal where it was interrupted."""
    if options.plot is not None:
        check_plot(options.plot)
        from dpoptim.app.cli import compare_plot  # early, so that a missing matplotlib is told before the work
    silence_libraries()
    from dpoptim.app.cli import compare_table
    from dpoptim.app.cli.compare_watch import Told
    from dpoptim.app.comparison.compare import Interrupted, compare
    from dpoptim.app.comparison.request import read_request
    from dpoptim.app.format import plain

    request = read_request(
        options.recipe,
        epsilon=options.epsilon,
        device=options.device,
        variants=options.variants,
        seeds=options.seeds,
        grid=_grid(options.grid or []),
        budget_for_tuning=options.budget_for_tuning,
        tuning_data=options.tuning_data,
        tuning_steps=options.tuning_steps,
        references=options.references or None,
        metric=options.metric,
    )
    folder = options.output or f"runs/compare-{Path(options.recipe).stem}"
    console = Console(stderr=True)
    try:
        with Told(console) as watch:
            result = compare(request, folder, watch=watch)
    except Interrupted as stop:
        _say(console, f"interrupted; {stop.done} of {stop.total} runs are finished and one is saved; go on with:")
        _say(console, f"  {again(options, folder)}")
        return 128 + stop.signal
    except KeyboardInterrupt:
        _say(console, "interrupted; what is finished is kept; go on with:")
        _say(console, f"  {again(options, folder)}")
        return 130
    if options.json:
        json.dump(plain(result), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        compare_table.show(result)
    if options.plot is not None:
        compare_plot.draw(result, options.plot)
        _say(console, f"wrote {options.plot}")
    _say(console, f"runs, with their secret noise.key: {folder}; the numbers: {Path(folder, 'comparison.json')}")
    return 0


def again(options: Namespace, folder: str) -> str:
    """The command that goes on, with every flag that was given."""
    words = ["dpoptim", "compare", options.recipe]
    for name, flag in (
        ("variants", "--variants"), ("seeds", "--seeds"), ("metric", "--metric"), ("epsilon", "--epsilon"),
        ("budget_for_tuning", "--budget-for-tuning"), ("tuning_data", "--tuning-data"),
        ("tuning_steps", "--tuning-steps"), ("device", "--device"), ("plot", "--plot"),
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None:
            words += [flag, ",".join(value) if isinstance(value, list) else str(value)]
    for values in options.grid or []:
        words += ["--grid", values]
    words += [flag for name, flag in (("references", "--references"), ("json", "--json")) if getattr(options, name)]
    return shlex.join([*words, "-o", folder])


def _grid(given: list[str]) -> dict[str, Any]:
    """The grid that the flags describe.

    >>> _grid(["learning_rate=0.1,0.2", "dp_sgd.betas=0.9:0.99"])
    {'learning_rate': [0.1, 0.2], 'dp_sgd': {'betas': [[0.9, 0.99]]}}
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, values = text.partition("=")
        variant, dot, own = name.strip().rpartition(".")
        if not equals or not own or (dot and not variant):
            raise ValueError(f"--grid {text!r} must be written as NAME=VALUE,VALUE or VARIANT.NAME=VALUE,VALUE")
        place = found.setdefault(variant, {}) if variant else found
        if own in place:
            raise ValueError(f"--grid gives {name.strip()} twice; put all values into one")
        place[own] = [_value(part.strip()) for part in values.split(",") if part.strip()]
    return found


def _value(text: str) -> Any:
    """A number, two numbers with a colon between them, or a word."""
    try:
        return [float(part) for part in text.split(":")] if ":" in text else float(text)
    except ValueError:
        return text


def _names(text: str) -> list[str]:
    return [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]


def _budget(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
