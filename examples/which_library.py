"""Guess the library of a docstring: a text classifier, trained with four private optimizers at the same (ε, δ).

The records are the docstrings of installed libraries and of Python itself, read from their source files with `ast`:
nothing is imported or downloaded. Each docstring is one private record, and its library is the label. Library names are
removed from the text, so that it does not contain the answer. A fixed hash turns words into numbers, because a
vocabulary built from the records would leak information about them.

    python examples/which_library.py              # about a minute on two cores
    python examples/which_library.py --epsilon 8
    python examples/which_library.py --quick --json

The settings were tuned on parts of the same records. Do not do that in a real project: ε does not cover the choice, and
the held-out records influenced it. Scale-then-privatize had more trials (16) than the others (6 or 7 each), so a lead
of one point proves nothing. ε holds for each model separately, not for all of them together.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import dpoptim
from dpoptim.app.demo.text import library_docstrings

LIBRARIES = ("python", "torch", "scipy", "sympy", "numpy", "networkx", "setuptools", "pygments", "pip", "rich")
OWN_NAMES = {*LIBRARIES, "pytorch", "np", "nx"}
WORDS = 48  # longer records are truncated
SHORTEST = 8  # records with fewer words are left out
BUCKETS = 8192  # word ids; 0 is padding


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a run."""

    records_per_library: int
    batch_size: int
    steps: int


FULL = Size(records_per_library=4000, batch_size=2048, steps=100)
QUICK = Size(records_per_library=150, batch_size=256, steps=10)


@dataclass(frozen=True, kw_only=True)
class Method:
    """An optimizer with the settings that worked best for it."""

    name: str
    idea: str
    clip_norm: float
    optimizer: Callable[[nn.Module, dpoptim.PrivacyPlan], torch.optim.Optimizer]


METHODS = (
    Method(
        name="dp_sgd",
        idea="clip, add noise, plain steps with momentum",
        clip_norm=1.0,
        optimizer=lambda model, plan: dpoptim.dp_sgd(model, plan, lr=1.0, momentum=0.9),
    ),
    Method(
        name="post_processing",
        idea="Adam on the noisy gradient",
        clip_norm=1.0,
        optimizer=lambda model, plan: dpoptim.post_processing(model, plan, lr=1e-2),
    ),
    Method(
        name="bias_correction",
        idea="Adam, with the noise subtracted from the second moment",
        clip_norm=1.0,
        optimizer=lambda model, plan: dpoptim.bias_correction(model, plan, lr=1e-2, rule=dpoptim.Adam(eps=1e-3)),
    ),
    Method(
        name="scale_then_privatize",
        idea="Adam's scaling before clipping and noise",
        clip_norm=0.3,
        optimizer=lambda model, plan: dpoptim.scale_then_privatize(
            model, plan, lr=1e-2, eps_scale=1.5 * plan.noise_stddevs().gradient_sum / plan.batch_size
        ),
    ),
)


class Records(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Word ids [records, WORDS] and labels [records]; `__getitems__` gathers a whole batch at once."""

    def __init__(self, words: Tensor, labels: Tensor) -> None:
        self.words, self.labels = words, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(indices)
        return self.words[rows], self.labels[rows]


class WordAverage(nn.Module):
    """The normalised mean of a text's word vectors, followed by one hidden layer."""

    def __init__(self, libraries: int, *, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BUCKETS, width, padding_idx=0)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, hidden)
        self.output = nn.Linear(hidden, libraries)

    def forward(self, words: Tensor) -> Tensor:
        # The padding row gets noise like every other parameter, so padding must be masked.
        present = (words != 0)[..., None]  # [records, WORDS, 1]
        mean = (self.embedding(words) * present).sum(1) / present.sum(1)
        return self.output(F.gelu(self.hidden(self.norm(mean))))


