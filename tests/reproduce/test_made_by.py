"""What BERT-Tiny's page says about how its lines were made is what the lines record."""

from __future__ import annotations

import pytest

from dpoptim.reproduce.tinybert import report


@pytest.mark.parametrize(
    ("machine", "begin", "said"),
    [
        ("NVIDIA H200", 40, ["--model DIR --device cuda`", "Several cells at a time shared the GPU."]),
        ("NVIDIA H200", 51, ["--model DIR --device cuda`"]),
        ("x86_64, 2 cores, 1 threads", 40, ["--model DIR`", "Several cells at a time shared the machine."]),
        ("x86_64, 2 cores, 1 threads", 51, ["--model DIR`"]),
    ],
)
def test_the_command_tells_the_device_that_was_used_and_whether_it_was_shared(machine, begin, said):
    """One cell ran for 10 s until second 51, another began then or before."""
    lines = [
        {"setting": {"commit": "c", "machine": machine, "made": f"2026-01-01T00:00:{end}+00:00", "seconds": seconds}}
        for end, seconds in ((51, 10.0), (59, 59.0 - begin))
    ]
    text = report._made_by(lines, "paper")
    for part in ("--model DIR --device cuda`", "--model DIR`", "Several cells at a time shared the GPU.",
                 "Several cells at a time shared the machine."):  # fmt: skip
        assert (part in text) == (part in said), part
