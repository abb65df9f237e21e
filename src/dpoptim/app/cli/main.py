"""The `dpoptim` program. It imports a command's module only when that command is called, so `--help` is fast."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from dpoptim.app.cli.options import OneLineParser, explain_unknown, print_error
from dpoptim.version import __version__

COMMANDS = {
    "train": "train a model privately; without arguments, run a demonstration",
    "columns": "print the columns of a table as a recipe to fill in",
    "predict": "predict the rows of a table with a finished run",
    "generate": "generate texts with the model of a finished run",
    "evaluate-synthetic": "compare synthetic texts with real ones",
    "plan": "choose the noise for a privacy budget",
    "advise": "recommend an optimizer, its noise and settings to try",
    "compare": "compare optimizers at one privacy budget, over several seeds",
    "report": "write one HTML page about one or several runs",
    "audit": "attack a privacy guarantee, and check a run's files",
}
"""Each command has a module of its name with `add_options(parser)` and `run(options)`; its docstring is the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; bad input prints one line to standard error and returns 2.

    >>> main(["plan", "--steps", "0", "--batch-size", "1", "--num-examples", "1", "--epsilon", "1", "--delta", "1e-6"])
    2
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in given if not word.startswith("-")][:1]
    try:
        parser, commands = command_line(words)
        if not given:
            parser.print_help(sys.stderr)
            return 2
        if words and words[0] not in COMMANDS:
            near = get_close_matches(words[0], COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
            print_error(f"dpoptim: there is no command {words[0]!r}; {hint}")
            return 2
        chosen, unknown = parser.parse_known_args(given)
        if unknown:
            print_error(f"dpoptim {chosen.command}: {explain_unknown(commands[chosen.command], unknown)}")
            return 2
        status: int = chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports it again at exit
        return 141
    except (ValueError, OSError) as error:
        print_error(f"dpoptim: {error}")
        return 2
    except (RuntimeError, MemoryError) as error:
        from dpoptim.optim.out_of_memory import has_advice, is_out_of_memory

        if has_advice(error):
            print_error(f"dpoptim: {' '.join(error.__notes__)}".replace("\n", " "))
            return 2
        if not is_out_of_memory(error):
            raise
        print_error("dpoptim: out of memory. Use smaller batches, shorter texts (--max-length) or a smaller model.")
        return 2
    except KeyboardInterrupt:
        print("dpoptim: interrupted", file=sys.stderr)
        return 130
    return status


def command_line(
    complete: Collection[str] = tuple(COMMANDS),
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Build the parser of the program, and of each command; commands in `complete` get their options."""
    parser = OneLineParser(
        prog="dpoptim",
        description="Train PyTorch models with differential privacy.",
        epilog="`dpoptim COMMAND --help` lists the options of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"dpoptim {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in complete:
            module = importlib.import_module(f"dpoptim.app.cli.{name.replace('-', '_')}")
            description, _, examples = str(module.__doc__).partition("examples:\n")
            command.description, command.epilog = description, f"examples:\n{examples}"
            module.add_options(command)
            command.set_defaults(run=module.run)
    return parser, commands.choices
