"""What the commands share: the parser, numbers as people type them, common options, and how output looks.

This file imports neither torch nor rich when it is loaded, so that `dpoptim --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dpoptim.app.files import check_target
from dpoptim.app.recipes.recipe import ADJACENCIES, Recipe, flags
from dpoptim.arguments import check_number
from dpoptim.integrations.optional import require

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dpoptim.privacy import PrivacyPlan

_NAMES_ELSEWHERE = {  # flags of other libraries' scripts
    "--lr": "--learning-rate",
    "--sigma": "--noise-multiplier",
    "--max-grad-norm": "--clip-norm",
    "--target-epsilon": "--epsilon",
    "--target-delta": "--delta",
    "--output-dir": "--run-dir",
}
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-(inf|nan)$", re.IGNORECASE)  # a value, not a flag
_COUNTS = {"k": 10**3, "m": 10**6, "b": 10**9}
_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class _Paragraphs(argparse.HelpFormatter):
    """Fills paragraphs to the width of the terminal, and leaves those with indented lines unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(part if "\n " in f"\n{part}" else textwrap.fill(part, width) for part in parts)


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage, and takes no abbreviated flags."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": _Paragraphs, **named, "allow_abbrev": False})
        self._negative_number_matcher = _NEGATIVE

    def error(self, message: str) -> NoReturn:
        print_error(f"{self.prog}: {message}; see {self.prog} --help")
        self.exit(2)


def print_error(line: str) -> None:
    """Print an error, once per machine: torchrun ends the processes that wait here when the first one fails, too."""
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(5)
        line = f"process {os.environ.get('RANK')}: {line}"
    print(line, file=sys.stderr)


def explain_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Report an unknown argument, and suggest the flag that was probably meant."""
    given = unknown[0]
    if not given.startswith("-"):
        return f"unexpected argument {given!r}; see {parser.prog} --help"
    flag = given.partition("=")[0]
    dashed = flag.replace("_", "-")
    dashed = _NAMES_ELSEWHERE.get(dashed, dashed)
    known = [name for action in parser._actions for name in action.option_strings]
    likely = [name for name in known if name.startswith(dashed)] or get_close_matches(dashed, known, 1, 0.75)
    return f"there is no {flag}; " + (f"did you mean {likely[0]}?" if likely else f"see {parser.prog} --help")


def count(text: str) -> int:
    """Parse a whole number, with k, M or B for thousands, millions and billions."""
    return _parse(text, _COUNTS, "a whole number such as 2000, 4.4M or 1e6")


def size(text: str) -> int:
    """Parse a number of bytes, with kB, MB, GB, TB, KiB, MiB, GiB or TiB."""
    return _parse(text, _BYTES, "a number of bytes such as 500MB, 4GB or 2GiB")


def _parse(text: str, units: dict[str, int], expected: str) -> int:
    number = text.strip().lower().replace("_", "").replace(",", "")
    unit = max((name for name in units if number.endswith(name)), key=len, default="")
    try:
        value = float(number[: len(number) - len(unit)]) * units.get(unit, 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**63 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return int(value)


def add_training(parser: argparse.ArgumentParser, *, required: bool, title: str) -> argparse._ArgumentGroup:
    """Add the options of a plan: steps, sizes, epsilon, delta and adjacency."""
    group = parser.add_argument_group(title)
    group.add_argument("--steps", type=count, required=required, metavar="N", help="optimizer steps")
    group.add_argument("--batch-size", type=count, required=required, metavar="N", help="expected examples per step")
    group.add_argument("--num-examples", type=count, required=required, metavar="N", help="training examples")
    group.add_argument("--epsilon", type=float, required=required, metavar="E", help="of the whole run")
    group.add_argument("--delta", type=float, required=required, metavar="D", help="below 1/num-examples, such as 1e-7")
    group.add_argument("--adjacency", choices=ADJACENCIES, help="which datasets are neighbours (default: zero-out)")
    group.add_argument(
        "--records-per-user",
        type=count,
        metavar="N",
        help="protect users with all their records, of which at most N are used in a step; sizes then count users",
    )
    return group


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """Add --sampling for commands that choose the noise."""
    group.add_argument(
        "--sampling",
        choices=["shuffled", "auto", "poisson"],
        default=Recipe.sampling,
        help="shuffled batches do not amplify privacy and need not stay secret; auto and poisson sample secretly, in "
        "cycles if the noise is correlated (default: %(default)s)",
    )


def add_setting(group: argparse._ArgumentGroup, flag: str, *, help: str | None = None) -> None:
    """Add the flag of a recipe's setting; it is None unless it is given."""
    field = flags()[flag]
    about = field.metadata
    help = (help or about["help"]).replace("%", "%%")
    if about["type"] is bool:
        group.add_argument(flag, dest=field.name, action="store_true", default=None, help=help)
        return
    group.add_argument(
        flag,
        dest=field.name,
        type=count if about["type"] is int else about["type"],
        nargs=about.get("nargs"),
        choices=about["choices"],
        metavar=about["metavar"],
        help=help,
    )


