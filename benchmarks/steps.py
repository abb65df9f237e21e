"""Time and memory of a training step: private, the same without privacy, plain PyTorch and Opacus, in one process.

    python benchmarks/steps.py                             on the GPU where there is one, else on the CPU
    python benchmarks/steps.py --only gpt-2 --ways off,scaled --repeats 50
    python benchmarks/steps.py --json FILE --write FILE    for picture.py, and as dated markdown
    python benchmarks/steps.py --from FILE --write FILE    the table of an earlier --json, without measuring

A step is forward, backward, clipping, noise and update of one batch. The ways:

    plain         the loss as one would write it, eager PyTorch, torch.optim.Adam
    compiled      the same, model and loss together under torch.compile
    off           our fused loss, torch.optim.Adam, no privacy
    flat          our fused loss, dpoptim.post_processing
    scaled        our fused loss, dpoptim.scale_then_privatize
    opacus        Opacus with a gradient for each example (grad_sample_mode "hooks"), torch.optim.Adam
    opacus ghost  Opacus with fast gradient clipping (grad_sample_mode "ghost"), torch.optim.Adam
    flat twin     dpoptim.post_processing on the very model that Opacus gets (only where asked for)

Every way takes its turn in every round, so that a machine that slows down slows all of them; where they do not fit into
memory together they run one after the other. Times are medians over the rounds, after three steps to warm up; memory is
the peak above what was allocated before. A way that fails shows the first words of its error.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from cases import Batch, Case, bert_tiny, cases, gpt2, masked_lm, resnet, vit
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dpoptim

__all__ = ["bert_tiny", "cases", "gpt2", "masked_lm", "measured", "ratios", "resnet", "steps_of", "timed", "vit"]

WAYS = ("plain", "compiled", "off", "flat", "scaled", "opacus", "opacus ghost", "flat twin")
PEERS = ("opacus", "opacus ghost")
RATIOS = ("flat/off", "scaled/off", "scaled/plain", "scaled/compiled", "memory scaled/off", "opacus/scaled")
ADAM = partial(torch.optim.Adam, lr=1e-4, foreach=True)
Step = Callable[[], None]
Found = dict[str, dict[str, Any]]  # way: {"ms", "low_ms", "high_ms", "gb"} or {"error"}


def default_ways(device: str) -> tuple[str, ...]:
    """All, but no twin, on the CPU nothing compiled, and Opacus only where it is installed."""
    absent = () if importlib.util.find_spec("opacus") else PEERS
    return tuple(w for w in WAYS if w not in (*absent, "flat twin", "compiled" if device == "cpu" else ""))


def steps_of(case: Case, way: str) -> Step:
    """A function that makes one training step of the case, on a model of its own."""
    torch.manual_seed(0)
    twin = way in PEERS or way == "flat twin"
    model = (case.peer_model if twin else case.model)().to(case.device, case.dtype)
    batch = case.batch()
    if way in PEERS:
        return opacus_steps(case, model, batch, "ghost" if way == "opacus ghost" else "hooks")
    if way in ("plain", "compiled", "off"):
        return ordinary_steps(case, model, batch, way)
    size = len(batch[0])
    plan = dpoptim.PrivacyPlan(num_examples=1000 * size, batch_size=size, steps=10_000, noise_multiplier=1.0)
    make = dpoptim.scale_then_privatize if way == "scaled" else dpoptim.post_processing
    optimizer = make(model, plan, lr=1e-4, own_batches=True)
    loss = case.peer_loss if twin else case.loss

    def private() -> None:
        loss(model, batch).sum().backward()
        optimizer.step()

    return private


def ordinary_steps(case: Case, model: nn.Module, batch: Batch, way: str) -> Step:
    adam, size = ADAM(p for p in model.parameters() if p.requires_grad), len(batch[0])
    loss = case.loss if way == "off" else case.plain_loss
    parts = [batch]

    def total(part: Batch) -> Tensor:
        return loss(model, part).sum() / size

    if way == "compiled":
        torch._dynamo.reset()
        total = torch.compile(total)
        parts = list(zip(*(t.split(case.compiled_micro_batch or size) for t in batch), strict=True))

    def ordinary() -> None:
        for part in parts:
            total(part).backward()
        adam.step()
        adam.zero_grad()

    return ordinary


def opacus_steps(case: Case, model: nn.Module, batch: Batch, mode: str) -> Step:
    from opacus import PrivacyEngine

    def criterion(*given: Any) -> Tensor:
        losses = case.peer_loss(*given)
        return losses.mean() if criterion.reduction == "mean" else losses

    criterion.reduction, size = "mean", len(batch[0])  # Opacus asks for the losses by setting it to "none"
    # Opacus takes its expected batch size from the loader, which is not used otherwise; 1/8 is exact.
    loader = torch.utils.data.DataLoader(range(8 * size), batch_size=size)
    private, optimizer, *wrapped = PrivacyEngine().make_private(
        module=model,
        optimizer=ADAM(p for p in model.parameters() if p.requires_grad),
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    if optimizer.expected_batch_size != size:
        raise ValueError(f"Opacus expects batches of {optimizer.expected_batch_size}, not of {size}")
    loss = wrapped[0] if mode == "ghost" else criterion

    def step() -> None:
        loss(private, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def first_words(error: BaseException) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"


def measured(case: Case, ways: Sequence[str], repeats: int) -> Found:
    """Time and memory of each way, in rounds where they fit together; a way that did not fit gets a try of its own."""
    found: Found = {}
    for group in [ways] if case.together else [[way] for way in ways]:
        found |= timed({way: (case, way) for way in group}, repeats)
    for way in ways:
        if case.together and len(ways) > 1 and found[way].get("error") == "out of memory":
            found |= timed({way: (case, way)}, repeats)
    return found


def timed(runs: Mapping[str, tuple[Case, str]], repeats: int) -> Found:
    """Time and memory of each run, a case in a way; all of them take their turn in every round."""
    found, running, cuda = {}, {}, any(case.device == "cuda" for case, _ in runs.values())
    wait = torch.cuda.synchronize if cuda else lambda: None
    for name, (case, way) in runs.items():
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        try:
            step = steps_of(case, way)
            for _ in range(3):
                step()
            wait()
            running[name] = step
            found[name] = {"gb": (torch.cuda.max_memory_allocated() - before) / 2**30} if cuda else {}
        except Exception as error:
            found[name] = {"error": first_words(error)}
        step = None
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(repeats):
        for name in list(running):
            try:
                start = time.perf_counter()
                running[name]()
                wait()
                times[name].append(1e3 * (time.perf_counter() - start))
            except Exception as error:
                del running[name]
                found[name] = {"error": first_words(error)}
    for name in running:
        low, middle, high = statistics.quantiles(times[name], n=4, method="inclusive")
        found[name] |= {"ms": middle, "low_ms": low, "high_ms": high}
    return found


def fastest_peer(found: Found) -> str | None:
    ran = [way for way in PEERS if "ms" in found.get(way, {})]
    return min(ran, key=lambda way: found[way]["ms"], default=None)


def ratios(found: Found) -> dict[str, float]:
    """Those of RATIOS that were measured; Opacus stands with the faster of its modes."""
    peer, given = fastest_peer(found), {}
    for name in RATIOS:
        kind = "gb" if name.startswith("memory ") else "ms"
        top, bottom = (found.get(peer if way == "opacus" else way, {}) for way in name.split(" ")[-1].split("/"))
        if kind in top and kind in bottom:
            given[name] = top[kind] / bottom[kind]
    return given


def setting(device: str, commit: str | None = None) -> dict[str, Any]:
    """Date, commit, machine and versions: what a figure means nothing without."""

    def asked(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        return done.stdout.strip()

    head = asked("rev-parse", "--short", "HEAD") or "unknown"
    changed = " with changes" if asked("status", "--porcelain", "--untracked-files=no", "--", ":/src") else ""
    on_cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    installed = {found.name: found.version for found in distributions()}
    names = [name for name in ("torch", "triton", "transformers", "peft", "opacus") if name in installed]
    return {
        "date": str(date.today()),
        "commit": commit or head + changed,
        "machine": torch.cuda.get_device_name() if device == "cuda" else on_cpu,
        "versions": {"Python": platform.python_version(), **{name: installed[name] for name in names}},
    }


def heading(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"{record['date']}, commit {record['commit']}, {record['machine']}, {versions}"


def notes(record: dict[str, Any]) -> list[str]:
    """What a reader must know to read the table rightly."""
    lines, done = [], record["cases"]
    if any(fastest_peer(c["ways"]) for c in done):
        lines.append("opacus/scaled takes the faster of Opacus's modes that ran.")
        twins = ", ".join(f"{c['name']} ({c['note']})" for c in done if c["note"])
        if twins:
            lines.append(f"Opacus trains a twin of the same sizes where it refuses the stock model: {twins}.")
    elif "opacus" not in record["versions"]:
        lines.append("Opacus is not installed; with `pip install opacus` it is timed too.")
    for c in done:
        if "ms" in c["ways"].get("compiled", {}) and c["compiled_micro_batch"]:
            lines.append(f"{c['name']}: compiled in micro-batches of {c['compiled_micro_batch']}.")
        if not c["together"]:
            lines.append(f"{c['name']}: one way after the other, for memory.")
        if c.get("later"):
            lines.append(f"{c['name']}: {', '.join(c['later'])} in a process of their own.")
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
        rows.append([c["name"], *times, *(f"{c['ratios'][n]:.2f}" if n in c["ratios"] else "-" for n in compared)])
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


def markdown(record: dict[str, Any]) -> str:
    titles, rows = table_of(record)
    made = f"Medians of {record['repeats']} steps; made by `python benchmarks/steps.py`, which says what is measured."
    lines = [
        "# Time of a training step\n",
        f"{heading(record)}. {made}\n",
        "| " + " | ".join(titles) + " |",
        "|" + "---|" * len(titles),
        *("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows),
        "",
        *(f"- {line}" for line in notes(record)),
    ]
    return "\n".join(lines) + "\n"


def read(files: Iterable[Path]) -> dict[str, Any]:
    """One record of several, measured on one kind of machine with one set of versions; the first time stands."""
    first, *others = [json.loads(file.read_text()) for file in files]
    for other in others:
        if any(other[key] != first[key] for key in ("machine", "versions", "commit")):
            raise SystemExit(f"these were not measured alike: {heading(first)}; {heading(other)}")
        known = {c["name"]: c for c in first["cases"]}
        for c in other["cases"]:
            if c["name"] not in known:
                first["cases"].append(c)
                continue
            into = known[c["name"]]
            into["later"] = [way for way in c["ways"] if way not in into["ways"]]
            into["ways"] = {**c["ways"], **into["ways"]}
            into["ratios"] = ratios(into["ways"])
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name has TEXT in it")
    parser.add_argument("--ways", metavar="A,B", help="only these ways, with commas between (see above)")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="rounds that are timed (20)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found, after each case")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as markdown")
    parser.add_argument("--commit", metavar="TEXT", help="the commit to name where there is no repository")
    parser.add_argument(
        "--from", dest="files", type=Path, nargs="+", metavar="FILE", help="measure nothing, read these"
    )
    options = parser.parse_args()
    ways = tuple(options.ways.split(",")) if options.ways else default_ways(options.device)
    chosen = [case for case in cases(options.device) if options.only.lower() in case.name.lower()]
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways has {unknown[0]!r}; choose from: {', '.join(WAYS)}")
    if not chosen:
        parser.error(f"--only must be part of one of: {', '.join(case.name for case in cases(options.device))}")
    if options.repeats < 2:
        parser.error(f"--repeats must be 2 or more, got {options.repeats}")
    torch.set_num_threads(options.threads or torch.get_num_threads())
    warnings.simplefilter("ignore")
    console = Console(width=None if Console().is_terminal else 200)
    if options.files:
        record, chosen = read(options.files), []
    else:
        record = setting(options.device, options.commit) | {"repeats": options.repeats, "cases": []}
    for case in chosen:
        found = measured(case, ways, options.repeats)
        about = {key: getattr(case, key) for key in ("name", "note", "together", "compiled_micro_batch")}
        record["cases"].append({**about, "ways": found, "ratios": ratios(found)})
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"{case.name} done", highlight=False)
    show(record, console)
    if options.write:
        options.write.write_text(markdown(record))


if __name__ == "__main__":
    main()
