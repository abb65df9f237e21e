"""`python -m experiments`: reproduce the paper's experiments, with their tables and pictures."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dpoptim.integrations.optional import require
from experiments import framework, results_file
from experiments.framework import NAMES, SCALES, Experiment, MissingInput, Request
from experiments.options import add_machine, add_output
from experiments.progress import ProgressReporter, reporter_for

_DESCRIPTION = """\
Reproduce the paper's experiments. Each finished cell (one setting) is a line of OUT/NAME.jsonl. The tables OUT/NAME.md
and the pictures OUT/images/NAME-*.png are made from that file alone. Ctrl-C keeps finished cells, and the same command
resumes: cells in the file are not run again.

experiments:
"""

_EXAMPLES = """\
examples:
  python -m experiments theory --out mine
      minutes on two cores; writes mine/theory.jsonl, mine/theory.md and mine/images/theory-*.png
  python -m experiments logistic --scale paper --only noise=dense --out mine
      the paper's size, one setting of three
  python -m experiments all --render --docs experiments/results.md
      runs nothing; updates tables and pictures of a page with marks
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Bad input prints one line on standard error and returns 2."""
    options = command_line().parse_args(arguments)
    try:
        return run(options)
    except (ValueError, OSError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2


def command_line() -> argparse.ArgumentParser:
    """The parser of `python -m experiments`."""
    listed = "".join(f"  {name:<13} {text}\n" for name, text in {**NAMES, "all": "every one, in this order"}.items())
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=_DESCRIPTION + listed,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("experiments", nargs="+", metavar="NAME", choices=[*NAMES, "all"], help="as listed above")
    what = parser.add_argument_group("what to run")
    what.add_argument(
        "--scale",
        choices=SCALES,
        help="smoke: seconds; small: minutes on two cores (default); paper: the paper's size. With --render, the "
        "default is the largest in the file",
    )
    what.add_argument(
        "--only",
        action="append",
        metavar="NAME=VALUE",
        help="only cells with this setting; may be repeated (several values of one name are alternatives)",
    )
    what.add_argument("--seeds", type=int, metavar="N", help="number of seeds, for experiments with seeds")
    what.add_argument("--data", metavar="D", help="data, for experiments that need it (skipped without it)")
    add_machine(what)
    what.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="then start no more cells; long ones are paused"
    )
    what.add_argument(
        "--overwrite", action="store_true", help="start over; the old file is kept as NAME.jsonl.old, .old2, …"
    )
    output = parser.add_argument_group("output")
    add_output(output)
    output.add_argument("--render", action="store_true", help="run nothing, only make tables and pictures")
    output.add_argument(
        "--docs", type=Path, metavar="FILE", help="also update the tables on this page, between its marks"
    )
    return parser


def run(options: Namespace) -> int:
    """Run the experiments, make tables and pictures, and print where they are."""
    request = Request(
        scale=options.scale or "small", out=options.out, seeds=options.seeds, device=options.device, data=options.data,
        workers=options.workers, model=options.model, commit=options.commit, time_limit=options.time_limit,
        overwrite=options.overwrite, only=tuple(options.only or ()),
    )  # fmt: skip
    experiments = framework.experiments(options.experiments)
    if options.docs is not None and not options.docs.is_file():
        raise ValueError(f"--docs {options.docs} is not a file; it must be a page with marks to fill")
    if options.docs is not None:
        for experiment in experiments:  # check before hours are spent
            framework.marks(options.docs.read_text(encoding="utf-8"), experiment)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file; it must be a folder, which is created if missing")
    outcomes = []
    try:
        with reporter_for(Console(stderr=True)) as reporter:
            begun = set()
            for experiment in experiments:  # two may share a file, which is started over only once
                own = replace(request, overwrite=False) if experiment.file in begun else request
                begun.add(experiment.file)
                outcomes.append(_run_one(experiment, own, options, reporter, alone=len(experiments) == 1))
    except KeyboardInterrupt:
        how = "the same command without --overwrite" if options.overwrite else "the same command"
        print(f"experiments: interrupted; finished cells are in {options.out}, {how} resumes", file=sys.stderr)
        return 130
    for lines, _ in outcomes:
        print("\n".join(lines))
    return 2 if all(skipped for _, skipped in outcomes) else 0


def _run_one(
    experiment: Experiment, request: Request, options: Namespace, reporter: ProgressReporter, *, alone: bool
) -> tuple[list[str], bool]:
    """Run one experiment and render it; returns lines to print, and whether it was skipped for missing input."""
    path, left = request.file(experiment.file), 0
    there = 0 if request.overwrite else len(results_file.done(path, scale=request.scale))
    scale = options.scale if options.render else request.scale
    try:
        if options.render:
            framework.lines_of(experiment, request.out, scale)
        else:
            left = experiment.run(request, reporter)
    except MissingInput as error:
        if alone:
            raise
        return [f"{experiment.name}: skipped: {error}"], True
    cells = len(results_file.done(path, scale=scale))
    if not cells:  # the time limit came first
        return [f"{experiment.name}: no cell was run; {left} or more are left"], False
    reporter.doing("tables and pictures")
    pictures = _can_draw(reporter)
    files = framework.render(experiment, request.out, scale=scale, pictures=pictures)
    if options.docs is not None:
        files += framework.render_into(options.docs, experiment, request.out, scale=scale, pictures=pictures)
    new = 0 if options.render else cells - there
    more = f"; {left} or more are left" if left else ""
    return [f"{experiment.name}: {cells} cells, {new} of them new{more}", *(f"  wrote {file}" for file in files)], False


def _can_draw(reporter: ProgressReporter) -> bool:
    """Whether matplotlib is installed."""
    try:
        require("matplotlib", "a picture")
    except ValueError as error:
        reporter.say(f"{error}; tables are made without pictures")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
