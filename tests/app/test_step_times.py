"""Shown times are means over blocks that share no step."""

from __future__ import annotations

import pytest

from dpoptim.app.runs.run_log import write_scalars
from dpoptim.app.progress import StepTimes


@pytest.mark.parametrize("over", [1, 10, 25])
def test_no_difference_of_two_means_is_that_of_two_steps(over):
    times, size = StepTimes(over=over), max(10, over)
    seconds = [1.0 + (7 * step % 11) for step in range(100)]
    shown = [times.add(value) for value in seconds]
    assert shown[: size - 1] == [None] * (size - 1)
    for block in range(100 // size):
        values = shown[(block + 1) * size - 1 : (block + 2) * size - 1]
        assert len(set(values)) == 1, "one value while the next block is filled"
        assert values[0] == pytest.approx(sum(seconds[block * size : (block + 1) * size]) / size, rel=0.05)


def test_tensorboard_is_told_no_time_of_day():
    calls = []

    class Writer:
        def add_scalar(self, name, value, step, walltime=None):
            calls.append(walltime)

        def flush(self):
            pass

    entry = {"kind": "step", "step": 3, "epsilon": 1.0, "learning_rate": 0.1, "seconds": 0.5, "released": {"x": 2.0}}
    write_scalars(Writer(), entry)
    assert calls == [0.0] * 4
