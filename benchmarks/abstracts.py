"""A whole private fine-tuning run of BERT-Tiny on arXiv abstracts of their own lengths, timed.

    python benchmarks/abstracts.py --data DIR --model DIR --steps 2000 --batch 2048
    python benchmarks/abstracts.py --data DIR --model DIR --only-time 100 --write FILE     the first 100 steps alone

DIR of the data has files train*.u16.xz: xz of little-endian uint16 token ids, each abstract closed by 102 ([SEP]).
[CLS] is put in front. Of each abstract 15 % of the tokens are masked (80 % [MASK], 10 % another, 10 % as they are),
anew in every step, from a fixed seed; its loss is the mean over them. The optimizer is `scale_then_privatize` with
noise multiplier 1. A step's batch is cut by length (`lengths=`, `micro_batch_tokens=`); all tokens lie on the device,
where a part is gathered, padded and masked. Losses that are printed are not private: they are for debugging.
"""

from __future__ import annotations

import argparse
import lzma
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import dpoptim

PAD, CLS, SEP, MASK = 0, 101, 102, 103
LONGEST = 512
EVERY = 100


@dataclass(frozen=True)
class Abstracts:
    """All abstracts end to end on the device; lengths are also on the host, which plans shapes without asking it."""

    tokens: Tensor  # [tokens of all abstracts], without [CLS]
    rows: Tensor  # [examples, 3]: where it starts, its length with [CLS], how many places are masked
    lengths: NDArray[np.int64]
    masked: NDArray[np.int64]


def read_abstracts(files: list[Path], device: str) -> Abstracts:
    tokens = np.concatenate([np.frombuffer(lzma.decompress(file.read_bytes()), "<u2") for file in files])
    ends = np.flatnonzero(tokens == SEP) + 1
    lengths = np.minimum(np.diff(ends, prepend=0) + 1, LONGEST)
    words = np.maximum(lengths - 2, 0)  # all but [CLS] and [SEP]
    masked = np.minimum(np.maximum(np.rint(0.15 * words).astype(np.int64), 1), words)
    rows = np.stack([np.concatenate([[0], ends[:-1]]), lengths, masked], axis=1)
    return Abstracts(
        torch.from_numpy(tokens.astype(np.int32)).to(device), torch.from_numpy(rows).to(device), lengths, masked
    )


class Part(NamedTuple):
    ids: Tensor  # [examples, width], masked
    attends: Tensor  # [examples, 1, 1, width], False at padding
    places: Tensor  # [examples, most masked places]
    labels: Tensor  # [examples, most masked places], -100 where an example has fewer
    masked: Tensor  # [examples]


def made_part(
    abstracts: Abstracts, indices: Tensor, width: int, most: int, vocabulary: int, generator: torch.Generator
) -> Part:
    """Gather, pad and mask the abstracts `indices` on their device; no number goes back to the host."""
    device = abstracts.tokens.device
    start, length, masked = abstracts.rows[indices.to(device, non_blocking=True)].unbind(1)
    where = torch.arange(width, device=device)
    real = where < length[:, None]
    sources = (start[:, None] + where - 1).clamp_(0, len(abstracts.tokens) - 1)
    ids = abstracts.tokens[sources].long().masked_fill_(~real, PAD)
    ids[:, 0] = CLS
    words = (where > 0) & (where < length[:, None] - 1)
    order = torch.rand(ids.shape, device=device, generator=generator).masked_fill_(~words, -1.0)
    places = order.topk(most, dim=1).indices
    own = ids.gather(1, places)
    counts = torch.arange(most, device=device) < masked[:, None]
    fate = torch.rand(own.shape, device=device, generator=generator)
    other = torch.randint(0, vocabulary, own.shape, device=device, generator=generator)
    shown = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, other, own))
    return Part(
        ids=ids.scatter_(1, places, torch.where(counts, shown, own)),
        attends=real[:, None, None],
        places=places,
        labels=own.masked_fill(~counts, -100),
        masked=masked,
    )


