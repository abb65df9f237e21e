"""Private text generation on real texts: abstracts of four subjects by a small GPT-2 that learned them privately.

    python benchmarks/synthetic_abstracts.py --abstracts TRAIN --test TEST --tokenizer FOLDER --work OUT
    python benchmarks/synthetic_abstracts.py --tiny --tokenizer FOLDER --work OUT    # made-up texts, on a CPU
    python benchmarks/synthetic_abstracts.py --from FILE --write FILE    # redo the page of earlier results

1. A GPT-2 of 8 layers learns from abstracts of other subjects, without privacy. It stands for a public model.
2. `dpoptim train` fine-tunes it on abstracts of the four subjects, with the subject in the prompt, once per epsilon.
3. `dpoptim generate` writes synthetic abstracts, and `dpoptim evaluate-synthetic` compares them with held-out ones.

A subject is a list of words, such as "galaxy" and "telescope". Abstracts with words of one subject are private, those
with words of none are public, and the others are left out. Files hold ids of WordPiece tokens as 16-bit numbers, each
abstract ending with [SEP]; files that end with .xz are compressed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from options import add_device, add_json, add_write, input_file, input_folder, report
from record import bullets, heading, markdown_table, measure_or_read, page, save, setting
from tokenizers import decoders

from dpoptim.app import Recipe, evaluate_synthetic, generate, read_log, train

SUBJECTS = {
    "astronomy": r"galax|stellar|supernova|telescope|redshift",
    "quantum physics": r"quantum|qubit|entangle",
    "machine learning": r"neural network|machine learning|deep learning|reinforcement learning",
    "mathematics": r"\btheorem|\bprove\b|conjecture|algebra|manifold",
}
PROMPT = "{label} :"
LENGTH = 128  # tokens of private texts, with the prompt
Tokens = np.ndarray[Any, np.dtype[np.uint16]]


def abstracts_of(file: Path, end: int, most: int | None) -> list[Tokens]:
    """The token ids of each abstract of a file, without its end."""
    content = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
    tokens = np.frombuffer(content, "<u2")
    return [part[:-1] for part in np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]][:most]


def made_up(tokenizer: Any, count: int, seed: int) -> list[Tokens]:
    """Short sentences with words of one subject or none, as token ids."""
    names = ["galaxy", "quantum", "theorem", "river", "river", "river"]
    generator = np.random.default_rng(seed)
    texts = [
        " . ".join(f"we study the {names[place]} of {generator.integers(100)} birds" for place in row)
        for row in generator.integers(0, len(names), (count, 2))
    ]
    return [np.array(ids, np.uint16) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def divided(tokenizer: Any, abstracts: list[Tokens]) -> tuple[list[Tokens], list[dict[str, str]]]:
    """Abstracts of no subject, as tokens, and those of one subject, as texts with labels."""
    public, private = [], []
    texts = tokenizer.batch_decode(abstracts, clean_up_tokenization_spaces=False)
    for tokens, text in zip(abstracts, texts, strict=True):
        subjects = [name for name, words in SUBJECTS.items() if re.search(words, text)]
        if not subjects:
            public.append(tokens)
        elif len(subjects) == 1:
            private.append({"label": subjects[0], "text": text})
    return public, private


def public_model(tokenizer: Any, public: list[Tokens], options: argparse.Namespace) -> tuple[Any, float]:
    """A GPT-2 that has learned public abstracts, and its last loss: the mean over 50 steps."""
    width, layers, size, length = (64, 2, 16, 64) if options.tiny else (512, 8, 256, 256)
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(tokenizer), n_embd=width, n_layer=layers, n_head=width // 64, n_positions=length,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=end, eos_token_id=end, pad_token_id=0,
        )
    ).to(options.device)  # fmt: skip
    tokens = torch.from_numpy(np.concatenate([part for text in public for part in (text, [end])]).astype(np.int64))
    rows = tokens[: len(tokens) // length * length].view(-1, length).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    steps, losses = options.pretraining_steps or (100 if options.tiny else 1500), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min((step + 1) / (0.05 * steps), 1, (steps - step) / (0.3 * steps))
        batch = rows[torch.randint(len(rows), (size,), device=options.device)]
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if (step + 1) % max(1, steps // 5) == 0:
            report(f"public model: step {step + 1} of {steps}, loss {float(losses[-1]):.3f}")
    return model, float(torch.stack(losses[-50:]).mean())


def write_rows(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def measure(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.tokenizer)
    tokenizer.eos_token, tokenizer.pad_token = tokenizer.sep_token, tokenizer.pad_token or tokenizer.sep_token
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    end, work = tokenizer.eos_token_id, options.work
    work.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        some, others = made_up(tokenizer, 600, 0), made_up(tokenizer, 200, 1)
    else:
        some, others = (abstracts_of(file, end, options.most) for file in (options.abstracts, options.test))
    public, private = divided(tokenizer, some)
    held_out = divided(tokenizer, others)[1]
    report(f"{len(public):,} public abstracts, {len(private):,} private and {len(held_out):,} held out")
    files = write_rows(work / "train.jsonl", private), write_rows(work / "test.jsonl", held_out)

    record = {**setting(options.device, options.commit), "note": options.note, "runs": []}
    started = time.perf_counter()
    model, loss = public_model(tokenizer, public, options)
    record["public"] = {
        "abstracts": len(public), "private": len(private), "held_out": len(held_out), "loss": loss,
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": time.perf_counter() - started,
    }  # fmt: skip
    model.save_pretrained(work / "public")
    tokenizer.save_pretrained(work / "public")
    for epsilon in options.epsilons:
        record["runs"].append(one_run(epsilon, files, len({row["label"] for row in private}), options))
        if options.json:
            save(record, options.json)
    return record


def one_run(epsilon: float, files: tuple[Path, Path], subjects: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train, generate and compare at one epsilon."""
    run, synthetic = options.work / f"epsilon_{epsilon:g}", options.work / f"synthetic_{epsilon:g}.jsonl"
    recipe = Recipe(
        model=str(options.work / "public"), data=str(files[0]), validation_data=str(files[1]), prompt_template=PROMPT,
        epsilon=epsilon, max_length=48 if options.tiny else LENGTH, lora_rank=options.lora_rank, device=options.device,
        schedule="linear", **({"lora_targets": ["all-linear"]} if options.lora_rank else {}), **options.settings,
    )  # fmt: skip
    started = time.perf_counter()
    summary = train(recipe, run)
    trained = time.perf_counter()
    num = options.each * subjects
    generate(run, synthetic, by="label", num=num, batch_size=500, device=options.device)
    generated = time.perf_counter()
    scores = evaluate_synthetic(synthetic, *files).to_dict()
    losses = [entry["loss"] for entry in read_log(run / "log.jsonl") if entry["kind"] == "evaluation"]
    rows = [json.loads(line) for line in synthetic.read_text(encoding="utf-8").splitlines()]
    first = {
        label: next(row["text"] for row in rows if row["label"] == label)
        for label in dict.fromkeys(r["label"] for r in rows)
    }
    found = {
        "epsilon": epsilon, "guarantee": summary["guarantee"], "losses": losses, "texts": num, "scores": scores,
        "first": first, "seconds": {"train": trained - started, "generate": generated - trained,
                                    "compare": time.perf_counter() - generated},
    }  # fmt: skip
    report(f"epsilon {epsilon:g}: loss {losses[0]:.3f} to {losses[-1]:.3f}, accuracy {scores['accuracy']}")
    return found


