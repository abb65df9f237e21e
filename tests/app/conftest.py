"""Fixtures that several files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpoptim.app import Records, train
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
