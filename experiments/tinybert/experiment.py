"""Run the table: jobs to workers, lines to the file, until nothing is left or time is over."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from experiments import provenance, result_files
from experiments.experiment import MissingInput, Outcome, Request, line_of, open_results, short
from experiments.result_files import Line, cell_key
from experiments.tinybert import model as models
from experiments.tinybert.corpus import Corpus, made_up_corpus, read_corpus
from experiments.tinybert.schedule import SETTINGS, Cell, Job, in_turn, jobs, sweep_jobs
from experiments.tinybert.sizes import SIZES, Scoring
from experiments.tinybert.table_of_cells import ROWS, places
from experiments.tinybert.texts import fingerprint, laid_out
from experiments.tinybert.training_run import Workspace, dtype_on
from experiments.tinybert.unfinished import Unfinished
from experiments.tinybert.workers import Here, Processes, workers
from experiments.voice import Voice

NAME = "tinybert"
_MADE_UP = 150  # tokens of the made-up vocabulary
LONGEST = 512
GPU_WORKERS = 6


def run_table(request: Request, voice: Voice) -> int:
    """All that the file has not: the model as it comes, tuning, and final runs, of the paper's table and beyond it."""
    size = SIZES[request.scale]

    def next_jobs(lines: list[Line], shared: Cell) -> list[Job]:
        all_places = places(beyond=False) + places(beyond=True)
        return in_turn(jobs(lines, all_places, size, shared, request.seeds or size.seeds))

    return _run(request, voice, next_jobs)


def run_sweep(request: Request, voice: Voice) -> int:
    """Runs that only a picture shows: scale-then-privatize against the clip norm, once its table's place is tuned."""
    if request.again:  # the table's runs, in the same file, are not its own to begin afresh
        raise ValueError("figures adds to the results of tinybert; leave out --again, or begin those afresh")
    return _run(request, voice, lambda lines, shared: sweep_jobs(lines, SIZES[request.scale], shared))


def _run(request: Request, voice: Voice, next_jobs: Callable[[list[Line], Cell], list[Job]]) -> int:
    _check_only(request)
    make_ground = ground_maker(request)
    lines = open_results(NAME, request, voice)
    count = request.workers or (GPU_WORKERS if request.device.startswith("cuda") else 1)
    commit = request.commit or provenance.this_commit()
    kept = request.out / "unfinished"
    if request.again:
        shutil.rmtree(kept, ignore_errors=True)
    unfinished = Unfinished(kept / commit, until=time.time() + request.seconds_left())
    ground = make_ground()  # before others do: texts are cut into tokens once
    shared = _start(request, lines, ground, voice) | {"dtype": str(dtype_on(request.device))[len("torch.") :]}
    with workers(ground, make_ground, unfinished, count) as pool:

        def wanted() -> list[Job]:
            return [job for job in next_jobs(lines, shared) if request.wants(job.cell)]

        if request.only and not wanted() and not any(request.wants(line["cell"]) for line in lines):
            raise MissingInput(f"only={','.join(request.only)} leaves no cell to run, and none that was run")
        return _work_off(request, wanted, pool, lines, unfinished, voice)


def _check_only(request: Request) -> None:
    """MissingInput where `only` asks for a place or a setting that no cell has, before texts are read."""
    of_place = [text for text in request.only if text.startswith(("row=", "column="))]
    narrowed, all_places = replace(request, only=tuple(of_place)), places(beyond=False) + places(beyond=True)
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


