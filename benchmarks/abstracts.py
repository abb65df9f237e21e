"""Time a private fine-tuning run of BERT-Tiny on texts of different lengths, such as arXiv abstracts.

    python benchmarks/abstracts.py --data FILE --model DIR --steps 200 --batch 256
    python benchmarks/abstracts.py --data DIR --model DIR --json FILE --write FILE

The data are texts (.jsonl, .csv or .txt) or a folder of packed token ids, which `experiments.tinybert.data` describes.
Texts are tokenized once, and their ids are kept in a folder next to the data. The model is the folder of a BERT with a
masked-token head.

Every step masks 15 % of each text's tokens (80 % [MASK], 10 % a random token, 10 % unchanged), from a fixed seed. The
loss of a text is the mean over them. The optimizer is `scale_then_privatize` with noise multiplier 1. The loader groups
texts of similar length into parts (`lengths=`, `micro_batch_tokens=`). All tokens are on the device, which gathers,
pads and masks a part. On a GPU, a part runs as one CUDA graph (`optimizer.captured`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options import add_device, add_json, add_write, at_least, input_folder, one_line_errors
from record import heading, markdown_table, measure_or_read, page, setting
from torch import Tensor

import dpoptim
from dpoptim.clipping.captured import Captured
from dpoptim.data.lengths import part_multiple
from experiments.tinybert.data import Indices, Part, Texts, laid_out, make_part, read_corpus
from experiments.tinybert.model import MaskedLM, load

LONGEST = 512  # tokens of a text
BUCKET = 64  # widths of parts are multiples of this
EVERY = 100  # steps between lines of progress


@dataclass
class Progress:
    """Counts, kept on the host; the sum of losses stays on the device until it is printed."""

    wait: Callable[[], None]
    begun: float = field(default_factory=time.perf_counter)
    steps: int = 0
    parts: int = 0
    tokens: int = 0
    padded: int = 0
    warm_steps: int = 0
    warm_seconds: float = 0.0
    examples: int = 0
    loss: Tensor | float = 0.0

    def seconds(self) -> float:
        self.wait()
        return time.perf_counter() - self.begun

    def add(self, losses: Tensor, *, tokens: int, padded: int) -> None:
        self.parts, self.tokens, self.padded = self.parts + 1, self.tokens + tokens, self.padded + padded
        self.loss, self.examples = self.loss + losses.float().sum(), self.examples + len(losses)

    def show(self) -> None:
        seconds, loss = self.seconds(), float(self.loss) / max(self.examples, 1)
        self.loss, self.examples = 0.0, 0
        print(
            f"step {self.steps}: {seconds:.1f} s, {self.tokens / seconds:,.0f} tokens/s, "
            f"{100 * self.padding_share:.1f} % padding, {self.parts / self.steps:.1f} parts per step, "
            f"mean loss since the last line {loss:.4f} (NOT private: for debugging only)",
            flush=True,
        )

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.padded


@dataclass(frozen=True)
class Run:
    """Everything that a run needs. It is set up before the clock starts, so that bad settings fail at once."""

    model: MaskedLM
    texts: Texts
    loader: dpoptim.PrivateLoader
    optimizer: Any
    differentiate: Callable[[Part], Tensor]  # runs forward and backward of a part, returns its losses


def set_up(options: argparse.Namespace) -> Run:
    """Load data and model; raise ValueError or OSError if they or the settings do not fit together."""
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    model = load(options.model, dtype=dtype).to(device).train()
    longest = min(LONGEST, model.bert.config.max_position_embeddings)
    corpus = read_corpus(str(options.data), options.model, longest=longest, cache=options.data.parent)
    texts = laid_out(corpus.train, corpus.marks, longest, device)
    print(f"{len(texts.lengths):,} texts of {texts.lengths.mean():.0f} tokens from {options.data}")
    if options.batch > len(texts.lengths):
        raise ValueError(f"--batch {options.batch} is larger than the {len(texts.lengths)} texts. Use a smaller batch.")
    plan = dpoptim.PrivacyPlan(
        num_examples=len(texts.lengths), batch_size=options.batch, steps=options.steps,
        sampling=dpoptim.Shuffled(), noise_multiplier=1.0,
    )  # fmt: skip

    def shape(rows: list[int]) -> tuple[Tensor, int, int, int]:
        """Return what `make_part` needs, and the number of tokens."""
        return texts.part(np.array(rows), bucket=BUCKET, longest=longest)

    loader = dpoptim.private_loader(
        Indices(len(texts)), plan, lengths=texts.lengths, micro_batch_tokens=options.tokens,
        bucket=BUCKET, collate_fn=shape, pin_memory=device == "cuda",
        # A known key repeats the same batches in every run. A shuffled order need not be secret; noise must be.
        key=dpoptim.NoiseKey.from_bytes(bytes(32)), run_id="abstracts",
    )  # fmt: skip
    optimizer = dpoptim.scale_then_privatize(model, plan, lr=1e-3)

    def ordinary(part: Part) -> Tensor:
        losses: Tensor = model(part)
        losses.sum().backward()
        return losses.detach()

    graphs = optimizer.captured(model, pad_to_multiple=part_multiple(options.batch))
    differentiate = graphs if options.graphs else ordinary
    return Run(model, texts, loader, optimizer, differentiate)


def train(run: Run, device: str, steps: int) -> Progress:
    vocabulary = run.model.bert.config.vocab_size
    generator = torch.Generator(device).manual_seed(0)
    progress = Progress(torch.cuda.synchronize if device == "cuda" else lambda: None)
    for indices, width, most, tokens in run.loader:
        losses = run.differentiate(make_part(run.texts, indices, width, most, vocabulary, generator))
        run.optimizer.step()
        progress.add(losses, tokens=tokens, padded=len(indices) * width)
        if not run.loader.step_ends:
            continue
        progress.steps += 1
        if progress.steps == min(10, steps // 2):
            progress.warm_steps, progress.warm_seconds = progress.steps, progress.seconds()
        if progress.steps % EVERY == 0 or progress.steps == steps:
            progress.show()
    return progress


def found_in(options: argparse.Namespace, run: Run, done: Progress, seconds: float) -> dict[str, Any]:
    """Return the results with their setting, for --json."""
    graphs = run.differentiate.graphs if isinstance(run.differentiate, Captured) else 0
    return setting(options.device, options.commit) | {
        "planned_steps": options.steps,
        "batch": options.batch,
        "examples": len(run.texts.lengths),
        "most_tokens": options.tokens,
        "bucket": BUCKET,
        "graphs": graphs,
        "steps": done.steps,
        "seconds": seconds,
        "warm_steps": done.warm_steps,
        "warm_seconds": done.warm_seconds,
        "tokens": done.tokens,
        "padded": done.padded,
        "parts": done.parts,
        "gb": torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None,
    }


def markdown(record: dict[str, Any]) -> str:
    seconds, steps, planned = record["seconds"], record["steps"], record["planned_steps"]
    a_step = (seconds - record["warm_seconds"]) / (steps - record["warm_steps"])
    padding = 100 * (1 - record["tokens"] / record["padded"])
    rows = {
        "steps done": f"{steps} of {planned}, {record['batch']} texts each, {record['examples']:,} in all",
        "seconds, from the start of the first step to the end of the last": f"{seconds:.1f}",
        f"ms per step, without the first {record['warm_steps']}": f"{1e3 * a_step:.1f}",
        f"seconds for {planned} steps at that pace": f"{a_step * planned:.0f}",
        "tokens, padding not counted": f"{record['tokens']:,} ({record['tokens'] / seconds:,.0f} per second)",
        "padding": f"{padding:.1f} % of all positions",
        "parts per step": f"{record['parts'] / steps:.1f} (up to {record['most_tokens']:,} tokens, "
        f"bucket {record['bucket']})" + (", each one CUDA graph" if record.get("graphs") else ""),
        "peak GPU memory": "none used" if record["gb"] is None else f"{record['gb']:.1f} GB",
    }
    about = f"{heading(record)}. Measured by `python benchmarks/abstracts.py`; its docstring describes the run."
    table = markdown_table(["", ""], [list(row) for row in rows.items()])
    return page("A private fine-tuning run on abstracts", about, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FILE", help="texts, or a folder of packed token ids")
    parser.add_argument(
        "--model", type=input_folder, metavar="DIR", help="the folder of a BERT with a masked-token head"
    )
    parser.add_argument("--steps", type=at_least(2), default=2000, help="training steps (default: 2000)")
    parser.add_argument("--batch", type=at_least(1), default=2048, help="texts per step (default: 2048)")
    add_device(parser)
    parser.add_argument(
        "--tokens", type=at_least(1), default=2**17, help="most tokens of a part, with padding (default: 131072)"
    )
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    options.graphs = options.device == "cuda"
    if not options.earlier and (options.data is None or options.model is None):
        parser.error("give --data and --model, or --from for an earlier run")

    def measure() -> dict[str, Any]:
        with one_line_errors(parser):
            run = set_up(options)
        done = train(run, options.device, options.steps)
        return found_in(options, run, done, done.seconds())

    measure_or_read(parser, options, measure, markdown, "planned_steps", "padded", needs=["transformers"])


if __name__ == "__main__":
    main()