def markdown(record: dict[str, Any]) -> str:
    public = record["public"]
    sources = ("synthetic", "training", "most common label")
    rows = [
        [
            f"{run['epsilon']:g}", f"{run['losses'][0]:.3f}", f"{run['losses'][-1]:.3f}",
            *(f"{100 * run['scores']['accuracy'][source]:.1f} %" for source in sources),
            *(f"{run['scores']['copies'][name]['near']} of {run['scores']['copies'][name]['texts']:,}"
              for name in ("synthetic", "test")),
            " + ".join(f"{run['seconds'][part]:.0f}" for part in ("train", "generate", "compare")),
        ]
        for run in record["runs"]
    ]  # fmt: skip
    titles = [
        "ε", "loss before", "after", "accuracy, trained on synthetic", "on real", "most common subject",
        "near copies, synthetic", "held out", "seconds",
    ]  # fmt: skip
    shown = record["runs"][-1]
    return page(
        "Synthetic abstracts",
        f"{heading(record)}. By `python benchmarks/synthetic_abstracts.py`; its docstring explains the steps.",
        f"{public['private']:,} private abstracts of four subjects, {public['held_out']:,} held out. The public "
        f"model has {public['parameters'] / 1e6:.0f} million parameters and learned {public['abstracts']:,} abstracts "
        f"of other subjects in {public['seconds']:.0f} s, to a loss of {public['loss']:.2f}.",
        markdown_table(titles, rows),
        bullets(
            [
                "Losses are of held-out abstracts: means over tokens, then over texts. The classifier counts words.",
                f"The seconds are those of training, generating and comparing. {record['note']}".rstrip(),
                f"{shown['guarantee']}; adjacency zero-out (one abstract becomes a blank), shuffled, closed form.",
            ]
        ),
        f"The first synthetic abstract of each subject at ε = {shown['epsilon']:g}:",
        "\n>\n".join(f"> **{label}:** {text}" for label, text in shown["first"].items()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--abstracts", type=input_file, metavar="FILE", help="public and private abstracts")
    parser.add_argument("--test", type=input_file, metavar="FILE", help="held-out abstracts")
    parser.add_argument("--most", type=int, metavar="N", help="read only so many of each file")
    parser.add_argument("--tokenizer", type=input_folder, metavar="FOLDER", help="the tokenizer of the files")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="for the models, texts and runs")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 8.0], metavar="X", help="(default: 1 8)")
    parser.add_argument(
        "--each", type=int, default=1000, metavar="N", help="synthetic texts per subject (default: 1000)"
    )
    parser.add_argument("--pretraining-steps", type=int, metavar="N", help="(default: 1500, or 100 with --tiny)")
    parser.add_argument("--lora-rank", type=int, default=16, metavar="N", help="(default: 16)")
    parser.add_argument("--epochs", type=float, default=5, help="of the private runs (default: 5)")
    parser.add_argument("--tiny", action="store_true", help="made-up texts and a tiny model")
    parser.add_argument("--note", default="", metavar="TEXT", help="a sentence on the times, such as what else ran")
    add_device(parser)
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    needed = ("work", "tokenizer") if options.tiny else ("work", "tokenizer", "abstracts", "test")
    missing = [name for name in needed if getattr(options, name) is None]
    if missing and not options.earlier:
        parser.error(f"--{missing[0]} is missing")
    options.settings = {"epochs": options.epochs} | ({"batch_size": 64} if options.tiny else {})
    measure_or_read(parser, options, lambda: measure(options), markdown, "public", "runs")


if __name__ == "__main__":
    main()