class MaskedLM(nn.Module):
    """BERT that looks at its masked positions alone behind the encoder; gives one loss an example."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        from transformers import BertForMaskedLM

        self.bert: Any = BertForMaskedLM.from_pretrained(
            folder, dtype=dtype, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )

    def forward(self, part: Part) -> Tensor:
        head = self.bert.cls.predictions
        hidden = self.bert.bert(part.ids, attention_mask=part.attends).last_hidden_state
        chosen = hidden.gather(1, part.places[..., None].expand(-1, -1, hidden.shape[-1]))
        losses = dpoptim.linear_cross_entropy(head.decoder, head.transform(chosen), part.labels)
        return losses.sum(1) / part.masked.clamp(min=1)


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
        self.loss, self.examples = self.loss + losses.detach().float().sum(), self.examples + len(losses)

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


def train(options: argparse.Namespace, abstracts: Abstracts) -> Progress:
    device = options.device
    model = MaskedLM(options.model, torch.bfloat16 if device == "cuda" else torch.float32).to(device).train()
    vocabulary = model.bert.config.vocab_size
    plan = dpoptim.PrivacyPlan(
        num_examples=len(abstracts.lengths), batch_size=options.batch, steps=options.steps,
        sampling=dpoptim.Shuffled(), noise_multiplier=1.0,
    )  # fmt: skip

    def shape(rows: list[int]) -> tuple[Tensor, int, int, int]:
        """A part as the device needs it: indices, width, most masked places; and its tokens, for the record."""
        indices = np.array(rows)
        lengths = abstracts.lengths[indices]
        width = -(-int(lengths.max()) // options.bucket) * options.bucket
        return torch.from_numpy(indices), min(width, LONGEST), int(abstracts.masked[indices].max()), int(lengths.sum())

    loader = dpoptim.private_loader(
        cast(Any, range(len(abstracts.lengths))), plan, lengths=abstracts.lengths, micro_batch_tokens=options.tokens,
        bucket=options.bucket, collate_fn=shape, pin_memory=device == "cuda",
        # A known key, so that every run meets the same batches: a shuffled order need not be secret, the noise must.
        key=dpoptim.NoiseKey.from_bytes(bytes(32)), run_id="abstracts",
    )  # fmt: skip
    optimizer = dpoptim.scale_then_privatize(model, plan, lr=options.lr)
    generator = torch.Generator(device).manual_seed(0)
    last = min(options.only_time or options.steps, options.steps)
    progress = Progress(torch.cuda.synchronize if device == "cuda" else lambda: None)
    for indices, width, most, tokens in loader:
        losses = model(made_part(abstracts, indices, width, most, vocabulary, generator))
        losses.sum().backward()
        optimizer.step()
        progress.add(losses, tokens=tokens, padded=len(indices) * width)
        if not loader.step_ends:
            continue
        progress.steps += 1
        if progress.steps == min(10, last // 2):
            progress.warm_steps, progress.warm_seconds = progress.steps, progress.seconds()
        if progress.steps % EVERY == 0 or progress.steps == last:
            progress.show()
        if progress.steps == last:
            break
    return progress


def report(options: argparse.Namespace, examples: int, done: Progress, seconds: float) -> str:
    cuda = options.device == "cuda"
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    a_step = (seconds - done.warm_seconds) / (done.steps - done.warm_steps)
    rows = {
        "steps done": f"{done.steps} of {options.steps}, {options.batch} abstracts each, {examples:,} in all",
        "seconds, start of the first step to the end of the last": f"{seconds:.1f}",
        f"ms a step, without the first {done.warm_steps}": f"{1e3 * a_step:.1f}",
        f"seconds for {options.steps} steps at that pace": f"{a_step * options.steps:.0f}",
        "tokens, padding not counted": f"{done.tokens:,} ({done.tokens / seconds:,.0f} a second)",
        "padding": f"{100 * done.padding_share:.1f} % of what was computed",
        "parts a step": f"{done.parts / done.steps:.1f} (up to {options.tokens:,} tokens, bucket {options.bucket})",
        "peak memory of the GPU": f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GB" if cuda else "none used",
    }
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    head = f"{date.today()}, commit {asked.stdout.strip() or 'unknown'}, {machine}, Python {platform.python_version()}"
    made = f"{head}, {versions}; made by `python benchmarks/abstracts.py`, which says what is run."
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join(["# A private fine-tuning run on abstracts", "", made, "", *table, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="has train*.u16.xz, also further down")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="for BertForMaskedLM.from_pretrained")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=2048, help="abstracts a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=2**20, metavar="N", help="most tokens of a part, with padding")
    parser.add_argument("--bucket", type=int, default=64, help="widths are multiples of this")
    parser.add_argument("--files", type=int, metavar="K", help="read the first K files alone")
    parser.add_argument("--only-time", type=int, metavar="STEPS", help="end after so many steps of the plan")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the figures as markdown")
    options = parser.parse_args()
    files = sorted(options.data.rglob("train*.u16.xz"))[: options.files]
    if not files:
        parser.error(f"--data {options.data} has no file train*.u16.xz")
    abstracts = read_abstracts(files, options.device)
    print(f"{len(abstracts.lengths):,} abstracts of {abstracts.lengths.mean():.0f} tokens from {len(files)} files")
    done = train(options, abstracts)
    text = report(options, len(abstracts.lengths), done, done.seconds())
    print(text)
    if options.write:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
