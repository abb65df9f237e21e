"""Train a text classifier privately in a custom loop with Accelerate.

    pip install 'dpoptim[train,data]'
    python examples/accelerate_loop.py --model_name_or_path roberta-base --train_file reviews.csv \
        --labels bad good --output_dir out --epsilon 3 --delta 1e-6
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_scheduler

import dpoptim
from dpoptim.integrations.accelerate import prepare_accelerate, shard_for_accelerate
from dpoptim.integrations.losses import losses_for


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model_name_or_path", required=True, help="a model on the Hub, or a folder")
    parser.add_argument("--train_file", required=True, help="private texts: .jsonl or .csv with columns text and label")
    parser.add_argument("--validation_file", help="evaluation texts; they are not protected")
    parser.add_argument("--labels", nargs="+", required=True, help="the labels, in order")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, required=True)
    parser.add_argument("--batch_size", type=int, default=1024, help="expected per step (default: %(default)s)")
    parser.add_argument("--micro_batch_size", type=int, default=64, help="in memory at once (default: %(default)s)")
    parser.add_argument("--max_train_steps", type=int, default=500)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def read(path: str, tokenizer: Any, options: argparse.Namespace) -> Any:
    builder = {"jsonl": "json"}.get(Path(path).suffix[1:], Path(path).suffix[1:])
    texts = load_dataset(builder, data_files=path, split="train")
    places = {name: place for place, name in enumerate(options.labels)}

    def tokenized(rows: dict[str, Any]) -> Any:
        tokens = tokenizer(rows["text"], truncation=True, max_length=options.max_seq_length)
        return {**tokens, "labels": [places[str(label)] for label in rows["label"]]}

    return texts.map(tokenized, batched=True, remove_columns=texts.column_names)


def main() -> None:
    options = parsed()
    accelerator = Accelerator(cpu=options.cpu, mixed_precision=options.mixed_precision)
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model_name_or_path, num_labels=len(options.labels)
    ).to(accelerator.device)
    train, collate = read(options.train_file, tokenizer, options), DataCollatorWithPadding(tokenizer)

    plan = dpoptim.PrivacyPlan(
        num_examples=len(train), batch_size=options.batch_size, steps=options.max_train_steps,
        sampling=dpoptim.Poisson(),
    ).calibrate(epsilon=options.epsilon, delta=options.delta)  # fmt: skip
    loader = dpoptim.private_loader(train, plan, micro_batch_size=options.micro_batch_size, collate_fn=collate)
    loss_per_example = losses_for(model)
    model = shard_for_accelerate(accelerator, model)  # if Accelerate has FSDP2; before the optimizer is created
    private = dpoptim.scale_then_privatize(model, plan, lr=options.learning_rate)
    schedule = get_scheduler("linear", private, num_warmup_steps=plan.steps // 20, num_training_steps=plan.steps)

    # Do not pass the private loader to prepare: the loop iterates over it directly, for all steps of the plan.
    # Do not pass the schedule either: it would take one step per process.
    model, optimizer = prepare_accelerate(accelerator, model, private)
    model.train()
    for batch in dpoptim.secret_randomness(loader, private):  # dropout uses secret randomness
        with accelerator.autocast():
            losses = loss_per_example(model, batch.to(accelerator.device))
        accelerator.backward(losses.sum())  # do not log the loss: it is not private
        optimizer.step()
        if loader.step_ends:
            schedule.step()

    if options.validation_file is not None:
        held_out = accelerator.prepare(
            DataLoader(read(options.validation_file, tokenizer, options), batch_size=64, collate_fn=collate)
        )
        model.eval()
        right = 0
        for batch in held_out:
            with torch.no_grad():
                is_right = model(**batch).logits.argmax(-1) == batch["labels"]
            right += int(accelerator.gather_for_metrics(is_right).sum())
        accelerator.print(f"accuracy {right / len(held_out.dataset):.3f}, on data that the guarantee does not cover")
    weights = accelerator.get_state_dict(model)  # in all processes, because the model may be sharded
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.output_dir, state_dict=weights)
        tokenizer.save_pretrained(options.output_dir)
        print(plan.statement())
    accelerator.end_training()  # all processes leave together


if __name__ == "__main__":
    main()
