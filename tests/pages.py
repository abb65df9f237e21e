"""The code blocks of pages, and a run of all of them in order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from dpoptim.app.cli import main


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks in these languages."""
    return [text for language, text in _all_blocks(page) if language in languages]


def _all_blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_page(page: Path) -> int:
    """Run programs and commands in this folder, and write files; return the number of commands."""
    commands = 0
    for language, text in _all_blocks(page):
        if language == "python":
            exec(compile(text, str(page), "exec"), {})
        elif language == "toml":
            Path(text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif language == "sh":
            for line in text.splitlines():
                name, *arguments = shlex.split(line)
                assert name == "dpoptim"
                assert main(arguments) == 0, line
                commands += 1
    return commands
