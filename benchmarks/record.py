"""What was measured, with its setting: written as JSON, read again, put together, and shown as a table or markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments import provenance

PACKAGES = ("torch", "triton", "transformers", "peft", "opacus")
WAYS = ("plain", "compiled", "off", "flat", "scaled", "captured", "opacus", "opacus ghost", "flat twin")
PEERS = ("opacus", "opacus ghost")
RATIOS = (
    "flat/off", "scaled/off", "captured/off", "scaled/plain", "scaled/compiled", "memory scaled/off",
    "memory captured/off", "opacus/scaled",
)  # fmt: skip
SETTING = ("date", "commit", "machine", "versions")
CASE = ("name", "note", "together", "compiled_micro_batch", "ways")
Found = dict[str, dict[str, Any]]  # way: {"ms", "low_ms", "high_ms", "gb"} or {"error"}


def setting(device: str, commit: str | None = None) -> dict[str, Any]:
    """Date, commit, machine and versions: what a figure means nothing without."""
    return {
        "date": str(date.today()),
        "commit": commit or provenance.this_commit(),
        "machine": provenance.machine(device),
        "versions": provenance.versions(PACKAGES),
    }


def heading(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"{record['date']}, commit {record['commit']}, {record['machine']}, {versions}"


def read_as(file: Path, maker: str, *keys: str) -> dict[str, Any]:
    """What `maker` wrote with --json; ValueError for anything else."""
    try:
        record = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from error
    if not isinstance(record, dict) or (missing := [key for key in (*SETTING, *keys) if key not in record]):
        what = f"it has no {missing[0]!r}" if isinstance(record, dict) else "it holds no object"
        raise ValueError(f"{file} was not written by {maker} --json: {what}")
    return record


def save(record: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(record, indent=1) + "\n")


def read(files: Iterable[Path]) -> dict[str, Any]:
    """One record of several of steps.py, measured on one kind of machine with one set of versions.

    The first time of a way stands; ways that come from a later file were measured in another process.
    """
    first, *others = [read_as(file, "steps.py", "repeats", "cases") for file in files]
    for c in [c for record in (first, *others) for c in record["cases"]]:
        if missing := [key for key in CASE if key not in c]:
            raise ValueError(f"a case has no {missing[0]!r}: not written by steps.py --json")
    for other in others:
        if any(other[key] != first[key] for key in ("machine", "versions", "commit")):
            raise ValueError(f"these were not measured alike: {heading(first)}; {heading(other)}")
        known = {c["name"]: c for c in first["cases"]}
        for c in other["cases"]:
            if c["name"] not in known:
                first["cases"].append(c)
                continue
            into = known[c["name"]]
            new = [way for way in c["ways"] if way not in into["ways"]]
            again = {way: found["ms"] for way, found in c["ways"].items() if way not in new and "ms" in found}
            if new:
                into.setdefault("later", []).append({"ways": new, "again": again})
            into["ways"] = {**c["ways"], **into["ways"]}
            into["ratios"] = ratios(into["ways"])
    return first


def fastest_peer(found: Found) -> str | None:
    ran = [way for way in PEERS if "ms" in found.get(way, {})]
    return min(ran, key=lambda way: found[way]["ms"], default=None)


def ratios(found: Found) -> dict[str, float]:
    """Those of RATIOS that were measured; Opacus stands with the faster of its modes."""
    peer, given = fastest_peer(found), {}
    for name in RATIOS:
        kind = "gb" if name.startswith("memory ") else "ms"
        ways = [peer or way if way == "opacus" else way for way in name.split(" ")[-1].split("/")]
        top, bottom = (found.get(way, {}) for way in ways)
        if kind in top and kind in bottom:
            given[name] = top[kind] / bottom[kind]
    return given


def spelled(name: str) -> str:
    """The name of a case with the units of its sizes.

    >>> spelled("GPT-2 32x1024 LoRA r=16"), spelled("ViT-B/16 256")
    ('GPT-2 LoRA r=16, 32 texts × 1024 tokens', 'ViT-B/16, 256 images')
    """
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
    """Whether private steps ran norms by dpoptim's kernels, as they do on a GPU with Triton."""
    return "triton" in record["versions"] and not record["machine"].endswith(" threads")


def notes(record: dict[str, Any]) -> list[str]:
    """What a reader must know to read the table rightly."""
    lines, done = [], record["cases"]
    if own_norms(record):
        lines.append("\"off\" runs torch's layer and group norms, private steps kernels of dpoptim's own.")
    if any("captured" in c["ways"] for c in done):
        lines.append(
            '"captured" is scaled as one CUDA graph, but for noise and update; "off" and the others have none.'
        )
    if any(way not in c["ways"] for c in done for way in WAYS if any(way in other["ways"] for other in done)):
        lines.append('"-": not measured.')
    if any(fastest_peer(c["ways"]) for c in done):
        lines.append(
            'opacus/scaled takes the faster of Opacus\'s modes that ran; Opacus stores logits, as "plain" does.'
        )
        twins = [f"{spelled(c['name'])} ({c['note']})" for c in done if c["note"] and fastest_peer(c["ways"])]
        if twins:
            lines.append(
                f"Opacus trains a twin of the same sizes where it refuses the stock model: {'; '.join(twins)}."
            )
    elif "opacus" not in record["versions"]:
        lines.append("Opacus is not installed; with `pip install opacus` it is timed too.")
    for c in done:
        name = spelled(c["name"])
        if "ms" in c["ways"].get("compiled", {}) and c["compiled_micro_batch"]:
            lines.append(f"{name}: compiled in micro-batches of {c['compiled_micro_batch']}.")
        if not c["together"]:
            lines.append(f"{name}: one way after the other, for memory.")
        for later in c.get("later", []):
            again = listed([f"{way} took {ms:.1f} ms" for way, ms in later["again"].items()] or [""])
            lines.append(
                f"{name}: {listed(later['ways'])} in another process" + (f", where {again}." if again else ".")
            )
    return lines


def table_of(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows; a ratio that no case has gets no column."""
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


def show(record: dict[str, Any], console: Console) -> None:
    titles, rows = table_of(record)
    table = Table(title="Time of a training step", caption=heading(record), show_lines=len(rows) > 1)
    for title in titles:
        table.add_column(title, justify="left" if title == "case" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in notes(record):
        console.print(f"- {line}", markup=False, highlight=False)


def markdown_table(titles: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(titles) + " |",
        "|" + "---|" * len(titles),
        *("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows),
    ]


def markdown(record: dict[str, Any]) -> str:
    made = f"Medians of {record['repeats']} steps; made by `python benchmarks/steps.py`, which says what is measured."
    lines = [
        "# Time of a training step",
        "",
        f"{heading(record)}. {made}",
        "",
        *markdown_table(*table_of(record)),
        "",
        *(f"- {line}" for line in notes(record)),
    ]
    return "\n".join(lines) + "\n"
