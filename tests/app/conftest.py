"""Images that several files of tests read."""

from __future__ import annotations

import pytest

from dpoptim.app import Records
from tests.app.cases import image_records


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return image_records(tmp_path_factory.mktemp("images"))
