"""What was probably meant by an argument that a command does not have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

_OTHER_NAMES = {  # of other libraries' scripts
    "--lr": "--learning-rate",
    "--learning_rate": "--learning-rate",
    "--bs": "--batch-size",
    "--sigma": "--noise-multiplier",
    "--max-grad-norm": "--clip-norm",
    "--target-epsilon": "--epsilon",
    "--target-delta": "--delta",
    "--output-dir": "--run-dir",
    "--dataset": "--data",
    "--train-file": "--data",
    "--max-steps": "--steps",
    "--num-train-epochs": "--epochs",
    "--model-name-or-path": "--model",
    "--optimizer": "--variant",
}


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; the whole usage is behind --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def mistyped(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """One line: what the command does not have, and what is near to it.

    >>> parser = argparse.ArgumentParser(prog="dpoptim train")
    >>> _ = parser.add_argument("--learning-rate")
    >>> mistyped(parser, ["--lr", "1"])
    'there is no --lr; did you mean --learning-rate?'
    >>> mistyped(parser, ["more.toml"])
    "'more.toml' is one argument too many; dpoptim train --help lists what there is"
    """
    given = unknown[0]
    if not given.startswith("-"):
        return f"{given!r} is one argument too many; {parser.prog} --help lists what there is"
    flag = given.partition("=")[0]
    known = [name for action in parser._actions for name in action.option_strings]
    dashed = flag.replace("_", "-")
    other = _OTHER_NAMES.get(flag, _OTHER_NAMES.get(dashed, dashed))
    near = [other] if other in known else get_close_matches(dashed, known, 1, cutoff=0.75)
    mend = f"did you mean {near[0]}?" if near else f"{parser.prog} --help lists what there is"
    return f"there is no {flag}; {mend}"
