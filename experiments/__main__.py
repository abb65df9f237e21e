"""`python -m experiments`: run the paper's experiments again, resumable, and make their tables and pictures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpoptim.app.cli.options import OneLineParser, count
from experiments.experiment import SCALES, Request
from experiments.experiments import NAMES

if TYPE_CHECKING:
    from argparse import Namespace

    from experiments.experiment import Experiment
    from experiments.voice import Voice

_DESCRIPTION = """\
Run the paper's experiments again. Each cell (one setting) is a line of OUT/NAME.jsonl as soon as it is done; tables
OUT/NAME.md and pictures OUT/images/NAME-*.png are then made from that file alone. Ctrl-C keeps what is done, and the
same command goes on from there: cells that are in the file are not run again.

experiments:
"""

_EXAMPLES = """\
examples:
  python -m experiments theory --out mine
      minutes on two cores; writes mine/theory.jsonl, mine/theory.md and mine/images/theory-*.png
  python -m experiments logistic --scale paper --only setting=sparse --out mine
      the paper's size, one setting of three
  python -m experiments all --render --docs docs/results.md
      runs nothing; makes tables and pictures again, and puts them between the marks of a page
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input is one line on standard error and exit status 2."""
    options = command_line().parse_args(arguments)
    try:
        return run(options)
    except (ValueError, OSError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2


def command_line() -> argparse.ArgumentParser:
    """The parser of `python -m experiments`."""
    listed = "".join(f"  {name:<10} {text}\n" for name, text in {**NAMES, "all": "every one, in this order"}.items())
    parser = OneLineParser(
        prog="python -m experiments",
        description=_DESCRIPTION + listed,
        epilog=_EXAMPLES,
    )
    parser.add_argument("experiments", nargs="+", metavar="NAME", choices=[*NAMES, "all"], help="as listed above")
    what = parser.add_argument_group("what is run")
    what.add_argument(
        "--scale",
        choices=SCALES,
        help="smoke: seconds; small: minutes on two cores (default); paper: the paper's size; with --render, by "
        "default the largest in the file",
    )
    what.add_argument(
        "--only",
        action="append",
        metavar="NAME=VALUE",
        help="cells with this setting; may be repeated (of one name, any of its values)",
    )
    what.add_argument("--seeds", type=count, metavar="N", help="how many, where an experiment has seeds")
    what.add_argument("--data", metavar="D", help="data, where an experiment needs it; without it, it is passed over")
    what.add_argument("--model", metavar="M", help="a model's folder or name, where an experiment needs one")
    what.add_argument("--device", default="cpu", metavar="D", help="cpu (default), cuda, cuda:1")
    what.add_argument("--workers", type=count, metavar="N", help="processes that share the device (tinybert)")
    what.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="then begin no cell; long ones stop and go on next time"
    )
    what.add_argument(
        "--again", action="store_true", help="start afresh; the old file is kept as NAME.jsonl.old, .old2, …"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER", help="default: results")
    output.add_argument("--render", action="store_true", help="run nothing, make tables and pictures from the files")
    output.add_argument("--docs", type=Path, metavar="FILE", help="put the tables between the marks of this page too")
    output.add_argument("--commit", metavar="TEXT", help="write this down as the commit (default: what git says)")
    output.add_argument("--json", action="store_true", help="print what was written as JSON on standard output")
    return parser


def run(options: Namespace) -> int:
    """Run the experiments, make tables and pictures, and say where they are."""
    from experiments import rendering
    from experiments.experiments import chosen
    from experiments.voice import voice_of

    request = Request(
        scale=options.scale or "small", out=options.out, seeds=options.seeds, device=options.device, data=options.data,
        workers=options.workers, model=options.model, commit=options.commit, time_limit=options.time_limit,
        again=options.again, only=tuple(options.only or ()),
    )  # fmt: skip
    experiments = chosen(options.experiments)
    if options.docs is not None and not options.docs.is_file():
        raise ValueError(f"--docs {options.docs} is not a file; it must be a page with marks to fill")
    if options.docs is not None:
        for experiment in experiments:  # before hours are spent on what cannot be put in
            rendering.marks(options.docs.read_text(encoding="utf-8"), experiment)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file; it must be a folder, which is made where there is none")
    found = []
    try:
        with voice_of(Console(stderr=True)) as voice:
            begun = set()
            for experiment in experiments:  # two may share a file, which is begun afresh once
                own = replace(request, again=False) if experiment.file in begun else request
                begun.add(experiment.file)
                found.append(_one(experiment, own, options, voice, alone=len(experiments) == 1))
    except KeyboardInterrupt:
        how = "the same command without --again" if options.again else "the same command"
        print(f"experiments: interrupted; what was done is in {options.out}, {how} goes on", file=sys.stderr)
        return 130
    if options.json:
        scale = options.scale if options.render else request.scale
        json.dump({"scale": scale, "experiments": found}, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        for one in found:
            left = f"; {one['left']} or more are left" if one["left"] else ""
            print(one["passed_over"] or f"{one['name']}: {one['cells']} cells, {one['new']} of them new{left}")
            for file in one["files"]:
                print(f"  wrote {file}")
    return 2 if all(one["refused"] for one in found) else 0


def _one(experiment: Experiment, request: Request, options: Namespace, voice: Voice, *, alone: bool) -> dict[str, Any]:
    """Run one experiment and render it; what came of it, for people and programs."""
    from experiments import rendering, result_files
    from experiments.experiment import MissingInput

    started, path = time.perf_counter(), request.file(experiment.file)
    told: dict[str, Any] = {"name": experiment.name, "file": str(path), "cells": 0, "new": 0, "left": 0, "files": []}
    told |= {"passed_over": None, "refused": False}
    there = 0 if request.again else len(result_files.done(path, scale=request.scale))
    try:
        if not options.render:
            told["left"] = experiment.run(request, voice)
        else:
            rendering.lines_of(experiment, request.out, options.scale)
    except MissingInput as error:
        if alone:
            raise
        return told | {"passed_over": f"{experiment.name}: passed over: {error}", "refused": True}
    cells = len(result_files.done(path, scale=options.scale if options.render else request.scale))
    told |= {"cells": cells, "new": 0 if options.render else cells - there}
    if not cells:  # the time limit came first
        return told | {"passed_over": f"{experiment.name}: no cell was run"}
    voice.doing("tables and pictures")
    pictures = _can_draw(voice)
    scale = options.scale if options.render else request.scale
    files = rendering.render(experiment, request.out, scale=scale, pictures=pictures)
    if options.docs is not None:
        files += rendering.render_into(options.docs, experiment, request.out, scale=scale, pictures=pictures)
    return told | {"files": [str(file) for file in files], "seconds": round(time.perf_counter() - started, 3)}


def _can_draw(voice: Voice) -> bool:
    """Whether matplotlib is there; a line says so where it is not."""
    from dpoptim.app.plot_style import check_matplotlib

    try:
        check_matplotlib()
    except ValueError as error:
        voice.say(f"{error}; tables are made without them")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
