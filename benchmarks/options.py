"""The command line of the benchmarks: options that several have, and mistakes told in one line.

What can be wrong with a number or a file is found while the command line is read, before minutes of measuring.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dpoptim.app.cli.options import count

PICTURES = (".png", ".svg", ".pdf")


def whole(least: int) -> Callable[[str], int]:
    """The type of a whole number from `least` on, also as 4.4M or 1e6.

    >>> whole(1)("4.4M")
    4400000
    >>> whole(2)("1")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: must be 2 or more, got 1
    """

    def parsed(text: str) -> int:
        number = count(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {text}")
        return number

    return parsed


def positive(text: str) -> float:
    """The type of a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number


def read_from(text: str) -> Path:
    """The type of a file that is read."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is {'a folder' if path.is_dir() else 'not there'}; give a file")
    return path


def write_to(*suffixes: str) -> Callable[[str], Path]:
    """The type of a file that is written, with one of these endings where any are given."""

    def parsed(text: str) -> Path:
        path = Path(text)
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a folder; give a file")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text} would lie in a folder that is not there")
        if suffixes and path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{text} must end in {', '.join(suffixes)}")
        return path

    return parsed


def a_folder(text: str) -> Path:
    """The type of a folder that is read."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


def add_device(parser: argparse.ArgumentParser) -> None:
    def device(text: str) -> str:
        if text not in ("cuda", "cpu"):
            raise argparse.ArgumentTypeError(f"must be cuda or cpu, got {text}")
        if text == "cuda" and not torch.cuda.is_available():
            raise argparse.ArgumentTypeError("this PyTorch finds no CUDA device; leave it out, or give cpu")
        return text

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, metavar="cuda|cpu", help=f"({default} here)")


def add_files(parser: argparse.ArgumentParser, *, after: str = "", from_earlier: bool = True) -> None:
    """--json, --write and --commit, and --from for what an earlier --json wrote."""
    parser.add_argument("--json", type=write_to(".json"), metavar="FILE", help=f"write what was found{after}")
    parser.add_argument("--write", type=write_to(".md"), metavar="FILE", help="write it as dated markdown")
    add_commit(parser)
    if from_earlier:
        parser.add_argument(
            "--from", dest="files", type=read_from, nargs="+", metavar="FILE",
            help="measure nothing, read earlier --json files",
        )  # fmt: skip


def add_commit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", metavar="TEXT", help="the commit to name where there is no repository")


def absent(names: Iterable[str]) -> list[str]:
    """Those of the packages that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def need_packages(parser: argparse.ArgumentParser, *names: str) -> None:
    """End with one line and status 1 where a package that everything here needs is absent."""
    if missing := absent(names):
        parser.exit(1, f"{parser.prog}: nothing can be measured without {and_install(missing)}\n")


def and_install(missing: list[str]) -> str:
    return f"{' and '.join(missing)}; install with: pip install {' '.join(missing)}"


def need_matplotlib(parser: argparse.ArgumentParser, option: str) -> None:
    if absent(["matplotlib"]):
        parser.error(f"{option} needs matplotlib; install it with: pip install matplotlib")


@contextmanager
def told_in_one_line(parser: argparse.ArgumentParser) -> Iterator[None]:
    """What is wrong with the data, a file or a setting, as the parser tells it; not for what is measured."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        parser.error(" ".join(str(error).split()))


def say(line: str) -> None:
    """A line of progress, on standard error so that tables stay clean."""
    print(line, file=sys.stderr, flush=True)
