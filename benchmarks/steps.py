"""Time and memory of a training step: private, the same code without privacy, and plain PyTorch, in one process.

    python benchmarks/steps.py                          on the GPU where there is one, else on the CPU
    python benchmarks/steps.py --only gpt2 --repeats 30
    python benchmarks/steps.py --write FILE             also as markdown, with machine and versions

A step is forward, backward, clipping, noise and update of one batch. "plain" is the loss as one would write it, in
eager PyTorch with torch.optim.Adam; "off" is our fused loss with torch.optim.Adam and no privacy; "flat" is
`post_processing`, "scaled" is `scale_then_privatize`. Times are medians over the repeats; memory is the peak, over that
of "off".
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import dpoptim

WAYS = ("plain", "off", "flat", "scaled")
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its batch, and its loss an example in two ways: as one would write it, and with our fused loss."""

    name: str
    device: str
    dtype: torch.dtype
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    plain_loss: Callable[[Any, Batch], Tensor]
    loss: Callable[[Any, Batch], Tensor]


def flat_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of each example, from stored logits; flat, as a class axis in the middle is slow."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return losses.view(labels.shape).mean(1)


class MaskedLM(nn.Module):
    """BERT that looks at its masked positions alone behind the encoder."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        self.bert = BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes))

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        hidden = self.bert.bert(ids).last_hidden_state
        chosen = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        return self.bert.cls.predictions.transform(chosen)


def masked_batch(examples: int, positions: int, masked: int, vocabulary: int, device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, vocabulary, (examples, positions), generator=generator)
    places = torch.rand(examples, positions, generator=generator).argsort(1)[:, :masked]
    labels = ids.gather(1, places)
    return ids.scatter(1, places, 103).to(device), places.to(device), labels.to(device)


def bert_tiny(device: str, examples: int, positions: int) -> Case:
    masked = round(0.15 * positions)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}

    def plain(model: Any, batch: Batch) -> Tensor:
        logits = model.bert.cls.predictions.decoder(model(batch[0], batch[1]))
        return flat_cross_entropy(logits, batch[2])

    def fused(model: Any, batch: Batch) -> Tensor:
        hidden = model(batch[0], batch[1])
        return dpoptim.linear_cross_entropy(model.bert.cls.predictions.decoder, hidden, batch[2]).mean(1)

    return Case(
        name=f"BERT-Tiny {examples}x{positions}",
        device=device,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        model=lambda: MaskedLM(**sizes),
        batch=lambda: masked_batch(examples, positions, masked, 30522, device),
        plain_loss=plain,
        loss=fused,
    )


def gpt2(device: str, examples: int, positions: int, *, lora: bool = False) -> Case:
    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        made = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        if lora:
            from peft import LoraConfig, get_peft_model

            return get_peft_model(
                made, LoraConfig(r=16, target_modules=["c_attn"], fan_in_fan_out=True)
            ).base_model.model
        return made

    def batch() -> Batch:
        ids = torch.randint(0, 50257, (examples, positions + 1), generator=torch.Generator().manual_seed(0)).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def plain(model: Any, batch: Batch) -> Tensor:
        logits = model(batch[0]).logits
        return flat_cross_entropy(logits, batch[1])

    def fused(model: Any, batch: Batch) -> Tensor:
        hidden = model.transformer(batch[0]).last_hidden_state
        return dpoptim.linear_cross_entropy(model.lm_head, hidden, batch[1]).mean(1)

    name = f"GPT-2 {examples}x{positions}" + (" LoRA r=16" if lora else "")
    return Case(name, device, torch.bfloat16, model, batch, plain, plain if lora else fused)


def vit(device: str, examples: int) -> Case:
    def model() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(ViTConfig(num_labels=100))

    def batch() -> Batch:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(examples, 3, 224, 224, generator=generator).to(device, torch.bfloat16)
        return images, torch.randint(0, 100, (examples,), generator=generator).to(device)

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).logits.float(), batch[1], reduction="none")

    return Case(f"ViT-B/16 {examples}", device, torch.bfloat16, model, batch, loss, loss)


def cases(device: str) -> list[Case]:
    if device == "cpu":
        return [bert_tiny("cpu", 32, 128)]
    return [
        bert_tiny("cuda", 2048, 512),
        bert_tiny("cuda", 256, 512),
        gpt2("cuda", 8, 1024),
        gpt2("cuda", 64, 128),
        gpt2("cuda", 8, 1024, lora=True),
        vit("cuda", 64),
    ]


def steps_of(case: Case, way: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = case.model().to(case.device, case.dtype)
    batch = case.batch()
    size = len(batch[0])
    if way in ("plain", "off"):
        loss = case.plain_loss if way == "plain" else case.loss
        adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4, foreach=True)

        def ordinary() -> None:
            loss(model, batch).mean().backward()
            adam.step()
            adam.zero_grad()

        return ordinary
    plan = dpoptim.PrivacyPlan(num_examples=1000 * size, batch_size=size, steps=10_000, noise_multiplier=1.0)
    make = dpoptim.post_processing if way == "flat" else dpoptim.scale_then_privatize
    optimizer = make(model, plan, lr=1e-4, own_batches=True)

    def private() -> None:
        case.loss(model, batch).sum().backward()
        optimizer.step()

    return private


def measured(case: Case, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wait = torch.cuda.synchronize if case.device == "cuda" else lambda: None
    for way in WAYS:
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            step, times = steps_of(case, way), []
            for repeat in range(repeats + 3):
                wait()
                start = time.perf_counter()
                step()
                wait()
                if repeat >= 3:
                    times.append(1e3 * (time.perf_counter() - start))
            found[way] = statistics.median(times)
        except (RuntimeError, ValueError, ImportError) as error:
            found[way] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        if case.device == "cuda":
            found[f"{way} GB"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def row_of(case: Case, found: dict[str, Any]) -> list[str]:
    off = found["off"]
    cells = [case.name]
    for way in WAYS:
        cells.append(f"{found[way]:.1f}" if isinstance(found[way], float) else str(found[way]))
    for way in ("flat", "scaled"):
        both = isinstance(found[way], float) and isinstance(off, float)
        cells.append(f"{found[way] / off:.2f}" if both else "-")
    memory = f"{found['scaled GB'] / found['off GB']:.2f}" if "off GB" in found else "-"
    return [*cells, memory]


TITLES = ["case", "plain, ms", "off, ms", "flat, ms", "scaled, ms", "flat/off", "scaled/off", "memory scaled/off"]


def markdown(rows: list[list[str]], device: str, repeats: int) -> str:
    def installed(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} not installed"

    machine = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = [
        "# Time of a training step",
        "",
        f"{date.today()}, commit {done.stdout.strip() or 'unknown'}, {machine}, Python {platform.python_version()}, "
        + ", ".join(installed(name) for name in ("torch", "triton", "transformers"))
        + f". Medians of {repeats} steps; made by `python benchmarks/steps.py`, which says what is measured.",
        "",
        "| " + " | ".join(TITLES) + " |",
        "|" + "---|" * len(TITLES),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name has TEXT in it")
    parser.add_argument("--repeats", type=int, default=20, metavar="N")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as markdown")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console, rows = Console(width=200), []
    for case in cases(options.device):
        if options.only.lower() in case.name.lower():
            rows.append(row_of(case, measured(case, options.repeats)))
            console.print(dict(zip(TITLES, rows[-1], strict=True)))
            if options.write:
                options.write.write_text(markdown(rows, options.device, options.repeats))


if __name__ == "__main__":
    main()
