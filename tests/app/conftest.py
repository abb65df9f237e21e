"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dpoptim.app import Records, train
from dpoptim.app.cli import main
from tests.app.cases import image_records
from tests.app.runs import rows_recipe


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return image_records(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps; copy it before changing anything."""
    folder = tmp_path_factory.mktemp("runs")
    train(rows_recipe(folder, steps=6), folder / "run")
    return folder / "run"


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command which is refused with status 2; it returns the one line that is printed."""

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err

    return refused
