"""The numbers of processes that whole and sharded models are tested with."""

from __future__ import annotations

import pytest

SLOW = [pytest.param((count, "all"), marks=pytest.mark.slow) for count in (2, 4)]
CASES = [(2, "some"), *SLOW]  # processes, and variants × noises


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request):
    return request.param
