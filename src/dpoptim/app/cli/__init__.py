"""The command line: `dpoptim COMMAND ...`."""

from dpoptim.app.cli.main import command_line, main

__all__ = ["command_line", "main"]
