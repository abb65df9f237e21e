"""Pretrain the demonstration's BERT on public text and save it into the package.

    python -m experiments.demo.make_model

The texts are documentation strings of Python and of a few libraries, read from the installed sources. The vocabulary is
counted on them and is saved with the weights, so the demonstration needs neither the texts nor the same library
versions. The script takes about five minutes on one core. It repeats exactly under the same versions of Python, torch
and the libraries; under others the weights differ and the demonstration works just as well.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from dpoptim.app import RecordKind, Records, prepare
from dpoptim.app.demo.demonstration import LENGTH, MODEL
from dpoptim.app.demo.text import texts_of
from dpoptim.integrations.losses import Task

LIBRARIES = ("python", "numpy", "scipy", "setuptools", "pip", "rich")
TEXTS_PER_LIBRARY = 4000
STEPS = 4000
WORDS, PIECES = 1000, 350  # whole words, and parts that other words are made of
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def main() -> None:
    """Read, count, train and save."""
    texts = list(dict.fromkeys(text for name in LIBRARIES for text in texts_of(name, TEXTS_PER_LIBRARY)))
    tokenizer = vocabulary(texts)
    print(f"{len(texts):,} texts, {len(tokenizer):,} tokens")
    model = pretrained(texts, tokenizer)
    shutil.rmtree(MODEL, ignore_errors=True)
    model.half().save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    print(f"{MODEL}: {sum(path.stat().st_size for path in MODEL.iterdir()) / 1e3:.0f} kB")


def vocabulary(texts: list[str]) -> Any:
    """A WordPiece tokenizer with the most frequent words, the most useful parts of the others, and all letters.

    It is counted here because the trainer of `tokenizers` breaks ties differently in each process.
    """
    counts = Counter(word for text in texts for word in re.findall(r"[a-z]+|[^\sa-z]", text.lower()) if word.isascii())
    order = sorted(counts, key=lambda word: (-counts[word], word))
    parts: Counter[str] = Counter()
    for word in order[WORDS:]:
        for cut in range(2, len(word) - 1):
            parts[word[:cut]] += counts[word] * (cut - 1)
            parts[f"##{word[cut:]}"] += counts[word] * (len(word) - cut - 1)
    best = sorted(parts, key=lambda part: (-parts[part], part))[:PIECES]
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *order[:WORDS], *best])
    tokenizer = Tokenizer(models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, SPECIAL, strict=True)))


def pretrained(texts: list[str], tokenizer: Any) -> Any:
    """A BERT of two layers, 64 wide, trained by plain Adam on masked words."""
    torch.set_num_threads(1)  # sums of one thread always have the same order
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    records = Records(kind=RecordKind.TEXT, source="public documentation strings", texts=texts)
    prepared = prepare(task=Task.MASKED_LM, model=model, tokenizer=tokenizer, records=records, bucket=8)
    dataset: Any = prepared.dataset
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    began, losses = time.monotonic(), 0.0
    for step in range(STEPS):
        chosen = torch.randint(len(texts), (64,)).tolist()
        batch = prepared.at_step(prepared.collate([dataset[i] for i in chosen]), step)
        optimizer.zero_grad()
        loss = prepared.loss_per_example(model, batch).mean()
        loss.backward()
        optimizer.step()
        rate.step()
        losses += float(loss.detach())
        if (step + 1) % 200 == 0:
            print(f"step {step + 1}: loss {losses / 200:.3f}, {time.monotonic() - began:.0f} s", flush=True)
            losses = 0.0
    return model


if __name__ == "__main__":
    main()
