"""The command line: `dpoptim COMMAND ...`, one module a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from dpoptim.app.cli import advise, audit, compare, plan, report, train
from dpoptim.app.cli.mistyped import OneLineParser, mistyped
from dpoptim.version import __version__

_COMMANDS = (plan, advise, train, compare, report, audit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on standard error and exit status 2.

    >>> main(["plan", "--steps", "0", "--batch-size", "1", "--num-examples", "1", "--epsilon", "1", "--delta", "1e-6"])
    2
    """
    parser, commands = command_line()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return 2
    chosen, unknown = parser.parse_known_args(arguments)
    if unknown:
        print(f"dpoptim {chosen.command}: {mistyped(commands[chosen.command], unknown)}", file=sys.stderr)
        return 2
    try:
        status: int = chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at the end
        return 141
    except (ValueError, OSError) as error:
        print(f"dpoptim: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dpoptim: interrupted", file=sys.stderr)
        return 130
    return status


def command_line() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of everything, and that of each command."""
    parser = OneLineParser(
        prog="dpoptim",
        description="Differentially private training with adaptive optimizers for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"dpoptim {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for module in _COMMANDS:
        module.add_to(commands)
    return parser, commands.choices
