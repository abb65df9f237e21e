"""Time and memory of a training step: private, the same without privacy, plain PyTorch and Opacus, in one process.

    python benchmarks/steps.py                             on the GPU where there is one, else on the CPU
    python benchmarks/steps.py --only gpt-2 --ways off,scaled --repeats 50
    python benchmarks/steps.py --json FILE --write FILE    for picture.py, and as dated markdown
    python benchmarks/steps.py --from FILE --write FILE    the table of an earlier --json, without measuring

A step is forward, backward, clipping, noise and update of one batch. The ways:

    plain         the loss as one would write it, eager PyTorch, torch.optim.Adam (fused, here and below)
    compiled      the same, model and loss together under torch.compile
    off           our fused loss, torch.optim.Adam, no privacy
    flat          our fused loss, dpoptim.post_processing
    scaled        our fused loss, dpoptim.scale_then_privatize
    captured      the same through optimizer.captured: one CUDA graph up to the clipped sums (on a GPU)
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
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from cases import Batch, Case, bert_tiny, cases, gpt2, masked_lm, resnet, vit
from options import (
    absent,
    add_device,
    add_files,
    and_install,
    need_packages,
    say,
    told_in_one_line,
    whole,
)
from record import PEERS, WAYS, Found, fastest_peer, heading, markdown, ratios, read, save, setting, show
from rich.console import Console
from torch import Tensor, nn

import dpoptim

__all__ = [
    "bert_tiny", "cases", "fastest_peer", "gpt2", "heading", "masked_lm", "measured", "ratios", "resnet", "setting",
    "steps_of", "timed", "vit",
]  # fmt: skip

ADAM = partial(torch.optim.Adam, lr=1e-4, fused=True)
Step = Callable[[], None]
Tell = Callable[[str], None]


def default_ways(device: str) -> tuple[str, ...]:
    """All, but no twin, on the CPU nothing compiled or captured, and Opacus only where it is installed."""
    peers = PEERS if absent(["opacus"]) else ()
    graphs = ("compiled", "captured") if device == "cpu" else ()
    return tuple(way for way in WAYS if way not in (*peers, *graphs, "flat twin"))


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
    make = dpoptim.scale_then_privatize if way in ("scaled", "captured") else dpoptim.post_processing
    optimizer = make(model, plan, lr=1e-4, external_batches=True)
    loss = case.peer_loss if twin else case.loss

    def ordinary(*given: Tensor) -> object:
        return loss(model, given).sum().backward()

    captured = optimizer.captured(lambda *given: loss(model, given)) if way == "captured" else None

    def private() -> None:
        (captured or ordinary)(*batch)
        optimizer.step()
        if captured is not None and optimizer.mechanism.step == 3 and not captured.graphs:
            raise RuntimeError("nothing was captured")

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

    # Opacus asks for the losses by setting it to "none".
    criterion.reduction, size = "mean", len(batch[0])  # type: ignore[attr-defined]
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


def silent(line: str) -> None:
    """Tell nothing."""


def measured(case: Case, ways: Sequence[str], repeats: int, tell: Tell = silent) -> Found:
    """Time and memory of each way, in rounds where they fit together; a way that did not fit gets a try of its own."""
    found: Found = {}
    for group in [ways] if case.together else [[way] for way in ways]:
        found |= timed({way: (case, way) for way in group}, repeats, tell)
    for way in ways:
        if case.together and len(ways) > 1 and found[way].get("error") == "out of memory":
            found |= timed({way: (case, way)}, repeats, tell)
    return found


def timed(runs: Mapping[str, tuple[Case, str]], repeats: int, tell: Tell = silent) -> Found:
    """Time and memory of each run, a case in a way; all of them take their turn in every round.

    `tell` gets a line for each run that is warm and for each fifth of the rounds.
    """
    found: Found = {}
    running: dict[str, Step] = {}
    cuda = any(case.device == "cuda" for case, _ in runs.values())
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
        tell(f"{case.name}, {way}: {found[name].get('error', 'warm')}")
        step = None  # type: ignore[assignment]  # its model must go before the next is measured
    times: dict[str, list[float]] = {name: [] for name in running}
    for done in range(1, repeats + 1):
        for name in list(running):
            try:
                start = time.perf_counter()
                running[name]()
                wait()
                times[name].append(1e3 * (time.perf_counter() - start))
            except Exception as error:
                del running[name]
                found[name] = {"error": first_words(error)}
        if running and (done % max(1, repeats // 5) == 0 or done == repeats):
            tell(f"{next(iter(runs.values()))[0].name}: round {done} of {repeats}")
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
        "--only", metavar="TEXT", default="", help="only the cases whose name has TEXT in it, such as 'GPT-2 8x1024'"
    )
    parser.add_argument("--ways", metavar="A,B", help="only these ways, with commas between (see above)")
    parser.add_argument("--repeats", type=whole(2), default=20, metavar="N", help="rounds that are timed (20)")
    parser.add_argument("--threads", type=whole(1), metavar="N", help="threads of PyTorch on the CPU")
    add_files(parser, after=", after each case")
    options = parser.parse_args()
    ways = tuple(options.ways.split(",")) if options.ways else default_ways(options.device)
    chosen = [case for case in cases(options.device) if options.only.lower() in case.name.lower()]
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways has {unknown[0]!r}; choose from: {', '.join(WAYS)}")
    if "captured" in ways and options.device == "cpu":
        parser.error("--ways has captured, which takes a GPU")
    if not chosen:
        parser.error(f"--only must be part of one of: {', '.join(case.name for case in cases(options.device))}")
    if set(ways) & set(PEERS) and not options.files and absent(["opacus"]):
        parser.error("--ways has Opacus, which is not installed; run: pip install opacus")
    torch.set_num_threads(options.threads or torch.get_num_threads())
    warnings.simplefilter("ignore")
    console = Console(width=None if Console().is_terminal else 200)
    if options.files:
        with told_in_one_line(parser):
            record, chosen = read(options.files), []
    else:
        if all(absent(case.needs) for case in chosen):
            need_packages(parser, *dict.fromkeys(name for case in chosen for name in case.needs))
        record = setting(options.device, options.commit) | {"repeats": options.repeats, "cases": []}
    for case in chosen:
        if missing := absent(case.needs):
            say(f"{case.name} is left out: it needs {and_install(missing)}")
            continue
        found = measured(case, ways, options.repeats, say)
        about = {key: getattr(case, key) for key in ("name", "note", "together", "compiled_micro_batch")}
        record["cases"].append({**about, "ways": found, "ratios": ratios(found)})
        if options.json:
            save(record, options.json)
    show(record, console)
    if options.files and options.json:
        save(record, options.json)
    if options.write:
        options.write.write_text(markdown(record))
    return 0 if ran(record) else 1


if __name__ == "__main__":
    sys.exit(main())
