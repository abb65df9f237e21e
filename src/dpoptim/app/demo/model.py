"""The model of the demonstration: a WordPiece vocabulary and a small BERT, both made of public text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpoptim.app.data.records import Kind, Records
from dpoptim.app.models.prepared import Prepared, prepare
from dpoptim.integrations.losses import Task

LENGTH = 24  # tokens of a record, the first ones
VOCABULARY = 2048


def pretrain(
    folder: Path, texts: list[str], *, steps: int, seed: int, after_step: Callable[[int], None] = lambda done: None
) -> Prepared:
    """A BERT of two layers, 64 wide, trained on the public texts by plain Adam; saved into `folder`."""
    import transformers

    tokenizer = vocabulary(texts)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.BertForMaskedLM(config)
    records = Records(kind=Kind.TEXT, source="public documentation strings", texts=texts)
    prepared = prepare(task=Task.MASKED_LM, model=model, tokenizer=tokenizer, records=records, bucket=8, seed=seed)
    dataset: Any = prepared.dataset
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other longer than such a small model computes
    for step in range(steps):
        chosen = torch.randint(len(texts), (64,), generator=generator).tolist()
        batch = prepared.at_step(prepared.collate([dataset[i] for i in chosen]), step)
        optimizer.zero_grad()
        prepared.loss_per_example(model, batch).mean().backward()
        optimizer.step()
        rate.step()
        after_step(step + 1)
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return prepared


def vocabulary(texts: list[str]) -> Any:
    """A WordPiece tokenizer as BERT has it, counted on these texts; they must be public."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, special, strict=True)))
