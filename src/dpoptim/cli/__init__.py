"""The command line: `dpoptim COMMAND ...`, one module a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dpoptim.cli import advise, compare, plan, report, reproduce, train
from dpoptim.version import __version__

_COMMANDS = (plan, advise, train, compare, report, reproduce)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line on standard error and exit status 2.

    >>> main(["plan", "--steps", "0", "--batch-size", "1", "--num-examples", "1", "--epsilon", "1", "--delta", "1e-6"])
    2
    """
    parser = argparse.ArgumentParser(
        prog="dpoptim",
        description="Differentially private training with adaptive optimizers for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"dpoptim {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add_to(commands)
    chosen = parser.parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
    except (ValueError, OSError) as error:
        print(f"dpoptim: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dpoptim: interrupted", file=sys.stderr)
        return 130
    return status
