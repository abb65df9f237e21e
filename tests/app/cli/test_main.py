"""The program itself: fast help, unknown commands and flags, closed pipes."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from dpoptim.app.cli import command_line, main
from dpoptim.app.cli.main import COMMANDS
from dpoptim.app.cli.options import count, size
from dpoptim.app.recipes.recipe import ADJACENCIES, Recipe
from dpoptim.integrations.hugging_face.arguments import PrivacyArguments
from dpoptim.integrations.named_settings import name_of_sampling
from dpoptim.privacy import Adjacency, PrivacyPlan

PROGRAM = """
import sys
from dpoptim.app.cli import main
for arguments in ({}):
    try:
        main(arguments)
    except SystemExit as left:
        assert left.code == 0
assert "torch" not in sys.modules
"""


def test_help_does_not_load_torch():
    program = PROGRAM.format("['--help'], ['--version'], ['train', '--help'], ['report', '--help']")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "dpoptim 0." in ran.stdout
    assert all(text.split(",")[0] in " ".join(ran.stdout.split()) for text in COMMANDS.values())


def test_python_m_dpoptim_prints_help_without_a_command():
    ran = subprocess.run([sys.executable, "-m", "dpoptim"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert all(name in ran.stderr for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"dpoptim {command}" in text
    assert "--json" in text


def test_every_option_has_help():
    for name, parser in command_line()[1].items():
        for action in parser._actions:
            assert action.help, f"{name} {action.option_strings or action.dest}"


def test_adjacencies_are_written_with_hyphens(capsys):
    assert {name.replace("-", "_") for name in ADJACENCIES} == {kind.value for kind in Adjacency}
    sizes = ["--steps", "9", "--batch-size", "1", "--num-examples", "9", "--epsilon", "1", "--delta", "1e-6"]
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *sizes, "--adjacency", "zero_out"])
    assert "invalid choice: 'zero_out' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("trian", "did you mean train?"),
        ("adivse", "did you mean advise?"),
        (
            "x",
            "the commands are train, columns, predict, generate, evaluate-synthetic, plan, advise, compare, report, "
            "audit",
        ),
    ],
)
def test_unknown_command_suggests_the_closest(given, hint, capsys):
    assert main([given, "--epsilon", "1"]) == 2
    assert capsys.readouterr().err == f"dpoptim: there is no command {given!r}; {hint}\n"


@pytest.mark.slow
def test_closed_pipe_is_not_an_error():
    settings = "plan --steps 20 --batch-size 10 --num-examples 200 --epsilon 3 --delta 1e-6 --json"
    ran = subprocess.Popen(
        [sys.executable, "-m", "dpoptim", *settings.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert ran.stdout is not None
    assert ran.stderr is not None
    ran.stdout.close()
    errors = ran.stderr.read()
    assert ran.wait() == 141
    assert "Broken pipe" not in errors
    assert "Traceback" not in errors


def test_ctrl_c_while_a_command_is_imported_prints_one_line(capsys, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "dpoptim: interrupted\n"


def test_numbers_as_people_type_them():
    assert [count(text) for text in ("4.4M", "1_000", "1e6")] == [4_400_000, 1000, 1_000_000]
    assert [size(text) for text in ("4GB", "2 GiB", "100")] == [4_000_000_000, 2**31, 100]


def test_sampling_has_one_default():
    default = name_of_sampling(PrivacyPlan(num_examples=100, batch_size=10, steps=20).sampling)
    assert default == Recipe.sampling == PrivacyArguments.sampling == "shuffled"
    sizes = ["--steps", "9", "--batch-size", "5", "--num-examples", "99", "--epsilon", "1", "--delta", "1e-4"]
    parser, _ = command_line()
    for words in (["plan", *sizes], ["advise", "4M", *sizes]):
        assert parser.parse_args(words).sampling == default
    for words in (["train"], ["audit"]):  # which take it from a recipe
        assert parser.parse_args(words).sampling is None
