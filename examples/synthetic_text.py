"""Make synthetic reviews from private ones, offline: train, generate, compare.

    python examples/synthetic_text.py --output_dir out

All reviews are made up. A small GPT-2 first learns from public sentences, without privacy. It is then fine-tuned on
private reviews with a guarantee, and writes new reviews for each label. This shows the steps, not their quality: with
so few records and so small a model, most of what the model knows is from the public sentences.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dpoptim.app import Recipe, evaluate_synthetic, generate, train

DISHES = ["soup", "bread", "fish", "rice", "salad", "cake", "coffee", "pie"]
WORDS = {"good": ["tasty", "fresh", "lovely", "warm"], "bad": ["cold", "stale", "bland", "burnt"]}


def sentence(generator: random.Random, label: str) -> str:
    """A sentence about one to three dishes, and a word that follows the label."""
    dishes = generator.sample(DISHES, generator.randint(1, 3))
    return f"we had {' and '.join(dishes)} and it was {generator.choice(WORDS[label])}"


def write_reviews(path: Path, count: int, seed: int) -> Path:
    """Private reviews."""
    generator = random.Random(seed)
    rows = [{"label": label, "text": sentence(generator, label)} for label in ["good", "bad"] * (count // 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_public_model(folder: Path, steps: int) -> Path:
    """A GPT-2 of two layers, trained on public sentences; a third of them do not follow their label."""
    generator = random.Random(0)
    pairs = [generator.choice([("good", "good"), ("bad", "bad"), ("good", "bad")]) for _ in range(16 * steps)]
    pairs += [generator.choice([("good", "good"), ("bad", "bad"), ("bad", "good")]) for _ in range(16 * steps)]
    generator.shuffle(pairs)
    texts = [f"A {label} review:\n{sentence(generator, other)}[END]" for label, other in pairs]
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["[END]"], initial_alphabet=alphabet)
    pieces.train_from_iterator(texts[:1000], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="[END]", pad_token="[END]")

    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = transformers.GPT2Config(
        **sizes, initializer_range=0.1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = tokenizer(texts[32 * step : 32 * (step + 1)], padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Make synthetic reviews from private ones, offline.")
    parser.add_argument("--output_dir", type=Path, required=True, help="a new folder")
    parser.add_argument("--reviews", type=int, default=2000, help="private reviews (default: 2000)")
    parser.add_argument("--steps", type=int, default=300, help="steps on public sentences (default: 300)")
    parser.add_argument("--epsilon", type=float, default=8.0, help="of the private run (default: 8)")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    out: Path = options.output_dir
    out.mkdir(parents=True)
    private = write_reviews(out / "train.jsonl", options.reviews, 1)
    held_out = write_reviews(out / "test.jsonl", 400, 2)
    model = write_public_model(out / "public", options.steps)

    recipe = Recipe(
        model=str(model), data=str(private), prompt_template="A {label} review:", epsilon=options.epsilon, max_length=32
    )
    summary = train(recipe, out / "run")
    print(summary["guarantee"])
    synthetic = out / "synthetic.jsonl"
    generate(out / "run", synthetic, by="label", num=400, batch_size=100)
    print(*synthetic.read_text(encoding="utf-8").splitlines()[:4], sep="\n")
    scores = evaluate_synthetic(synthetic, private, held_out)
    print("accuracy on real reviews (not private):", scores.accuracy)
    print("copies of private reviews (not private):", scores.copies)


if __name__ == "__main__":
    main()
