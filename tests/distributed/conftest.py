"""The numbers of processes that whole and sharded models are tested with."""

from __future__ import annotations

import pytest

CASES = [(2, "some"), pytest.param((4, "all"), marks=pytest.mark.slow)]  # processes, and variants × noises


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request):
    return request.param
