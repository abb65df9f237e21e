"""Measure training in 1, 2 and 4 processes on the CPU: step times, bytes sent, and two ways to make noise.

    python benchmarks/processes.py
    python benchmarks/processes.py --rounds 5 --json FILE --write FILE
    python benchmarks/processes.py --from FILE --write FILE    # redo the tables of earlier results

torch's launcher starts the processes. They have one thread each and communicate through gloo. Groups of 1, 2 and 4
processes take turns, `--rounds` times, so that a slow moment affects all of them. Before each step or row the processes
of a group wait for each other, and the slowest one counts.

A step is forward, backward, clipping, sum over processes, noise and update of BERT-Tiny with `scale_then_privatize`.
Its batch is the same for any number of processes: they share it. Bytes are what dpoptim passes to torch.distributed in
one step, converted by `SENT` to what each process sends if the processes form a ring.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cases import bert_tiny
from options import add_json, add_write, at_least, report, require_packages
from record import bullets, heading, markdown_table, measure_or_read, page, setting
from torch import Tensor, distributed

import dpoptim
from dpoptim.data.processes import Processes
from dpoptim.kernels.freed_memory import keep_freed_memory
from dpoptim.noise import StrategySpec, TensorPart

KEY = dpoptim.NoiseKey.from_bytes(bytes(32))  # known: nothing here is private
STEPS, WARM = 2000, 3
VARIANTS = {"joint_moments": dpoptim.joint_moments, "scale_then_privatize": dpoptim.scale_then_privatize}
NOISES: tuple[StrategySpec, ...] = (dpoptim.Independent(), dpoptim.BufferedToeplitz(buffers=3))
# Bytes that each of n processes sends in a ring. Of a broadcast, this is the most that one process passes on.
SENT: dict[str, Callable[..., float]] = {
    "all_reduce": lambda n, vector: 2 * (n - 1) / n * vector.nbytes,
    "all_gather": lambda n, out, own: (n - 1) * own.nbytes,
    "all_gather_into_tensor": lambda n, out, own: (n - 1) * own.nbytes,
    "all_gather_single": lambda n, out, own: (n - 1) * own.nbytes,
    "all_gather_object": lambda n, out, own: (n - 1) * len(pickle.dumps(own)),
    "broadcast": lambda n, tensor: tensor.nbytes,
    "broadcast_object_list": lambda n, objects: len(pickle.dumps(objects)),
}
WORDS = ("all_", "broadcast", "gather", "isend", "reduce", "scatter", "send")
COLLECTIVES = [name for name, found in vars(distributed).items() if callable(found) and name.startswith(WORDS)]


def bytes_sent(count: int, step: Callable[[int], None]) -> dict[str, int]:
    """Return the bytes that this process sends in a step, by collective; one that `SENT` lacks is a KeyError."""
    sent: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*given: Any, **named: Any) -> Any:
            sent[name] += round(SENT[name](count, *given))
            return real(*given, **named)

        return collective

    with mock.patch.multiple(distributed, **{name: counting(name, vars(distributed)[name]) for name in COLLECTIVES}):
        step(WARM)
    return dict(sent)


def slowest(processes: Processes, repeats: int, *works: Callable[[int], None]) -> list[list[float]]:
    """Return the milliseconds of each work; the works take turns, and in each turn the slowest process counts."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(WARM + repeats):
        for work, own in zip(works, times, strict=True):
            if processes.count > 1:
                distributed.barrier()
            start = time.perf_counter()
            work(turn)
            own.append(1e3 * (time.perf_counter() - start))
    everyone: list[Any] = [times] * processes.count
    if processes.count > 1:
        distributed.all_gather_object(everyone, times)
    return torch.tensor(everyone, dtype=torch.float64).amax(0)[:, WARM:].tolist()


