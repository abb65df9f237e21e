"""Measure time and memory of a training step: private, without privacy, plain PyTorch and Opacus.

    python benchmarks/steps.py                             # on the GPU if there is one, else on the CPU
    python benchmarks/steps.py --only gpt-2 --ways off,scaled --repeats 50
    python benchmarks/steps.py --json FILE --write FILE    # results for picture.py, and a markdown table
    python benchmarks/steps.py --from FILE --write FILE    # redo the table of earlier results

A step is forward, backward, clipping, noise and update of one batch. The methods (`--ways`):

    plain         the usual loss, eager PyTorch, torch.optim.Adam (fused, here and below)
    compiled      the same, with model and loss under torch.compile
    off           dpoptim's fused loss, torch.optim.Adam, no privacy
    flat          dpoptim's fused loss, dpoptim.post_processing
    scaled        dpoptim's fused loss, dpoptim.scale_then_privatize
    captured      the same through optimizer.captured: one CUDA graph up to the clipped sums (GPU only)
    opacus        Opacus with per-example gradients (grad_sample_mode "hooks"), torch.optim.Adam
    opacus ghost  Opacus with fast gradient clipping (grad_sample_mode "ghost"), torch.optim.Adam

All methods take turns in every round, so that a slow moment affects all of them. If they do not fit into memory
together, they run one after the other. Times are medians over the rounds, after three warm-up steps. Memory is the peak
above what was allocated before. A method that fails shows the start of its error message.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from cases import Batch, Case, cases
from options import (
    add_device,
    add_json,
    add_write,
    at_least,
    missing_packages,
    one_line_errors,
    report,
    require_packages,
    with_pip,
)
from record import PEERS, WAYS, Found, markdown, publish, ratios, read, save, setting
from timing import milliseconds
from torch import Tensor, nn

import dpoptim

ADAM = partial(torch.optim.Adam, lr=1e-4, fused=True)
Step = Callable[[], None]
Progress = Callable[[str], None]


def default_ways(device: str) -> tuple[str, ...]:
    """Return all methods that can run: Opacus only if installed, compiled and captured only on a GPU."""
    peers = PEERS if missing_packages(["opacus"]) else ()
    graphs = ("compiled", "captured") if device == "cpu" else ()
    return tuple(way for way in WAYS if way not in (*peers, *graphs))


def steps_of(case: Case, way: str) -> Step:
    """Create a model and return a function that takes one training step."""
    torch.manual_seed(0)
    model = (case.peer_model if way in PEERS else case.model)().to(case.device, case.dtype)
    batch = case.batch()
    if way in PEERS:
        return opacus_steps(case, model, batch, "ghost" if way == "opacus ghost" else "hooks")
    if way in ("plain", "compiled", "off"):
        return ordinary_steps(case, model, batch, way)
    return private_steps(dpoptim, case, model, batch, way)


def private_steps(package: Any, case: Case, model: nn.Module, batch: Batch, way: str) -> Step:
    """Return a private step of a version of dpoptim."""
    size = len(batch[0])
    plan = package.PrivacyPlan(num_examples=1000 * size, batch_size=size, steps=10_000, noise_multiplier=1.0)
    make = package.scale_then_privatize if way in ("scaled", "captured") else package.post_processing
    graphs = way in ("captured", "captured flat")  # the second is for trainer.py
    optimizer = make(model, plan, lr=1e-4, external_batches=True)

    def ordinary(*given: Tensor) -> object:
        return case.loss(model, given).sum().backward()

    captured, steps = (optimizer.captured(lambda *given: case.loss(model, given)) if graphs else None), 0
    parts, micro_batch = [batch], getattr(case, "captured_micro_batch", None)  # older versions do not have it
    if captured is not None and micro_batch is not None:
        model.gradient_checkpointing_disable()  # micro-batches take its place
        parts = list(zip(*(t.split(micro_batch) for t in batch), strict=True))

    def private() -> None:
        nonlocal steps
        for part in parts:
            (captured or ordinary)(*part)
        optimizer.step()
        steps += 1
        if captured is not None and steps == 3 and not captured.graphs:
            raise RuntimeError("no CUDA graph was captured")

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

    # Opacus sets the reduction to "none" when it needs the per-example losses.
    criterion.reduction, size = "mean", len(batch[0])  # type: ignore[attr-defined]
    # Opacus only takes the expected batch size from this loader; 1/8 is exact.
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
        raise ValueError(f"Opacus expects batches of {optimizer.expected_batch_size}, not {size}")
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


def measured(case: Case, ways: Sequence[str], repeats: int, progress: Progress) -> Found:
    """Measure all methods together if they fit into memory; a method that ran out of memory is tried again alone."""
    found: Found = {}
    for group in [ways] if case.together else [[way] for way in ways]:
        found |= timed({way: (case, way) for way in group}, repeats, progress)
    for way in ways:
        if case.together and len(ways) > 1 and found[way].get("error") == "out of memory":
            found |= timed({way: (case, way)}, repeats, progress)
    return found


def peaks(allocated: int = 0, reserved: int = 0) -> dict[str, float]:
    """Return the peak memory in GiB above the given bytes: of tensors, and of everything that PyTorch reserved."""
    return {
        "gb": (torch.cuda.max_memory_allocated() - allocated) / 2**30,
        "reserved_gb": (torch.cuda.max_memory_reserved() - reserved) / 2**30,
    }


def timed(runs: Mapping[str, tuple[Case, str]], repeats: int, progress: Progress) -> Found:
    """Measure each run, a (case, method) pair; all of them take turns in every round."""
    found: Found = {}
    running: dict[str, Step] = {}
    cuda = any(case.device == "cuda" for case, _ in runs.values())
    for name, (case, way) in runs.items():
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if cuda else (0, 0)
        try:
            step = steps_of(case, way)
            for _ in range(3):
                milliseconds(step, case.device)  # waits, so that an error belongs to this run
            running[name] = step
            found[name] = peaks(*before) if cuda else {}
        except Exception as error:
            found[name] = {"error": first_words(error)}
        progress(f"{case.name}, {way}: {found[name].get('error', 'warm')}")
        step = None  # type: ignore[assignment]  # frees its model before the next one is measured
    times: dict[str, list[float]] = {name: [] for name in running}
    for done in range(1, repeats + 1):
        for name in list(running):
            try:
                times[name].append(milliseconds(running[name], "cuda" if cuda else "cpu"))
            except Exception as error:
                del running[name]
                found[name] = {"error": first_words(error)}
        if running and (done % max(1, repeats // 5) == 0 or done == repeats):
            progress(f"{next(iter(runs.values()))[0].name}: round {done} of {repeats}")
    for name in running:
        low, middle, high = statistics.quantiles(times[name], n=4, method="inclusive")
        found[name] |= {"ms": middle, "low_ms": low, "high_ms": high}
    return found


def ran(record: dict[str, Any]) -> bool:
    return any("ms" in found for c in record["cases"] for found in c["ways"].values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only the cases whose name contains TEXT, such as 'GPT-2 8x1024'"
    )
    parser.add_argument("--ways", metavar="A,B", help="only these methods, separated by commas")
    parser.add_argument("--repeats", type=at_least(2), default=20, metavar="N", help="timed rounds (default: 20)")
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    ways = tuple(options.ways.split(",")) if options.ways else default_ways(options.device)
    chosen = [case for case in cases(options.device) if options.only.lower() in case.name.lower()]
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"unknown method {unknown[0]!r} in --ways; choose from {', '.join(WAYS)}")
    if "captured" in ways and options.device == "cpu":
        parser.error("captured needs a GPU; leave it out of --ways")
    if not chosen:
        names = ", ".join(case.name for case in cases(options.device))
        parser.error(f"no case matches --only {options.only}; choose from {names}")
    if set(ways) & set(PEERS) and not options.earlier and missing_packages(["opacus"]):
        parser.error("Opacus is not installed; run: pip install opacus")
    warnings.simplefilter("ignore")
    if options.earlier:
        with one_line_errors(parser):
            record, chosen = read(options.earlier), []
    else:
        if all(missing_packages(case.needs) for case in chosen):
            require_packages(parser, *dict.fromkeys(name for case in chosen for name in case.needs))
        record = setting(options.device, options.commit) | {"repeats": options.repeats, "cases": []}
    for case in chosen:
        if missing := missing_packages(case.needs):
            report(f"skipping {case.name}, which needs {with_pip(missing)}")
            continue
        found = measured(case, ways, options.repeats, report)
        about = {key: getattr(case, key) for key in ("name", "note", "together", "compiled_micro_batch")}
        record["cases"].append({**about, "ways": found, "ratios": ratios(found)})
        if options.json:
            save(record, options.json)
    publish(options, markdown(record))
    return 0 if ran(record) else 1


if __name__ == "__main__":
    sys.exit(main())
