"""What a page says about how its lines were made is what the lines record."""

from __future__ import annotations

import pytest

from experiments.markdown import made_by
from experiments.tinybert.report import command


@pytest.mark.parametrize(
    ("machine", "scale", "given"),
    [
        ("NVIDIA H200", "paper", " --data DIR --model DIR --device cuda"),
        ("x86_64, 2 cores, 1 threads", "small", " --data DIR --model DIR"),
        ("x86_64, 2 cores, 1 threads", "smoke", ""),
    ],
)
def test_the_command_tells_the_device_that_was_used(machine, scale, given):
    lines = [{"scale": scale, "setting": {"machine": machine}}]
    assert command("tinybert", lines) == f"python -m experiments tinybert --scale {scale}{given}"


def test_one_line_of_a_gpu_is_enough_to_name_it():
    lines = [{"scale": "paper", "setting": {"machine": name}} for name in ("x86_64, 2 cores, 1 threads", "NVIDIA H200")]
    assert command("tinybert", lines).endswith("--device cuda")


@pytest.mark.parametrize(("begin", "said"), [(42, "18 s, several at a time, in 10 s"), (51, "18 s on a machine")])
def test_cells_that_shared_the_machine_are_told_so(begin, said):
    """One cell ran for 10 s until second 51, another for 8 s."""
    lines = [
        {"setting": {"commit": "c", "machine": "a machine", "made": f"2026-01-01T00:00:{end}+00:00", "seconds": long}}
        for end, long in ((51, 10.0), (begin + 8, 8.0))
    ]
    assert said in made_by(lines, "a command")