def step_of(variant: str, examples: int, tokens: int) -> Callable[[int], None]:
    """Return a private step with this process's share of a batch of exactly `examples`."""
    torch.manual_seed(0)
    case = bert_tiny("cpu", 4 * examples, tokens)
    model, records = case.model(), list(zip(*case.batch(), strict=True))
    sizes = {"num_examples": len(records), "batch_size": examples, "steps": STEPS}
    plan = dpoptim.PrivacyPlan(**sizes, noise_multiplier=1.0, sampling=dpoptim.Shuffled())
    optimizer = VARIANTS[variant](model, plan, lr=1e-4, key=KEY, run_id="a")
    batches = iter(dpoptim.private_loader(records, plan, key=KEY, run_id="a"))

    def step(_: int) -> None:
        case.loss(model, next(batches)).sum().backward()
        optimizer.step()

    return step


def noise_times(processes: Processes, spec: StrategySpec, numel: int, repeats: int) -> list[list[float]]:
    """Time a whole row in every process, and slices of it that are made one per process and gathered."""
    strategy, size = spec.optimize(steps=STEPS), -(-numel // processes.count)
    whole, part = (
        strategy.stream(KEY, [TensorPart(name="all", numel=many, start=start)], stream="gradient")
        for many, start in ((size * processes.count, 0), (size, size * processes.rank))
    )
    rows: dict[str, Tensor] = {}

    def make_all(turn: int) -> None:
        rows["all"] = whole.row(turn)

    def make_slice_and_gather(turn: int) -> None:
        rows["gathered"] = torch.empty(size * processes.count)
        distributed.all_gather_into_tensor(rows["gathered"], part.row(turn))

    if processes.count == 1:
        return slowest(processes, repeats, make_all)
    found = slowest(processes, repeats, make_all, make_slice_and_gather)
    assert torch.equal(rows["all"], rows["gathered"])
    return found


def job(options: argparse.Namespace) -> None:
    """Measure in this process, which the launcher started; the first process writes the results."""
    keep_freed_memory()
    processes, sent = Processes.current(), {}
    for variant in VARIANTS:
        step = step_of(variant, options.examples, options.tokens)
        (times,) = slowest(processes, options.repeats if variant == "scale_then_privatize" else 0, step)
        sent[variant] = bytes_sent(processes.count, step)
    numel = sum(p.numel() for p in bert_tiny("cpu", 1, options.tokens).model().parameters())
    noise = {repr(spec): noise_times(processes, spec, numel, options.repeats) for spec in NOISES}
    if processes.rank == 0:
        options.job.write_text(json.dumps({"parameters": numel, "step": [times], "sent": sent, "noise": noise}))
    if processes.count > 1:
        distributed.destroy_process_group()


def launched(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run `job` in `count` processes, and return what the first one wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        sizes = [f"--{name}={getattr(options, name)}" for name in ("examples", "tokens", "repeats")]
        command = [*launcher, __file__, f"--job={file}", *sizes]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return a record; its times are [lower quartile, median, upper quartile] over all rounds."""
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in (1, 2, 4) if count <= options.most}
    for done in range(1, options.rounds + 1):
        for count, found in runs.items():
            found.append(launched(count, options))
            report(f"round {done} of {options.rounds}: {count} processes")

    def pooled(several: list[list[list[float]]]) -> list[list[float]]:
        joined = [[ms for times in same for ms in times] for same in zip(*several, strict=True)]
        return [statistics.quantiles(times, n=4, method="inclusive") for times in joined]

    groups = [
        {
            "count": count,
            "step": pooled([run["step"] for run in found])[0],
            "round_medians": [statistics.median(run["step"][0]) for run in found],
            "sent": found[0]["sent"],
            "noise": {name: pooled([run["noise"][name] for run in found]) for name in found[0]["noise"]},
        }
        for count, found in runs.items()
    ]
    about = {name: getattr(options, name) for name in ("examples", "tokens", "repeats", "rounds")}
    about |= {"cores": os.cpu_count(), "parameters": found[0]["parameters"], "groups": groups}
    return {**setting("cpu", options.commit), **about, **({"note": options.note} if options.note else {})}


def shown(times: list[float]) -> str:
    return "{1:.0f} ({0:.0f}–{2:.0f})".format(*times)


def markdown(record: dict[str, Any]) -> str:
    """Return three tables; the notes below each say how to read it."""
    cores, alone = record["cores"], record["groups"][0]["step"][1]
    steps, sent, noise = [], [], []
    for group in record["groups"]:
        count, least = group["count"], round(2 * (1 - 1 / group["count"]) * 4 * record["parameters"])
        efficiency, best = alone / (count * group["step"][1]), min(1, cores / count)
        rounds = f"{min(group['round_medians']):.0f}–{max(group['round_medians']):.0f}"
        steps.append([str(count), shown(group["step"]), rounds, f"{efficiency:.2f}", f"{best:.2f}"])
        for variant, found in group["sent"].items() if count > 1 else ():
            cells = [least, found["all_reduce"], sum(found.values()) - found["all_reduce"]]
            sent.append([str(count), f"`{variant}`", *(f"{cell:,}" for cell in cells)])
        for name, (whole, *sliced) in group["noise"].items():
            faster = [  # only if the quartiles do not overlap
                "slices" if part[2] < whole[0] else "all" if whole[2] < part[0] else "unclear" for part in sliced
            ]
            noise.append(
                [str(count), f"`{name}`", shown(whole), *(map(shown, sliced) if sliced else "-"), *(faster or "-")]
            )
    made = (
        f"{heading(record)}. BERT-Tiny with {record['parameters']:,} parameters, {record['examples']} texts × "
        f"{record['tokens']} tokens in all processes together. Times: medians (and quartiles) of {record['rounds']} "
        f"rounds × {record['repeats']} repeats, by `python benchmarks/processes.py`; its docstring explains them."
    )
    parts = [made, *([record["note"]] if record.get("note") else [])]

    def add(title: str, columns: str, rows: list[list[str]], *notes: str) -> None:
        table = markdown_table(["processes", *columns.split(" | ")], rows)
        parts.extend([f"## {title}", table, bullets(notes)])

    add(
        "Time of a step", f"ms per step | medians of the rounds | efficiency | limit on {cores} cores", steps,
        "Efficiency is (time with 1 process) / (processes × time). If the rounds overlap, it says little.",
        f"The machine has only {cores} cores. More processes than that share them and cannot be efficient here.",
        "Every process makes all of the noise and updates all parameters; only the batch is divided.",
    )  # fmt: skip
    add(
        "Bytes that each process sends per step", "variant | minimum | sent: clipped sums | sent: checks", sent,
        "Minimum: one all-reduce of float32 gradients in a ring, as in ordinary data-parallel training.",
        "Checks: the processes compare step, run and scale, and process 0 confirms the step.",
        "`joint_moments` adds up a second vector, the squares.",
    )  # fmt: skip
    add(
        "Noise", "noise | all in every process, ms | a slice each and all_gather, ms | faster here", noise,
        "dpoptim makes all of the noise in every process. Slices have the same bits, but must be sent.",
        "Unclear: the quartiles overlap.",
        f"More than {cores} processes compete for the cores, which favours slices: they make less noise in total.",
    )  # fmt: skip
    return page("Training in several processes", *parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"rounds": 5, "repeats": 8, "most": 4, "examples": 32, "tokens": 128}  # --most limits the processes
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=at_least(1), default=default, metavar="N", help=f"(default: {default})")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--note", metavar="TEXT", help="what else the machine did; not with --from")
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    require_packages(parser, "transformers")
    if options.job:
        job(options)
        return
    keys = ("groups", "cores", "parameters", "rounds")
    measure_or_read(parser, options, lambda: measure(options), markdown, *keys)


if __name__ == "__main__":
    main()
