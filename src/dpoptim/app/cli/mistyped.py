"""What was probably meant by an argument that a command does not have."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

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


_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-(inf|nan)$", re.IGNORECASE)
_EITHER = {"--eps": ("--epsilon", "--adam-eps")}  # two things of one name


class _Paragraphs(argparse.HelpFormatter):
    """Paragraphs as wide as the terminal; those with lines that are set in, such as examples, stay as they are.

    >>> print(_Paragraphs("x", width=32)._fill_text("one two three four five six seven\\n\\nexamples:\\n  x y", 30, ""))
    one two three four five six
    seven
    <BLANKLINE>
    examples:
      x y
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(part if "\n " in f"\n{part}" else textwrap.fill(part, width) for part in parts)


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; the whole usage is behind --help.

    Flags are written out, and given once: the second of two would silently win. A negative number, -1e-5 too, is a
    value, so that who checks it says what is wrong with it.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": _Paragraphs, **named, "allow_abbrev": False})
        self._negative_number_matcher = _NEGATIVE

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        if not self._subparsers:  # else the command's own parser looks at what follows it
            self._refuse_repeated(given)
        return super().parse_known_args(given, namespace)

    def _refuse_repeated(self, given: Sequence[str]) -> None:
        seen: set[str] = set()
        for text in given:
            action = self._option_string_actions.get(text.partition("=")[0])
            if text == "--":
                return
            if action is None or action.nargs == 0 or isinstance(action, argparse._AppendAction):
                continue
            if action.dest in seen:
                self.error(f"{text.partition('=')[0]} is given twice; give it once")
            seen.add(action.dest)

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
    near = [name for name in _EITHER.get(flag, ()) if name in known]
    if not near:
        begun = [name for name in known if name.startswith(other)]
        near = [other] if other in known else begun if len(begun) == 1 else get_close_matches(dashed, known, 1, 0.75)
    mend = f"did you mean {' or '.join(near)}?" if near else f"{parser.prog} --help lists what there is"
    return f"there is no {flag}; {mend}"
