"""Command-line options that the benchmarks share.

Bad numbers and files are reported while the command line is parsed, before minutes of measuring.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dpoptim.app.cli.options import count

PICTURES = (".png", ".svg", ".pdf")


def at_least(minimum: int) -> Callable[[str], int]:
    """Return the argparse type of whole numbers from `minimum` on; 4.4M and 1e6 are allowed.

    >>> at_least(1)("4.4M")
    4400000
    >>> at_least(2)("1")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: expected 2 or more, got 1
    """

    def parse(text: str) -> int:
        number = count(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"expected {minimum} or more, got {text}")
        return number

    return parse


def input_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return Path(text)


def input_folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


def output_file(*suffixes: str) -> Callable[[str], Path]:
    """Return the argparse type of files to write; their names end with one of `suffixes`."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a folder; give a file")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist")
        if path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{text} must end with {', '.join(suffixes)}")
        return path

    return parse


def add_device(parser: argparse.ArgumentParser) -> None:
    def device(text: str) -> str:
        if text not in ("cuda", "cpu"):
            raise argparse.ArgumentTypeError(f"expected cuda or cpu, got {text}")
        if text == "cuda" and not torch.cuda.is_available():
            raise argparse.ArgumentTypeError("PyTorch finds no CUDA device; use cpu")
        return text

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=device, default=default, metavar="cuda|cpu", help=f"(default here: {default})")


def add_commit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", metavar="TEXT", help="the commit to record when this is not a git repository")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json, --from and --commit."""
    parser.add_argument("--json", type=output_file(".json"), metavar="FILE", help="write the results")
    parser.add_argument(
        "--from", dest="earlier", type=input_file, metavar="FILE", help="read an earlier --json file; measure nothing"
    )
    add_commit(parser)


def add_write(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", type=output_file(".md"), metavar="FILE", help="write the table as markdown")


def missing_packages(names: Iterable[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def require_packages(parser: argparse.ArgumentParser, *names: str) -> None:
    """Exit with status 1 if a package is missing."""
    if missing := missing_packages(names):
        parser.exit(1, f"{parser.prog} needs {with_pip(missing)}\n")


def with_pip(missing: list[str]) -> str:
    return f"{' and '.join(missing)}: pip install {' '.join(missing)}"


@contextmanager
def one_line_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Report an error in data, files or settings in one line; not meant for the code that is measured."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        parser.error(" ".join(str(error).split()))


def report(line: str) -> None:
    """Print progress to standard error, so that standard output holds only tables."""
    print(line, file=sys.stderr, flush=True)
