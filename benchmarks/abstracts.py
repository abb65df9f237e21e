"""A whole private fine-tuning run of BERT-Tiny on texts of their own lengths, such as abstracts of arXiv, timed.

    python benchmarks/abstracts.py --data FILE --model DIR --steps 200 --batch 256
    python benchmarks/abstracts.py --data DIR --model DIR --only-time 100 --write FILE     the first 100 steps alone
    python benchmarks/abstracts.py --data DIR --model DIR --json FILE --write FILE         for the record

The data are any texts: a .jsonl, .csv or .txt file (or another source that `dpoptim.app.read_records` takes),
cut into tokens by the tokenizer beside the model, or a folder of packed ids, which the figures of abstracts.md come
from (`experiments.tinybert.data` describes it); tokens that were cut are kept in a folder beside the data.
The model is the folder of a BERT with its head for masked tokens. Of each text 15 % of the tokens are masked (80 %
[MASK], 10 % another, 10 % as they are), anew in every step, from a fixed seed; its loss is the mean over them. The
optimizer is `scale_then_privatize` with noise multiplier 1. A step's batch is cut by length (`lengths=`,
`micro_batch_tokens=`); all tokens lie on the device, where a part is gathered, padded and masked. On a GPU a part runs
as one CUDA graph (`optimizer.captured`). Losses that are printed are not private: they are for debugging.
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
from options import a_folder, add_device, add_files, need_packages, positive, told_in_one_line, whole
from record import heading, markdown_table, read_as, save, setting
from torch import Tensor

import dpoptim
from dpoptim.clipping.captured import Captured
from dpoptim.data.lengths import part_multiple
from experiments.tinybert.data import Indices, Part, Texts, laid_out, make_part, read_corpus
from experiments.tinybert.model import MaskedLM, load

LONGEST = 512
EVERY = 100


@dataclass
class Progress:
    """What was done, kept on the host; the sum of losses stays on the device until it is printed."""

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
            f"{100 * self.padding_share:.1f} % padding, {self.parts / self.steps:.1f} parts a step, "
            f"mean loss since the last line {loss:.4f} (not private: for debugging)",
            flush=True,
        )

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.padded


@dataclass(frozen=True)
class Run:
    """What a run needs, made before anything is timed, so that a wrong setting is told at once."""

    model: MaskedLM
    texts: Texts
    loader: dpoptim.PrivateLoader
    optimizer: Any
    differentiate: Callable[[Part], Tensor]  # the losses of a part, after its backward
    steps: int  # that are done, of those that are planned


def set_up(options: argparse.Namespace) -> Run:
    """ValueError or OSError for data, a model or settings that do not go together."""
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    model = load(options.model, dtype=dtype).to(device).train()
    longest = min(LONGEST, model.bert.config.max_position_embeddings)
    corpus = read_corpus(
        str(options.data), options.model, longest=longest, cache=options.data.parent, files=options.files_read
    )
    texts = laid_out(corpus.train, corpus.marks, longest, device)
    print(f"{len(texts.lengths):,} texts of {texts.lengths.mean():.0f} tokens from {options.data}")
    if options.batch > len(texts.lengths):
        raise ValueError(f"--batch {options.batch} is more than the {len(texts.lengths)} texts; take a smaller one")
    plan = dpoptim.PrivacyPlan(
        num_examples=len(texts.lengths), batch_size=options.batch, steps=options.steps,
        sampling=dpoptim.Shuffled(), noise_multiplier=1.0,
    )  # fmt: skip

    def shape(rows: list[int]) -> tuple[Tensor, int, int, int]:
        """A part as the device needs it: indices, width, most masked places; and its tokens, for the record."""
        return texts.part(np.array(rows), bucket=options.bucket, longest=longest)

    loader = dpoptim.private_loader(
        Indices(len(texts)), plan, lengths=texts.lengths, micro_batch_tokens=options.tokens,
        bucket=options.bucket, collate_fn=shape, pin_memory=device == "cuda",
        # A known key, so that every run meets the same batches: a shuffled order need not be secret, the noise must.
        key=dpoptim.NoiseKey.from_bytes(bytes(32)), run_id="abstracts",
    )  # fmt: skip
    optimizer = dpoptim.scale_then_privatize(model, plan, lr=options.lr)

    def ordinary(part: Part) -> Tensor:
        losses: Tensor = model(part)
        losses.sum().backward()
        return losses.detach()

    graphs = optimizer.captured(model, pad_to_multiple=part_multiple(options.batch))
    differentiate = graphs if options.graphs else ordinary
    return Run(model, texts, loader, optimizer, differentiate, min(options.only_time or options.steps, options.steps))


def train(run: Run, device: str) -> Progress:
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
        if progress.steps == min(10, run.steps // 2):
            progress.warm_steps, progress.warm_seconds = progress.steps, progress.seconds()
        if progress.steps % EVERY == 0 or progress.steps == run.steps:
            progress.show()
        if progress.steps == run.steps:
            break
    return progress


def found_in(options: argparse.Namespace, run: Run, done: Progress, seconds: float) -> dict[str, Any]:
    """The figures of a run with their setting, for --json."""
    graphs = run.differentiate.graphs if isinstance(run.differentiate, Captured) else 0
    return setting(options.device, options.commit) | {
        "planned_steps": options.steps,
        "batch": options.batch,
        "examples": len(run.texts.lengths),
        "most_tokens": options.tokens,
        "bucket": options.bucket,
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
        "seconds, start of the first step to the end of the last": f"{seconds:.1f}",
        f"ms a step, without the first {record['warm_steps']}": f"{1e3 * a_step:.1f}",
        f"seconds for {planned} steps at that pace": f"{a_step * planned:.0f}",
        "tokens, padding not counted": f"{record['tokens']:,} ({record['tokens'] / seconds:,.0f} a second)",
        "padding": f"{padding:.1f} % of what was computed",
        "parts a step": f"{record['parts'] / steps:.1f} (up to {record['most_tokens']:,} tokens, "
        f"bucket {record['bucket']})" + (", each one CUDA graph" if record.get("graphs") else ""),
        "peak memory of the GPU": "none used" if record["gb"] is None else f"{record['gb']:.1f} GB",
    }
    lines = [
        "# A private fine-tuning run on abstracts",
        "",
        f"{heading(record)}; made by `python benchmarks/abstracts.py`, which says what is run.",
        "",
        *markdown_table(["", ""], [list(row) for row in rows.items()]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FILE", help="texts, or a folder with train*.u16.xz (see above)")
    parser.add_argument("--model", type=a_folder, metavar="DIR", help="for BertForMaskedLM.from_pretrained")
    parser.add_argument("--steps", type=whole(2), default=2000, help="that are planned (2000)")
    parser.add_argument("--batch", type=whole(1), default=2048, help="texts a step (2048)")
    parser.add_argument("--lr", type=positive, default=1e-3, help="learning rate (0.001)")
    add_device(parser)
    parser.add_argument(
        "--tokens",
        type=whole(1),
        metavar="N",
        help="most tokens of a part, with padding (default: 2^17, and 2^20 without graphs, where parts take longer)",
    )
    parser.add_argument(
        "--no-graphs", dest="graphs", action="store_false", help="launch every operation by itself, on a GPU too"
    )
    parser.add_argument("--bucket", type=whole(1), default=64, help="widths are multiples of this (64)")
    parser.add_argument(
        "--files", dest="files_read", type=whole(1), metavar="K", help="of packed files read the first K alone"
    )
    parser.add_argument("--only-time", type=whole(2), metavar="STEPS", help="end after so many steps of the plan")
    add_files(parser)
    options = parser.parse_args()
    options.graphs = options.graphs and options.device == "cuda"
    options.tokens = options.tokens or (2**17 if options.graphs else 2**20)
    if options.files:
        with told_in_one_line(parser):
            record = read_as(options.files[0], "abstracts.py", "planned_steps", "padded")
        if len(options.files) > 1:
            parser.error("--from takes one file: a run is not put together of several")
    else:
        if options.data is None or options.model is None:
            parser.error("--data and --model are needed to measure; --from reads an earlier run")
        need_packages(parser, "transformers")
        with told_in_one_line(parser):
            run = set_up(options)
        done = train(run, options.device)
        record = found_in(options, run, done, done.seconds())
    text = markdown(record)
    print(text, end="")
    if options.json:
        save(record, options.json)
    if options.write:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
