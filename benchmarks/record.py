"""Measurements with their setting: written as JSON, read again, and shown as markdown."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from options import one_line_errors, require_packages

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script's path lacks the folder of `experiments`

from experiments import provenance

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "opacus")
WAYS = ("plain", "compiled", "off", "flat", "scaled", "captured", "opacus", "opacus ghost")
PEERS = ("opacus", "opacus ghost")
RATIOS = (
    "flat/off", "scaled/off", "captured/off", "scaled/plain", "scaled/compiled", "memory scaled/off",
    "memory captured/off", "opacus/scaled",
)  # fmt: skip
SETTING = ("date", "commit", "machine", "versions")
CASE = ("name", "note", "together", "compiled_micro_batch", "ways")
Found = dict[str, dict[str, Any]]  # way: {"ms", "low_ms", "high_ms", "gb", ...} or {"error"}


def setting(device: str, commit: str | None = None, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Return the date, commit, machine and versions, without which a figure means nothing."""
    return {
        "date": str(date.today()),
        "commit": commit or provenance.this_commit(),
        "machine": provenance.machine(device),
        "versions": provenance.versions(packages),
    }


def heading(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"{record['date']}, commit {record['commit']}, {record['machine']}, {versions}"


def read_as(file: Path, maker: str, *keys: str) -> dict[str, Any]:
    """Read what `maker` wrote with --json; raise ValueError for anything else."""
    try:
        record = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from error
    if not isinstance(record, dict) or (missing := [key for key in (*SETTING, *keys) if key not in record]):
        what = f"{missing[0]!r} is missing" if isinstance(record, dict) else "it does not hold an object"
        raise ValueError(f"{file} was not written by {maker} --json: {what}")
    return record


def save(record: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(record, indent=1) + "\n")


def read(file: Path) -> dict[str, Any]:
    """Read what steps.py or small.py wrote."""
    record = read_as(file, "steps.py", "repeats", "cases")
    for case in record["cases"]:
        if missing := [key for key in CASE if key not in case]:
            raise ValueError(f"{file} was not written by steps.py --json: a case lacks {missing[0]!r}")
    return record


def fastest_peer(found: Found) -> str | None:
    ran = [way for way in PEERS if "ms" in found.get(way, {})]
    return min(ran, key=lambda way: found[way]["ms"], default=None)


def ratios(found: Found) -> dict[str, float]:
    """Return those of RATIOS that were measured; Opacus counts with its faster mode."""
    peer, given = fastest_peer(found), {}
    for name in RATIOS:
        kind = "gb" if name.startswith("memory ") else "ms"
        ways = [peer or way if way == "opacus" else way for way in name.split(" ")[-1].split("/")]
        top, bottom = (found.get(way, {}) for way in ways)
        if kind in top and kind in bottom:
            given[name] = top[kind] / bottom[kind]
    return given


def spelled(name: str) -> str:
    """Add units to the sizes in the name of a case.

    >>> spelled("GPT-2 32x1024 LoRA r=16"), spelled("ViT-B/16 256")
    ('GPT-2 LoRA r=16, 32 texts × 1024 tokens', 'ViT-B/16, 256 images')
    >>> spelled("GPT-2 trainer 16x4x512")
    'GPT-2 trainer, 16 × 4 texts × 512 tokens'
    """
    if found := re.fullmatch(r"(.+) (\d+)x(\d+)x(\d+)", name):
        return "{}, {} × {} texts × {} tokens".format(*found.groups())
    if found := re.fullmatch(r"(.+) (\d+)x(\d+)(.*)", name):
        model, examples, tokens, rest = found.groups()
        return f"{model}{rest}, {examples} texts × {tokens} tokens"
    if found := re.fullmatch(r"(.+) (\d+)", name):
        return f"{found[1]}, {found[2]} images"
    return name


def listed(words: Iterable[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def own_norms(record: dict[str, Any]) -> bool:
    """Whether private steps used dpoptim's own kernels for norms, as they do on a GPU with Triton."""
    return "triton" in record["versions"] and not record["machine"].endswith(" threads")


def notes(record: dict[str, Any]) -> list[str]:
    """Return what a reader needs to know to interpret the table."""
    lines, done = [], record["cases"]
    if own_norms(record):
        lines.append("\"off\" uses PyTorch's layer and group norms; private steps use dpoptim's kernels.")
    if any("captured" in c["ways"] for c in done):
        lines.append(
            '"captured" is "scaled" with one CUDA graph for all but noise and update; no other method uses graphs.'
        )
    if any(way not in c["ways"] for c in done for way in WAYS if any(way in other["ways"] for other in done)):
        lines.append('"-": not measured.')
    if any(fastest_peer(c["ways"]) for c in done):
        lines.append('opacus/scaled uses the faster of Opacus\'s modes; Opacus stores logits, as "plain" does.')
        twins = [f"{spelled(c['name'])} ({c['note']})" for c in done if c["note"] and fastest_peer(c["ways"])]
        if twins:
            lines.append(
                f"Opacus trains a substitute of the same sizes where it rejects the stock model: {'; '.join(twins)}."
            )
    elif "opacus" not in record["versions"]:
        lines.append("Opacus is not installed; `pip install opacus` adds it.")
    for c in done:
        name = spelled(c["name"])
        if "ms" in c["ways"].get("compiled", {}) and c["compiled_micro_batch"]:
            lines.append(f"{name}: compiled in micro-batches of {c['compiled_micro_batch']}.")
        if not c["together"]:
            lines.append(f"{name}: one method after the other, to save memory.")
    return lines


def table_of(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows; a ratio that no case has gets no column."""
    done = record["cases"]
    ways = [way for way in WAYS if any(way in c["ways"] for c in done)]
    compared = [name for name in RATIOS if any(name in c["ratios"] for c in done)]
    rows = []
    for c in done:
        cells = [c["ways"].get(way, {}) for way in ways]
        times = [f"{cell['ms']:.1f}" if "ms" in cell else cell.get("error", "-") for cell in cells]
        given = [f"{c['ratios'][name]:.2f}" if name in c["ratios"] else "-" for name in compared]
        rows.append([spelled(c["name"]), *times, *given])
    return ["case", *(f"{way}, ms" for way in ways), *compared], rows


def page(title: str, *parts: str) -> str:
    """
    >>> page("Title", "Text.", bullets(["one", "two"]))
    '# Title\n\nText.\n\n- one\n- two\n'
    """
    return "\n\n".join([f"# {title}", *parts]) + "\n"


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def markdown_table(titles: list[str], rows: list[list[str]]) -> str:
    body = ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles), *body])


def markdown(record: dict[str, Any]) -> str:
    made = f"Medians of {record['repeats']} steps by `python benchmarks/steps.py`; its docstring explains the columns."
    title, about = "Time of a training step", f"{heading(record)}. {made}"
    return page(title, about, markdown_table(*table_of(record)), bullets(notes(record)))


def publish(options: Namespace, text: str) -> None:
    """Print a page, and write it to the file of --write."""
    print(text)
    if options.write:
        options.write.write_text(text)


def measure_or_read(
    parser: ArgumentParser,
    options: Namespace,
    measure: Callable[[], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
    *keys: str,
    needs: Sequence[str] = (),
) -> None:
    """Measure, or read the file of --from, which has these keys; publish the page, and write the file of --json."""
    if options.earlier:
        with one_line_errors(parser):
            record = read_as(options.earlier, parser.prog, *keys)
    else:
        require_packages(parser, *needs)
        record = measure()
    publish(options, markdown(record))
    if options.json:
        save(record, options.json)