def add_noise_memory(group: argparse._ArgumentGroup) -> None:
    """Add limits on what correlated noise stores between steps."""
    group.add_argument(
        "--memory-budget",
        type=size,
        metavar="SIZE",
        help="memory that the noise may take per GPU, such as 4GB (default: 16 bytes per parameter, at least 4 GiB)",
    )
    group.add_argument(
        "--noise-bits", type=int, choices=[32, 16], default=32, help="precision of stored noise (default: 32)"
    )


def add_output(parser: argparse.ArgumentParser, *, verbose: str | None = None) -> None:
    """Add --json, --plot and, with its help text, --verbose."""
    output = parser.add_argument_group("output")
    if verbose is not None:
        output.add_argument("--verbose", action="store_true", help=verbose)
    output.add_argument("--json", action="store_true", help="print JSON, and nothing else, to standard output")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw a .png, .svg or .pdf file; needs matplotlib"
    )


def uncalibrated_plan(options: argparse.Namespace, *, clip_norm: float = 1.0) -> PrivacyPlan:
    """Make the plan that the options describe, without noise, and check epsilon and delta."""
    from dpoptim.privacy import Adjacency, Poisson, PrivacyPlan, Shuffled

    plan = PrivacyPlan(
        num_examples=options.num_examples,
        batch_size=options.batch_size,
        steps=options.steps,
        clip_norm=clip_norm,
        sampling=Shuffled() if options.sampling == "shuffled" else Poisson(),
        adjacency=Adjacency((options.adjacency or "zero-out").replace("-", "_")),
        unit="example" if options.records_per_user is None else "user",
        records_per_user=options.records_per_user,
    )
    check_number("--epsilon", options.epsilon, above=0)
    check_number("--delta", options.delta, above=0, below=1)
    return plan


def check_plot(path: Path | None) -> None:
    """Raise ValueError, before any work is done, if a plot could not be drawn or written."""
    if path is not None:
        check_target("--plot", path, ".png", ".svg", ".pdf")
        require("matplotlib", "--plot")


def fields(source: object, *names: str) -> dict[str, Any]:
    """These attributes of an object, by name."""
    return {name: getattr(source, name) for name in names}


def output_console() -> Console:
    """A console on standard output, 120 columns wide unless it is a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=120)


def say(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr)


def draw(options: argparse.Namespace, figure: Callable[[], Any]) -> None:
    """Write the figure to --plot, if it was given."""
    if options.plot is not None:
        figure().savefig(options.plot, dpi=150)
        say(f"wrote {options.plot}")


def table_of(rows: Sequence[Mapping[str, str]], *, words: int, chosen: int | None = None) -> Table:
    """A table without lines, with one column per key: `words` to the left, numbers to the right; one row is chosen."""
    from rich.table import Table

    narrow = output_console().width < 100
    table = Table(box=None, pad_edge=False, collapse_padding=narrow, header_style="bold")
    for place, title in enumerate(rows[0]):
        table.add_column(title, overflow="fold", no_wrap=place == 0, justify="left" if place < words else "right")
    for place, row in enumerate(rows):
        table.add_row(*row.values(), style="bold green" if place == chosen else None)
    return table


def silence_libraries() -> None:
    """Turn off other libraries' progress bars and retry messages, which would break into ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # if it was imported before the variable was set
    if "transformers" in sys.modules:
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