def loss_per_example(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return one loss per record."""
    words, labels = batch
    return F.cross_entropy(model(words), labels, reduction="none")


def train_privately(
    method: Method, train: Records, plan: dpoptim.PrivacyPlan, model: nn.Module, *, after_step: Callable[[], None]
) -> str:
    """Train privately and return the privacy statement."""
    loader = dpoptim.private_loader(train, plan, collate_fn=unchanged)
    optimizer = method.optimizer(model, plan)
    schedule = linear_decay(optimizer, plan.steps)
    for batch in loader:
        loss_per_example(model, batch).sum().backward()
        optimizer.step()
        schedule.step()
        after_step()
    return plan.statement()


def train_without_privacy(train: Records, size: Size, model: nn.Module, *, after_step: Callable[[], None]) -> None:
    """Train the same model for as many steps with `torch.optim.Adam`, to show what privacy costs."""
    sampler = torch.utils.data.RandomSampler(train, replacement=True, num_samples=size.batch_size * size.steps)
    loader = torch.utils.data.DataLoader(train, batch_size=size.batch_size, sampler=sampler, collate_fn=unchanged)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = linear_decay(optimizer, size.steps)
    for batch in loader:
        optimizer.zero_grad()
        loss_per_example(model, batch).mean().backward()
        optimizer.step()
        schedule.step()
        after_step()


def linear_decay(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Lower the learning rate to 0 over the run."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)


def unchanged(batch: Any) -> Any:
    """Return the batch unchanged, because `Records` already gathers whole batches."""
    return batch


def word_ids(text: str) -> list[int]:
    """Return the first WORDS words as hashes in 1 … BUCKETS − 1, without library names.

    >>> len(word_ids("Return a NumPy array; see np.array and torch.tensor.")), word_ids("Array") == word_ids("array")
    (7, True)
    """
    words = (word for word in re.findall("[a-z]+", text.lower()) if word not in OWN_NAMES)
    return [1 + zlib.crc32(word.encode()) % (BUCKETS - 1) for word in islice(words, WORDS)]


def documentation(library: str, limit: int) -> list[list[int]]:
    """Return up to `limit` distinct docstrings of a library as word ids."""
    found: dict[tuple[int, ...], None] = {}
    for text in library_docstrings(library):
        ids = word_ids(text)
        if len(ids) >= SHORTEST:
            found[tuple(ids)] = None
        if len(found) >= limit:
            break
    return [list(ids) for ids in found]


def read_records(
    size: Size, seed: int, *, after_library: Callable[[], None]
) -> tuple[Records, Records, dict[str, int]]:
    """Return training records, held-out records (one in seven), and the count per library, without duplicates."""
    seen: set[tuple[int, ...]] = set()
    words: list[list[int]] = []
    labels: list[int] = []
    counts: dict[str, int] = {}
    with ProcessPoolExecutor(max_workers=2) as pool:
        found = pool.map(documentation, LIBRARIES, [size.records_per_library] * len(LIBRARIES))
        for library, texts in zip(LIBRARIES, found, strict=True):
            after_library()
            new = [text for text in texts if tuple(text) not in seen]
            seen.update(map(tuple, new))
            if new:
                words += [text + [0] * (WORDS - len(text)) for text in new]
                labels += [len(counts)] * len(new)
                counts[library] = len(new)
    if len(counts) < 2:
        sys.exit("which_library.py: found fewer than two libraries. Install dpoptim with its dependencies.")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    all_words, all_labels = torch.tensor(words)[order], torch.tensor(labels)[order]
    held_out = len(order) // 7
    return (
        Records(all_words[held_out:], all_labels[held_out:]),
        Records(all_words[:held_out], all_labels[:held_out]),
        counts,
    )


@torch.no_grad()
def accuracy(model: nn.Module, records: Records) -> float:
    """Return the fraction of records that the model classifies correctly."""
    return (model(records.words).argmax(1) == records.labels).float().mean().item()


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table."""

    name: str
    idea: str
    private: bool
    accuracy: float
    seconds: float


def compare(
    train: Records, held_out: Records, plan: dpoptim.PrivacyPlan, size: Size, seed: int, progress: Progress
) -> tuple[list[Result], str]:
    """Train every method from the same initial weights; return the results and the last privacy statement."""
    classes = int(train.labels.max()) + 1
    largest = held_out.labels.bincount().max().item() / len(held_out)
    results = [
        Result(name="no training", idea="always the largest library", private=False, accuracy=largest, seconds=0.0)
    ]
    statement = ""
    for method in (*METHODS, None):
        name = "Adam, not private" if method is None else method.name
        task = progress.add_task(name, total=size.steps)
        torch.manual_seed(seed)
        model = WordAverage(classes)
        begin = time.perf_counter()

        def after_step(task: Any = task) -> None:
            progress.advance(task)

        if method is None:
            idea = "torch.optim.Adam: no clipping, no noise"
            train_without_privacy(train, size, model, after_step=after_step)
        else:
            idea = method.idea
            of_method = plan.replace(clip_norm=method.clip_norm)  # noise scales with the clip norm, so ε stays the same
            statement = train_privately(method, train, of_method, model, after_step=after_step)
        seconds = time.perf_counter() - begin
        right = accuracy(model, held_out)
        results.append(Result(name=name, idea=idea, private=method is not None, accuracy=right, seconds=seconds))
    return results, statement


def show(console: Console, results: list[Result], held_out: int, statement: str) -> None:
    """Print the table, a summary, and the guarantee."""
    private = [result for result in results if result.private]
    best = max(private, key=lambda result: result.accuracy)
    table = Table(title=f"Guessing the library of {held_out:,} held-out docstrings")
    table.add_column("optimizer")
    table.add_column("what it does")
    table.add_column("accuracy", justify="right")
    table.add_column("seconds", justify="right")
    for result in results:
        style = "bold green" if result is best else ("" if result.private else "dim")
        error = math.sqrt(result.accuracy * (1 - result.accuracy) / held_out)
        answers = f"{result.accuracy:.1%} ± {error:.1%}"
        table.add_row(result.name, result.idea, answers, f"{result.seconds:.1f}" if result.seconds else "", style=style)
    console.print(table)
    console.print(
        f"Best private optimizer in this run: [bold]{best.name}[/bold], {best.accuracy:.1%}. ± is one standard error "
        "of the held-out sample; smaller differences mean nothing. Every run draws new noise.\n"
    )
    console.rule(f"plan.statement() of {private[-1].name}")
    console.print(statement, soft_wrap=True, highlight=False, markup=False)
    console.rule()
    console.print(
        "Each of the other private models has the same ε and δ. If you publish several, their guarantees add up. "
        "The held-out records are not covered; they are used only for this table."
    )


class OneLineParser(argparse.ArgumentParser):
    """Report errors in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}. See --help.\n")


def main() -> None:
    parser = OneLineParser(prog="which_library.py", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epsilon", type=float, default=3.0, help="ε of each private model (default: %(default)s)")
    parser.add_argument("--delta", type=float, default=1e-6, help="δ of each private model (default: %(default)s)")
    parser.add_argument("--steps", type=int, help=f"training steps (default: {FULL.steps}, with --quick {QUICK.steps})")
    parser.add_argument("--seed", type=int, default=0, help="of split and initial weights, never of noise (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="few records and few steps, as a quick check")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.steps is not None:
        size = replace(size, steps=options.steps)
    if not 0 <= options.seed < 2**63:
        parser.error(f"Expected seed in [0, 2**63), got {options.seed}.")
    if math.isinf(options.epsilon):
        parser.error(f"Expected a finite epsilon, got {options.epsilon}.")
    try:  # Reject an invalid ε, δ or number of steps before reading anything.
        plan_for(10 * size.batch_size, size, epsilon=options.epsilon, delta=options.delta)
    except ValueError as error:
        parser.error(str(error))
    run(size, options)


def plan_for(num_examples: int, size: Size, *, epsilon: float, delta: float) -> dpoptim.PrivacyPlan:
    """Return a plan with Poisson batches and independent noise; one docstring is one record."""
    return dpoptim.PrivacyPlan(
        num_examples=num_examples, batch_size=size.batch_size, steps=size.steps, sampling=dpoptim.Poisson()
    ).calibrate(epsilon=epsilon, delta=delta)


def run(size: Size, options: argparse.Namespace) -> None:
    """Read the records, train, and print the results."""
    console = Console(stderr=options.json)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("reading docstrings", total=len(LIBRARIES))
        train, held_out, counts = read_records(size, options.seed, after_library=lambda: progress.advance(task))
        plan = plan_for(len(train), size, epsilon=options.epsilon, delta=options.delta)
        results, statement = compare(train, held_out, plan, size, options.seed, progress)
    if not options.json:
        show(console, results, len(held_out), statement)
        return
    answer = {
        "epsilon": plan.epsilon(),
        "delta": plan.delta,
        "steps": plan.steps,
        "batch_size": plan.batch_size,
        "noise_multiplier": plan.noise_multiplier,
        "num_examples": len(train),
        "held_out": len(held_out),
        "libraries": counts,
        "results": [asdict(result) for result in results],
        "statement": statement,
    }
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
