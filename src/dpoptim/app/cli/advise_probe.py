"""`dpoptim advise --probe`: gradients measured on public examples."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dpoptim.app import prepare, read_records
from dpoptim.app.cli.model_size import in_options
from dpoptim.app.cli.units import count
from dpoptim.integrations.losses import Task
from dpoptim.theory import GradientSignal, measure_signal

if TYPE_CHECKING:
    from argparse import Namespace

PUBLIC = "note: the examples of --probe are taken as PUBLIC on your word: their gradients enter the advice un-noised"
_EXAMPLES, _FEWEST = 256, 16
_ONLY_WITH_PROBE = ("text_column", "label_column", "probe_examples", "max_length", "from_scratch")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --probe and what it needs; --task also says which class of MODEL is counted."""
    probe = parser.add_argument_group("measured gradients")
    probe.add_argument(
        "--probe",
        metavar="DATA",
        help="PUBLIC examples: .txt, .jsonl, .csv, a folder or a dataset's name. They must be public: their gradients "
        "enter the advice without noise, and no guarantee covers them",
    )
    probe.add_argument(
        "--task",
        choices=[task.value for task in Task],
        metavar="TASK",
        help=f"what MODEL learns, needed with --probe: {', '.join(task.value for task in Task)} (default: what MODEL's "
        "configuration says)",
    )
    probe.add_argument("--text-column", metavar="NAME", help="of --probe, where the texts are")
    probe.add_argument("--label-column", metavar="NAME", help="of --probe, where the labels are")
    probe.add_argument("--probe-examples", type=count, metavar="N", help=f"how many (default: {_EXAMPLES})")
    probe.add_argument("--max-length", type=count, metavar="N", help="tokens a text is cut at")
    probe.add_argument("--from-scratch", action="store_true", help="new weights, of MODEL's configuration")


def check_options(options: Namespace, *, number: int | None) -> None:
    """Refuse what can be seen to be wrong before anything slow; `number` is MODEL where it is one."""
    if options.probe is None:
        unused = [name for name in _ONLY_WITH_PROBE if getattr(options, name) not in (None, False)]
        if unused:
            raise ValueError(f"--{unused[0].replace('_', '-')} is for --probe, which was not given; leave it out")
        if options.task is not None and number is not None:
            raise ValueError(f"--task is for a folder or a name, and MODEL {options.model!r} is a number; leave it out")
        return
    if number is not None:
        raise ValueError(f"--probe needs a model, and MODEL {options.model!r} is a number; give a folder or a name")
    if options.task is None:
        raise ValueError(f"--probe needs --task, one of {', '.join(task.value for task in Task)}")
    if options.probe_examples is not None and options.probe_examples < _FEWEST:
        raise ValueError(
            f"--probe-examples {options.probe_examples} is too few to measure anything; give {_FEWEST} or more"
        )
    if options.max_length is not None and options.max_length < 2:
        raise ValueError(f"--max-length {options.max_length} must be at least 2 tokens")


def measured(options: Namespace, *, progress: Callable[[int], None]) -> GradientSignal:
    """The signal of MODEL on the public records, in small batches, as in training (dropout included)."""
    with in_options():
        records = read_records(options.probe, text_column=options.text_column, label_column=options.label_column)
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(0))
    order = order[: options.probe_examples or _EXAMPLES]
    if len(order) < _FEWEST:
        raise ValueError(
            f"--probe {options.probe} has {len(order)} records; give {_FEWEST} or more, better a few hundred"
        )
    with in_options():
        prepared = prepare(
            task=Task(options.task),
            model=options.model,
            records=records.take(order.tolist()),
            max_length=options.max_length,
            from_scratch=options.from_scratch,
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = prepared.model.to(device).train()
    dataset: Any = prepared.dataset

    def batches() -> Any:
        for step, part in enumerate(torch.arange(len(order)).split(8)):
            batch = prepared.collate([dataset[int(i)] for i in part])
            yield prepared.at_step({name: values.to(device) for name, values in batch.items()}, step)

    with torch.random.fork_rng(devices=[] if device.type == "cpu" else None):
        torch.default_generator.manual_seed(0)
        return measure_signal(
            model,
            prepared.loss_per_example,
            batches(),
            clip_norm=options.clip_norm,
            batch_size=options.batch_size,
            progress=progress,
        )
