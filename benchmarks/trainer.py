"""Compare Hugging Face's Trainer with PrivateTrainer, and measure large models in a plain loop.

    python benchmarks/trainer.py                             # on the GPU if there is one, else tiny models on the CPU
    python benchmarks/trainer.py --only trainer --profile    # also show where the host's time goes
    python benchmarks/trainer.py --only 1.2B --ways off,scaled --repeats 10
    python benchmarks/trainer.py --json FILE --write FILE    # results, and markdown tables
    python benchmarks/trainer.py --only 8B --append --json FILE   # add cases to results of the same commit and machine
    python benchmarks/trainer.py --from FILE --write FILE    # redo the tables of earlier results

Cases named "trainer" run the same model, data and TrainingArguments, with bf16 and otherwise the defaults:

    stock         transformers.Trainer
    private       PrivateTrainer with PrivacyArguments(epsilon=8), which usually chooses correlated noise
    independent   the same with noise="independent" and sampling="poisson"
    command       `dpoptim train --epsilon 8`, with the same batch size on the same texts, from files

Sizes are per_device_train_batch_size x gradient_accumulation_steps x tokens. The weights are random, and the texts are
made up and have equal lengths. Nothing is saved, and the progress bar is off.

- Time of a step: each way trains twice, and the ways take turns. After the warm-up, blocks of steps are timed. Loading
  and everything else between steps is included. The GPU is synchronized only at the ends of blocks. The result is the
  median over the blocks of both trainings. A private batch has the stock batch size on average.
- First step and memory: measured in a new process, which finds the kernels that earlier trainings cached on
  disk. "first step" is the time from the call of train() to the end of the first step; in brackets, from the call of
  the constructor. Imports, model and data are not included, except for "command", which reads files of texts, loads
  the model and saves a checkpoint first. Memory is the peak of a short training.
- Host time (--profile): a new process runs `private` under cProfile. This slows Python down, so the shares matter more
  than the times. Waiting for the GPU counts for the call that waits. On a GPU, hooks of the backward pass run in a
  different thread. cProfile sees them from Python 3.12 on; in earlier versions they count for run_backward.

The other cases time a step of a loop as steps.py does, and its docstring describes the methods. "plain" uses the loss
that the model computes, "off" dpoptim's fused loss; both are without privacy. "flat", "scaled", "captured flat" and
"captured" (scaled) are private; the last two run as one CUDA graph.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib.util
import json
import math
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cases import Case, llama, masked_lm, resnet, seeded
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
from record import Found, bullets, heading, markdown_table, page, publish, read_as, save, setting, spelled
from steps import first_words, peaks, ran, timed
from torch import nn

TRAINERS = ("stock", "private", "independent", "command")
LOOPS = ("plain", "off", "flat", "scaled", "captured flat", "captured")
RATIOS = (
    *((way, "stock") for way in TRAINERS[1:]),
    *((way, "off") for way in LOOPS[2:]),
    ("scaled", "plain"),
    ("captured", "plain"),
)
TRAININGS = 2  # of each trainer
GROUPS = {  # of host time: the packages whose files count for them
    "dpoptim": ("dpoptim",),
    "torch": ("torch",),
    "triton": ("triton",),
    "transformers": ("transformers", "accelerate"),
}
TOP = 12  # rows of a profile
TitledTable = tuple[str, list[str], list[list[str]]]  # title, column titles, rows


@dataclass(frozen=True, kw_only=True)
class TrainerCase:
    """A model and its data for Hugging Face's Trainer.

    Attributes:
        sizes: per_device_train_batch_size, gradient_accumulation_steps and the tokens of a text.
        labels: The number of classes; None for a model that predicts the next token.
        examples: The size of the dataset.
        checkpointed: Whether gradient_checkpointing is on.
        warm, block: The steps before the first timed block, and the steps of a block.
    """

    model_name: str
    device: str
    model: Callable[[], nn.Module]
    sizes: tuple[int, int, int]
    vocabulary: int
    labels: int | None = None
    checkpointed: bool = False
    examples: int = 8192
    warm: int = 10
    block: int = 5
    needs: tuple[str, ...] = ("transformers", "accelerate")

    @property
    def name(self) -> str:
        kind = f"{self.model_name} checkpointed" if self.checkpointed else self.model_name
        return f"{kind} trainer {'x'.join(map(str, self.sizes))}"

    def records(self) -> list[dict[str, Any]]:
        """Return texts of equal length, as a tokenizer returns them; token 0 is padding and does not occur."""
        generator, tokens = seeded(), self.sizes[2]
        ids = torch.randint(1, self.vocabulary, (self.examples, tokens), generator=generator).tolist()
        texts: list[dict[str, Any]] = [{"input_ids": row, "attention_mask": [1] * tokens} for row in ids]
        if self.labels is not None:
            labels = torch.randint(self.labels, (self.examples,), generator=generator).tolist()
            for text, label in zip(texts, labels, strict=True):
                text["label"] = label
        return texts

    def tokenizer(self) -> Any:
        """Return a tokenizer whose words are the numbers of the tokens."""
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        names = {"[PAD]": 0, **{str(token): token for token in range(1, self.vocabulary)}}
        words = Tokenizer(WordLevel(names, unk_token="[PAD]"))
        words.pre_tokenizer = WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="1")

    def collator(self) -> Any:
        """Return the stock collator."""
        from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

        if self.labels is None:
            return DataCollatorForLanguageModeling(self.tokenizer(), mlm=False)
        return DataCollatorWithPadding(self.tokenizer())

    def write(self, folder: Path) -> None:
        """Write the model, its tokenizer and the texts to files."""
        self.model().save_pretrained(folder / "model")
        self.tokenizer().save_pretrained(folder / "model")
        with (folder / "texts.jsonl").open("w") as file:
            for record in self.records():
                text = {"text": " ".join(map(str, record["input_ids"]))}
                label = {} if self.labels is None else {"label": str(record["label"])}
                file.write(json.dumps(text | label) + "\n")


def gpt2(**sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**sizes))


def bert(**sizes: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**sizes))


def tiny_gpt2() -> nn.Module:
    return gpt2(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=1, eos_token_id=1)


def tiny_bert() -> nn.Module:
    return bert(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64)


def cases(device: str) -> list[tuple[TrainerCase | Case, tuple[str, ...]]]:
    """Return all cases with their methods; those for the CPU take seconds."""
    graphs = ("captured flat", "captured")
    eager = ("plain", "off", "flat", "scaled")
    large = (*eager, *graphs)
    fused = ("off", "flat", "scaled", *graphs)
    adapters = ("plain", "off", "scaled")
    if device == "cpu":
        few = {"device": "cpu", "sizes": (4, 2, 16), "vocabulary": 64, "examples": 256, "warm": 1, "block": 1}
        return [
            (TrainerCase(model_name="GPT-2 tiny", model=tiny_gpt2, **few), TRAINERS),
            (TrainerCase(model_name="BERT tiny", model=tiny_bert, labels=2, **few), TRAINERS),
            (TrainerCase(model_name="GPT-2 tiny", model=tiny_gpt2, checkpointed=True, **few), TRAINERS[:3]),
            (llama("cpu", "tiny", 4, 16), eager),
            (llama("cpu", "tiny", 4, 16, checkpointed=True), eager),
            (llama("cpu", "tiny", 4, 16, lora=True), adapters),
            (llama("cpu", "tiny", 4, 16, lora=True, checkpointed=True), adapters),
            (masked_lm("cpu", 8, 32, width=64, vocabulary=2048, name="BERT 2 layers"), fused[:3]),
        ]
    wide = "BERT 2 layers, vocabulary 131072"
    return [
        (TrainerCase(model_name="GPT-2", device=device, model=gpt2, sizes=(16, 4, 512), vocabulary=50257), TRAINERS),
        (
            TrainerCase(
                model_name="BERT-base", device=device, model=bert, sizes=(32, 4, 128), vocabulary=30522, labels=2
            ),
            TRAINERS,
        ),
        (
            TrainerCase(
                model_name="Llama 1.2B",
                device=device,
                model=llama(device, "1.2B", 32, 512).model,
                sizes=(32, 1, 512),
                vocabulary=32000,
                checkpointed=True,
                examples=2048,
            ),
            TRAINERS[:3],  # `dpoptim train` has no gradient checkpointing
        ),
        (llama(device, "1.2B", 8, 512), large),
        (llama(device, "1.2B", 4, 2048), large),
        (llama(device, "1.2B", 32, 512, checkpointed=True), large),
        (llama(device, "8B", 4, 1024, lora=True), adapters),
        (llama(device, "8B", 16, 1024, lora=True, checkpointed=True), adapters),
        (resnet(device, 128), fused),
        # The two points of growth.py where privacy costs most.
        (masked_lm(device, 1024, 32, width=512, vocabulary=32768, name="BERT 2 layers"), fused),
        (masked_lm(device, 1024, 256, width=512, vocabulary=131072, name=wide), fused),
    ]


def waiting(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def run_command(
    case: TrainerCase, steps: int, after_step: Callable[[int], None], before_train: Callable[[], None]
) -> tuple[float, float]:
    """Train as `dpoptim train` does, and call `after_step` with the number of steps done; return two equal times."""
    from dpoptim.app import Recipe
    from dpoptim.app import train as train_run
    from dpoptim.app.progress import ProgressReporter

    class AfterStep(ProgressReporter):
        def step(self, *, step: int, **rest: Any) -> None:
            after_step(step)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.write(folder)
        recipe = Recipe(
            model=str(folder / "model"),
            data=str(folder / "texts.jsonl"),
            task="causal-lm" if case.labels is None else "text-classification",
            epsilon=8.0,
            max_length=case.sizes[2],
            validation_fraction=0.0,
            batch_size=case.sizes[0] * case.sizes[1],
            steps=steps,
            evaluate_every=steps,
            checkpoint_every=steps,
            device=case.device,
            label_names=None if case.labels is None else tuple(map(str, range(case.labels))),
        )
        before_train()
        called = time.perf_counter()
        train_run(recipe, folder / "run", progress=AfterStep())
    return called, called


def train(
    case: TrainerCase,
    way: str,
    steps: int,
    after_step: Callable[[int], None],
    before_train: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Train a new model, and call `after_step` with the number of steps done.

    Returns:
        The times at which the constructor and train() were called, by time.perf_counter.
    """
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer

    class AfterStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            after_step(state.global_step)

    free_memory(case.device)
    torch.manual_seed(0)
    torch.zeros(1, device=case.device)  # starts the GPU
    if way == "command":
        return run_command(case, steps, after_step, before_train)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=f"{folder}/run",  # keys are saved next to it
            per_device_train_batch_size=case.sizes[0],
            gradient_accumulation_steps=case.sizes[1],
            max_steps=steps,
            bf16=True,
            gradient_checkpointing=case.checkpointed,
            use_cpu=case.device == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        given = {
            "model": case.model(),
            "args": args,
            "data_collator": case.collator(),
            "train_dataset": case.records(),
            "callbacks": [AfterStep()],
        }
        constructed = time.perf_counter()
        if way == "stock":
            trainer = Trainer(**given)
        else:
            chosen = {"noise": "independent", "sampling": "poisson"} if way == "independent" else {}
            trainer = PrivateTrainer(**given, privacy=PrivacyArguments(epsilon=8.0, **chosen))
        trainer.remove_callback(PrinterCallback)
        before_train()
        called = time.perf_counter()
        trainer.train()
    return constructed, called


