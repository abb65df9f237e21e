"""Human-readable durations."""

from __future__ import annotations

from dpoptim.app.format import duration


def test_durations_have_two_units():
    times = [0.04, 4.26, 50, 125, 7325]
    assert [duration(seconds) for seconds in times] == ["0.04 s", "4.3 s", "50 s", "2 min 5 s", "2 h 2 min"]
