"""Run the table: give jobs to workers and append lines to the file, until nothing is left or the time limit passes."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from experiments import provenance, results_file
from experiments.framework import MissingInput, Outcome, Request, line_of, open_results, short
from experiments.progress import ProgressReporter
from experiments.results_file import Line, cell_key
from experiments.tinybert import model as models
from experiments.tinybert.data import Corpus, fingerprint, laid_out, read_corpus, synthetic_corpus
from experiments.tinybert.grid import COLUMNS, CURVE, ONLY_SCHEDULED, ROWS, SIZES, Scoring, places
from experiments.tinybert.schedule import SETTINGS, Cell, Job, in_turn, jobs, sweep_jobs
from experiments.tinybert.training_run import Unfinished, Workspace, dtype_on
from experiments.tinybert.workers import Workers, workers

NAME = "tinybert"
_VOCABULARY = 150  # tokens of the synthetic corpus
LONGEST = 512
GPU_WORKERS = 6


def run_table(request: Request, reporter: ProgressReporter) -> int:
    """Run what the file lacks: the loss without fine-tuning, tuning runs and final runs."""
    size = SIZES[request.scale]

    def next_jobs(lines: list[Line], shared: Cell) -> list[Job]:
        all_places = places(beyond=False) + places(beyond=True)
        return in_turn(jobs(lines, all_places, size, shared, request.seeds or size.seeds))

    return run_jobs(request, reporter, next_jobs)


def run_sweep(request: Request, reporter: ProgressReporter) -> int:
    """Run what only a picture shows: scale-then-privatize against the clip norm, once it is tuned."""
    if request.overwrite:  # the same file holds the table's runs
        raise ValueError("figures adds to the results of tinybert; use --overwrite with tinybert instead")
    return run_jobs(request, reporter, lambda lines, shared: sweep_jobs(lines, SIZES[request.scale], shared))


def run_jobs(
    request: Request,
    reporter: ProgressReporter,
    next_jobs: Callable[[list[Line], Cell], list[Job]],
    *,
    name: str = NAME,
    files: int | None = None,
    needs: float = 0.0,
    check: Callable[[int], None] = lambda num_examples: None,
) -> int:
    """Run jobs until `next_jobs` has none for the lines so far, or until the time limit; returns how many are left.

    `name` is that of the results file. `files` limits the number of packed train files. No job starts with fewer than
    `needs` seconds left. If `needs` is not 0, it grows to what the longest job took. `check` may refuse a
    number of texts.
    """
    _check_only(request)
    make_workspace = workspace_maker(request, files)
    lines = open_results(name, request, reporter)
    count = request.workers or (GPU_WORKERS if request.device.startswith("cuda") else 1)
    commit = request.commit or provenance.this_commit()
    kept = request.out / "unfinished"
    if request.overwrite:
        shutil.rmtree(kept, ignore_errors=True)
    unfinished = Unfinished(kept / commit, until=time.time() + request.seconds_left())
    workspace = make_workspace()  # before workers do, so that texts are tokenized once
    check(len(workspace.train))
    shared = _start(name, request, lines, workspace, reporter) | {
        "dtype": str(dtype_on(request.device))[len("torch.") :]
    }
    with workers(workspace, make_workspace, unfinished, count) as pool:

        def wanted() -> list[Job]:
            return [job for job in next_jobs(lines, shared) if request.wants(job.cell)]

        if request.only and not wanted() and not any(request.wants(line["cell"]) for line in lines):
            raise MissingInput(f"only={','.join(request.only)} leaves no cell to run, and none that was run")
        return _run_jobs(name, request, wanted, pool, lines, unfinished, reporter, needs)


def _check_only(request: Request) -> None:
    """Refuse an `only` that no cell can match, before texts are read."""
    of_place = [text for text in request.only if text.startswith(("row=", "column="))]
    narrowed, all_places = replace(request, only=tuple(of_place)), places(beyond=False) + places(beyond=True)
    all_places += [(each.name, kind.name) for each in ONLY_SCHEDULED for kind in COLUMNS[1:]]
    all_places += [("scale_then_privatize", each.name) for each in (*COLUMNS, *CURVE) if each.beyond]
    if not any(narrowed.wants({"row": row, "column": column}) for row, column in all_places):
        rows, columns = (sorted(set(names)) for names in zip(*all_places, strict=True))
        raise MissingInput(
            f"only={','.join(of_place)} leaves no cell of {NAME}; rows are {', '.join(rows)}; columns are "
            f"{', '.join(columns)}"
        )
    settings = {knob.name for each in ROWS for knob in each.knobs} | SETTINGS
    for name in (text.partition("=")[0] for text in request.only):
        if name not in settings:
            raise MissingInput(f"only: cells of {NAME} have no {name}; they have {', '.join(sorted(settings))}")


def _run_jobs(
    name: str,
    request: Request,
    next_jobs: Callable[[], list[Job]],
    pool: Workers,
    lines: list[Line],
    unfinished: Unfinished,
    reporter: ProgressReporter,
    needs: float,
) -> int:
    """Start jobs as lines come in. Past the time limit none starts, and running ones stop and are saved.

    Returns how many are left, as far as is known before further tuning.
    """
    flying: set[str] = set()
    kept = finished = 0
    reporter.begin(name, total=len(next_jobs()), done=0)
    while True:
        waiting = [job for job in next_jobs() if cell_key(job.cell) not in flying]
        while waiting and pool.busy < pool.count and request.seconds_left() > needs:
            job = waiting.pop(0)
            flying.add(cell_key(job.cell))
            reporter.doing(short(job.cell))
            pool.start(job)
        if not pool.busy:
            if waiting:
                reporter.say(
                    f"{name}: time limit reached, {len(waiting)} cells or more are left, {kept} of them begun; run the "
                    "same command to resume"
                )
            return len(waiting)
        done, (outcome, seconds) = pool.next_finished()
        flying.discard(cell_key(done.cell))
        if outcome is None:
            kept += 1
            continue
        line = line_of(name, request, done.cell, outcome, time.perf_counter() - seconds, device=request.device)
        lines.append(line)
        results_file.append(request.file(name), line)
        finished += 1
        if needs and finished > pool.count:  # the first of each worker also imports and compiles
            needs = max(needs, seconds)
        unfinished.forget(done.cell)
        settings = {knob: line["cell"][knob] for knob in ("lr", "eps", "eps_over_noise", "clip_norm", "momentum")
                if knob in line["cell"]}  # fmt: skip
        found = line["result"]
        reporter.finished(
            f"{name}: {short(line['cell'])} {settings}: validation {found['validation']}, {found['ended']}, "
            f"{line['setting']['seconds']:.0f} s, {found['ms_a_step']} ms per step"
        )


def _start(name: str, request: Request, lines: list[Line], workspace: Workspace, reporter: ProgressReporter) -> Cell:
    """What all cells share, after writing the loss of the model without fine-tuning.

    Raises ValueError if the file has runs of a different model or of different texts.
    """
    started = time.perf_counter()
    shared = {"num_examples": len(workspace.train), "model": models.fingerprint(workspace.fresh_model())}
    texts = fingerprint(workspace.train)
    for line in lines:
        if line["cell"]["purpose"] == "no fine-tuning":
            before = {each: line["cell"][each] for each in shared}
            if before != shared or line["result"].get("texts", texts) != texts:
                raise ValueError(
                    f"{request.file(name)} has runs of a different model or texts ({before['num_examples']:,} "
                    f"texts, model {before['model']}; now {shared['num_examples']:,} and {shared['model']}). "
                    "Use a different folder with --out."
                )
            return shared
    fresh = workspace.model()
    cell = {"purpose": "no fine-tuning", "row": "none", "column": "none", "seed": 0, **shared}
    result = {"ended": "finished", "validation": workspace.validation_loss(fresh), **workspace.test_losses(fresh),
              "texts": texts}  # fmt: skip
    first = line_of(
        name, request, cell, Outcome(result=result, note="no private text was used"), started, device=request.device
    )
    results_file.append(request.file(name), first)
    lines.append(first)
    reporter.say(f"{name}: {len(workspace.train):,} texts; test loss before fine-tuning {result['test']['tokens']:.4f}")
    return shared


def workspace_maker(request: Request, files: int | None = None) -> Callable[[], Workspace]:
    """A function that makes the workspace, in this process or another. Raises MissingInput without data or model.

    `files` limits the number of packed train files.
    """
    if request.device.startswith("cuda") and not torch.cuda.is_available():
        raise MissingInput(f"{NAME}: PyTorch finds no CUDA device; leave out --device {request.device}")
    scoring = SIZES[request.scale].scoring
    if request.scale == "smoke":
        return functools.partial(_workspace, "", None, Path("."), request.device, scoring)
    if request.model is None or request.data is None:
        raise MissingInput(
            "tinybert needs abstracts (--data DIR with packed ids, or --data arxiv-metadata-oai-snapshot.json, the "
            "public arXiv metadata file) and a model (--model DIR or google/bert_uncased_L-2_H-128_A-2)"
        )
    return functools.partial(_workspace, request.data, request.model, request.out, request.device, scoring, files)


def _workspace(
    data: str, model: str | None, cache: Path, device: str, scoring: Scoring, files: int | None = None
) -> Workspace:
    if model is None:
        corpus = synthetic_corpus(vocabulary=_VOCABULARY, examples=60)
        fresh, longest = functools.partial(models.synthetic, vocabulary=_VOCABULARY), 64
    else:
        corpus = read_corpus(data, model, longest=LONGEST, cache=cache, files=files)
        fresh, longest = functools.partial(models.load, model), LONGEST
    return build_workspace(corpus, fresh, longest, device, scoring)


def build_workspace(
    corpus: Corpus, fresh: Callable[[], models.MaskedLM], longest: int, device: str, scoring: Scoring
) -> Workspace:
    """Lay out the texts on the device."""
    train, validation, test = (
        laid_out(tokens, corpus.marks, longest, device) for tokens in (corpus.train, corpus.validation, corpus.test)
    )
    return Workspace(train, validation, test, fresh, device, scoring, longest)