def steady(case: TrainerCase, ways: Sequence[str], repeats: int, progress: Callable[[str], None]) -> Found:
    """Time blocks of steps; the ways take turns, one training each."""
    wait, found = waiting(case.device), Found()
    times: dict[str, list[float]] = {way: [] for way in ways}
    steps = case.warm + case.block * math.ceil(repeats / TRAININGS)
    for training in range(1, TRAININGS + 1):
        for way in ways:
            if way in found:
                continue
            ends: list[float] = []

            def note_end(step: int, ends: list[float] = ends) -> None:
                if step >= case.warm and (step - case.warm) % case.block == 0:
                    wait()
                    ends.append(time.perf_counter())

            try:
                train(case, way, steps, note_end)
            except Exception as error:
                found[way] = {"error": first_words(error)}
            times[way] += [1e3 * (end - start) / case.block for start, end in pairwise(ends)]
            progress(f"{case.name}, {way}: {found.get(way, {}).get('error', f'training {training} of {TRAININGS}')}")
    free_memory(case.device)
    for way in ways:
        if way not in found:
            low, middle, high = statistics.quantiles(times[way], n=4, method="inclusive")
            found[way] = {"ms": middle, "low_ms": low, "high_ms": high}
    return found


def start(case: TrainerCase, way: str) -> dict[str, float]:
    """Return the times up to the end of the first step, and the peak memory of a short training."""
    wait, ends = waiting(case.device), []

    def note_end(step: int) -> None:
        if step == 1:
            wait()
            ends.append(time.perf_counter())

    constructed, called = train(case, way, case.warm + case.block, note_end)
    times = {"first_s": ends[0] - called, "constructed_s": called - constructed}
    return times | (peaks() if case.device == "cuda" else {})