def _work_off(
    request: Request,
    next_jobs: Callable[[], list[Job]],
    pool: Here | Processes,
    lines: list[Line],
    unfinished: Unfinished,
    voice: Voice,
) -> int:
    """Give out jobs as lines come in; past the time limit none is begun, and those under way stop and are kept.

    Returns how many are left, as far as is known before further tuning.
    """
    flying: set[str] = set()
    kept = 0
    voice.begin(NAME, total=len(next_jobs()), done=0)
    while True:
        waiting = [job for job in next_jobs() if cell_key(job.cell) not in flying]
        while waiting and pool.busy < pool.places and not request.out_of_time():
            job = waiting.pop(0)
            flying.add(cell_key(job.cell))
            voice.doing(short(job.cell))
            pool.give(job)
        if not pool.busy:
            if waiting:
                voice.say(
                    f"{NAME}: time is over, {len(waiting)} cells or more are left, {kept} of them begun; the same "
                    "command goes on"
                )
            return len(waiting)
        done, outcome, seconds = pool.take()
        flying.discard(cell_key(done.cell))
        if outcome is None:
            kept += 1
            continue
        line = line_of(NAME, request, done.cell, outcome, time.perf_counter() - seconds, device=request.device)
        lines.append(line)
        result_files.append(request.file(NAME), line)
        unfinished.forget(done.cell)
        said = {name: line["cell"][name] for name in ("lr", "eps", "eps_over_noise", "clip_norm", "momentum")
                if name in line["cell"]}  # fmt: skip
        found = line["result"]
        voice.finished(
            f"{NAME}: {short(line['cell'])} {said}: validation {found['validation']}, {found['ended']}, "
            f"{line['setting']['seconds']:.0f} s, {found['ms_a_step']} ms a step"
        )


def _start(request: Request, lines: list[Line], ground: Workspace, voice: Voice) -> Cell:
    """What all cells share, after the loss of the model as it comes is in the file.

    ValueError where the file has runs of another model or of other texts.
    """
    started = time.perf_counter()
    shared = {"num_examples": len(ground.train), "model": models.fingerprint(ground.fresh_model())}
    texts = fingerprint(ground.train)
    for line in lines:
        if line["cell"]["purpose"] == "no fine-tuning":
            before = {name: line["cell"][name] for name in shared}
            if before != shared or line["result"].get("texts", texts) != texts:
                raise ValueError(
                    f"{request.file(NAME)} has runs of another model or of other texts ({before['num_examples']:,} "
                    f"texts, model {before['model']}; given are {shared['num_examples']:,} and {shared['model']}); "
                    "give --out another folder"
                )
            return shared
    fresh = ground.model()
    cell = {"purpose": "no fine-tuning", "row": "none", "column": "none", "seed": 0, **shared}
    result = {"ended": "finished", "validation": ground.validation_loss(fresh), **ground.test_losses(fresh),
              "texts": texts}  # fmt: skip
    first = line_of(
        NAME, request, cell, Outcome(result=result, note="no private text was used"), started, device=request.device
    )
    result_files.append(request.file(NAME), first)
    lines.append(first)
    voice.say(f"{NAME}: {len(ground.train):,} texts; test loss before fine-tuning {result['test']['tokens']:.4f}")
    return shared


def ground_maker(request: Request) -> Callable[[], Workspace]:
    """A function, fit for other processes, that makes what all cells share; MissingInput where data or model are missing."""
    if request.device.startswith("cuda") and not torch.cuda.is_available():
        raise MissingInput(f"{NAME}: this PyTorch finds no CUDA device; leave out --device {request.device}")
    scoring = SIZES[request.scale].scoring
    if request.scale == "smoke":
        return functools.partial(_ground, "", None, Path("."), request.device, scoring)
    if request.model is None or request.data is None:
        raise MissingInput(
            "tinybert needs abstracts: --data DIR with packed ids, or --data arxiv-metadata-oai-snapshot.json (the "
            "public arXiv metadata file); and a model: --model DIR or google/bert_uncased_L-2_H-128_A-2"
        )
    return functools.partial(_ground, request.data, request.model, request.out, request.device, scoring)


def _ground(data: str, model: str | None, cache: Path, device: str, scoring: Scoring) -> Workspace:
    if model is None:
        corpus = made_up_corpus(vocabulary=_MADE_UP, examples=60)
        fresh, longest = functools.partial(models.made_up, vocabulary=_MADE_UP), 64
    else:
        corpus = read_corpus(data, model, longest=LONGEST, cache=cache)
        fresh, longest = functools.partial(models.load, model), LONGEST
    return grounded(corpus, fresh, longest, device, scoring)


def grounded(
    corpus: Corpus, fresh: Callable[[], models.MaskedLM], longest: int, device: str, scoring: Scoring
) -> Workspace:
    """Texts laid out on the device."""
    train, validation, test = (
        laid_out(tokens, corpus.marks, longest, device) for tokens in (corpus.train, corpus.validation, corpus.test)
    )
    return Workspace(train, validation, test, fresh, device, scoring, longest)