def profiles(case: TrainerCase, way: str) -> dict[str, Any]:
    """Return where the host spends its time: from train() to the end of the first step, and in a block of steps."""
    wait, first, later = waiting(case.device), cProfile.Profile(), cProfile.Profile()

    def switch(step: int) -> None:
        wait()
        if step == 1:
            first.disable()
        if step == case.warm:
            later.enable()
        if step == case.warm + case.block:
            later.disable()

    train(case, way, case.warm + case.block, switch, first.enable)
    return {"first step": summary(first, 1), "steady step": summary(later, case.block)}


def summary(profile: cProfile.Profile, steps: int) -> dict[str, Any]:
    """Return own times per step in ms: of groups of files, and of the functions with the largest."""
    groups, rows = dict.fromkeys([*GROUPS, "other"], 0.0), []
    for (file, line, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        group, where = place_of(file, line, name)
        groups[group] += 1e3 * own / steps
        rows.append({"group": group, "where": where, "ms": 1e3 * own / steps, "calls": calls / steps})
    rows.sort(key=lambda row: -row["ms"])
    return {"groups": groups, "rows": rows[:TOP]}


def place_of(file: str, line: int, name: str) -> tuple[str, str]:
    """Return the group of a function, and where it is.

    >>> place_of(torch.__file__, 12, "sum")
    ('torch', '__init__.py:12 sum')
    >>> place_of("~", 0, "<method 'item' of 'torch._C.TensorBase' objects>")
    ('torch', "<method 'item' of 'torch._C.TensorBase' objects>")
    """
    if file == "~":  # built-in
        return "torch" if "torch" in name else "other", name
    for group, packages in GROUPS.items():
        for package in packages:
            spec = importlib.util.find_spec(package)
            folder = Path(spec.origin).parent if spec and spec.origin else None
            if folder and Path(file).is_relative_to(folder):
                return group, f"{Path(file).relative_to(folder)}:{line} {name}"
    return "other", f"{Path(file).name}:{line} {name}"


def in_new_process(case: TrainerCase, way: str, *, profile: bool) -> dict[str, Any]:
    """Run `start` or `profiles` in a new process; return nothing if it fails."""
    report(f"{case.name}, {way}: {'profile' if profile else 'first step and memory'} in a new process")
    command = [sys.executable, __file__, "--device", case.device, "--only", case.name, "--job", way]
    done = subprocess.run(
        [*command, *(["--profile"] if profile else [])], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        report(f"{case.name}, {way}: the new process failed with exit status {done.returncode}")
        return {}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measured(case: TrainerCase | Case, ways: Sequence[str], repeats: int, profile: bool) -> dict[str, Any]:
    """Return the part of the record for a case."""
    if isinstance(case, Case):
        found = timed({way: (case, way) for way in ways}, repeats, report)
        return {"name": case.name, "kind": "loop", "ways": found, "ratios": ratios(found)}
    found, kept = steady(case, ways, repeats, report), {}
    for way in ways:
        if "error" not in found[way]:
            found[way] |= in_new_process(case, way, profile=False)
    if profile and "private" in ways and "error" not in found["private"]:
        kept["host"] = in_new_process(case, "private", profile=True)
    about = {"name": case.name, "kind": "trainer", "examples": case.examples, "warm": case.warm, "block": case.block}
    return {**about, "ways": found, "ratios": ratios(found), **kept}


def ratios(found: Found) -> dict[str, float]:
    """Return those of RATIOS that were measured, in time and memory."""
    given = {}
    for label, kind in (("", "ms"), ("memory ", "gb")):
        for top, bottom in RATIOS:
            if kind in found.get(top, {}) and kind in found.get(bottom, {}):
                given[f"{label}{top}/{bottom}"] = found[top][kind] / found[bottom][kind]
    return given


def cell(found: dict[str, Any]) -> str:
    """
    >>> cell({"ms": 242.04, "gb": 12.71}), cell({"ms": 3.0}), cell({})
    ('242.0 ms, 12.7 GiB', '3.0 ms', '-')
    """
    if "error" in found:
        return str(found["error"])
    parts = [f"{found[kind]:.1f} {unit}" for kind, unit in (("ms", "ms"), ("gb", "GiB")) if kind in found]
    return ", ".join(parts) or "-"


def first_cell(found: dict[str, Any]) -> str:
    if "first_s" not in found:
        return "-"
    return f"{found['first_s']:.1f} s ({found['first_s'] + found['constructed_s']:.1f} s)"


def table_of(record: dict[str, Any], kind: str) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of the cases of one kind, "trainer" or "loop"."""
    done = [case for case in record["cases"] if case["kind"] == kind]
    ways = [way for way in (*TRAINERS, *LOOPS) if any(way in case["ways"] for case in done)]
    names = [f"{label}{top}/{bottom}" for label in ("", "memory ") for top, bottom in RATIOS]
    compared = [name for name in names if any(name in case["ratios"] for case in done)]
    rows = []
    for case in done:
        row = [spelled(case["name"]), *(cell(case["ways"].get(way, {})) for way in ways)]
        row += [f"{case['ratios'][name]:.2f}" if name in case["ratios"] else "-" for name in compared]
        if kind == "trainer":
            row += [first_cell(case["ways"].get(way, {})) for way in ways]
        rows.append(row)
    firsts = [f"first step, {way}" for way in ways] if kind == "trainer" else []
    return ["case", *ways, *compared, *firsts], rows


def tables_of(record: dict[str, Any]) -> list[TitledTable]:
    kinds = {"trainer": "Trainer and PrivateTrainer", "loop": "A step of a loop"}
    present = {case["kind"] for case in record["cases"]}
    return [(title, *table_of(record, kind)) for kind, title in kinds.items() if kind in present]


def host_tables(record: dict[str, Any]) -> list[TitledTable]:
    made: list[TitledTable] = []
    for case in record["cases"]:
        for when, found in case.get("host", {}).items():
            total = sum(found["groups"].values())
            rows = [[f"all of {group}", "", f"{ms:.1f}", f"{ms / total:.0%}"] for group, ms in found["groups"].items()]
            for row in found["rows"]:
                where = row["where"] if row["group"] == "other" else f"{row['group']}: {row['where']}"
                rows.append([where, f"{row['calls']:.0f}", f"{row['ms']:.1f}", f"{row['ms'] / total:.0%}"])
            title = f"Host time of PrivateTrainer, {spelled(case['name'])}, {when}"
            made.append((title, ["where", "calls", "own time, ms", "share"], rows))
    return made


def notes(record: dict[str, Any]) -> list[str]:
    lines, done = [], record["cases"]
    trainers = [case for case in done if case["kind"] == "trainer"]
    if trainers:
        block = trainers[0]["block"]
        lines += [
            f"Trainers: medians of {record['repeats']} blocks of {block} step{'s' if block > 1 else ''}.",
            "First step: from the call of train() in a new process; in brackets, from the call of the constructor.",
        ]
    if len(trainers) < len(done):
        lines.append(f"Loops: medians of {record['repeats']} steps.")
    if any("checkpointed" in case["name"] and "captured" in case["ways"] for case in done):
        lines.append("Captured steps of checkpointed models run micro-batches of 4 texts without checkpoints.")
    if any("plain" in case["ways"] for case in done):
        lines.append(
            '"plain" uses the loss that the model computes, "off" dpoptim\'s fused loss; both are without privacy.'
        )
    if any("gb" in found for case in done for found in case["ways"].values()):
        lines.append("Memory: the peak of allocated tensors. The JSON file also has the memory that PyTorch reserved.")
    return lines


def markdown(record: dict[str, Any]) -> str:
    made = "Measured by `python benchmarks/trainer.py`; its docstring explains the columns."
    tables = [*tables_of(record), *host_tables(record)]
    parts = [part for title, titles, rows in tables for part in (f"## {title}", markdown_table(titles, rows))]
    has_trainers = any(case["kind"] == "trainer" for case in record["cases"])
    title = "The speed of trainers and large models" if has_trainers else "The speed of a step"
    return page(title, f"{heading(record)}. {made}", bullets(notes(record)), *parts)


def read(file: Path) -> dict[str, Any]:
    record = read_as(file, "trainer.py", "repeats", "cases")
    if any("kind" not in case for case in record["cases"]):
        raise ValueError(f"{file} was not written by trainer.py --json: a case lacks 'kind'")
    return record


def cases_to_keep(record: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    """Return the cases of an earlier file; raise ValueError if they were measured in a different setting."""
    earlier = read(file)
    for key in ("commit", "machine", "versions", "repeats"):
        if earlier[key] != record[key]:
            raise ValueError(f"{file} has {key} {earlier[key]}, not {record[key]}. Write to a new file.")
    kept: list[dict[str, Any]] = earlier["cases"]
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only the cases whose name contains TEXT, such as 1.2B"
    )
    parser.add_argument("--ways", metavar="A,B", help="only these methods, separated by commas")
    parser.add_argument(
        "--repeats",
        type=at_least(2),
        default=20,
        metavar="N",
        help="timed steps, or blocks of steps of a trainer (default: 20)",
    )
    parser.add_argument("--profile", action="store_true", help="also profile PrivateTrainer")
    parser.add_argument("--append", action="store_true", help="keep the other cases of the --json file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    asked = options.ways.split(",") if options.ways else [*TRAINERS, *LOOPS]
    if unknown := [way for way in asked if way not in (*TRAINERS, *LOOPS)]:
        parser.error(f"unknown method {unknown[0]!r} in --ways; choose from {', '.join((*TRAINERS, *LOOPS))}")
    named = [(case, ways) for case, ways in cases(options.device) if options.only.lower() in case.name.lower()]
    if not named:
        names = "; ".join(case.name for case, _ in cases(options.device))
        parser.error(f"no case matches --only {options.only}; choose from {names}")
    chosen = [(case, kept) for case, ways in named if (kept := [way for way in ways if way in asked])]
    if not chosen:
        parser.error(f"no case that matches --only {options.only} has the methods {options.ways}")
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers is not imported yet
    if options.job:
        case = named[0][0]
        print(json.dumps(profiles(case, options.job) if options.profile else start(case, options.job)))
        return 0
    if options.earlier:
        with one_line_errors(parser):
            record, chosen = read(options.earlier), []
    else:
        if all(missing_packages(case.needs) for case, _ in chosen):
            require_packages(parser, *dict.fromkeys(name for case, _ in chosen for name in case.needs))
        record = setting(options.device, options.commit) | {"repeats": options.repeats, "cases": []}
        if options.append:
            if not options.json:
                parser.error("--append needs --json")
            with one_line_errors(parser):
                record["cases"] = cases_to_keep(record, options.json) if options.json.exists() else []
    order = [case.name for case, _ in cases(options.device)]
    for case, ways in chosen:
        if missing := missing_packages(case.needs):
            report(f"skipping {case.name}, which needs {with_pip(missing)}")
            continue
        others = [done for done in record["cases"] if done["name"] != case.name]
        new = measured(case, ways, options.repeats, options.profile)
        record["cases"] = sorted([*others, new], key=lambda done: order.index(done["name"]))
        if options.json:
            save(record, options.json)
    publish(options, markdown(record))
    return 0 if ran(record) else 1


if __name__ == "__main__":
    sys.exit(main())
