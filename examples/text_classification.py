"""Fine-tune a classifier on private texts: a Trainer script with three changes, marked <--.

    pip install 'dpoptim[train,data]'
    python examples/text_classification.py --model_name_or_path roberta-base --train_file reviews.csv \
        --labels bad good --output_dir out --epsilon 3 --delta 1e-6 \
        --per_device_train_batch_size 64 --gradient_accumulation_steps 16
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    TrainingArguments,
)

from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer  # <-- replaces transformers.Trainer

BUILDERS = {"jsonl": "json"}


@dataclass
class Data:
    """Model and data."""

    model_name_or_path: str = field(metadata={"help": "A model on the Hub, or a folder."})
    train_file: str = field(metadata={"help": "Private texts: .jsonl or .csv with columns text and label."})
    labels: list[str] = field(metadata={"help": "All labels, in order; they are not read from the private data."})
    validation_file: str | None = field(default=None, metadata={"help": "Evaluation texts; they are not protected."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are truncated to this many tokens."})


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def main() -> None:
    # <-- PrivacyArguments adds --epsilon, --delta and the other privacy options
    data, args, privacy = HfArgumentParser((Data, TrainingArguments, PrivacyArguments)).parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(data.model_name_or_path)
    places = {name: place for place, name in enumerate(data.labels)}
    model = AutoModelForSequenceClassification.from_pretrained(
        data.model_name_or_path, num_labels=len(places), label2id=places, id2label=dict(enumerate(data.labels))
    )

    files = {"train": data.train_file}
    if data.validation_file is not None:
        files["validation"] = data.validation_file
    ending = Path(data.train_file).suffix.lstrip(".")
    texts = load_dataset(BUILDERS.get(ending, ending), data_files=files)

    def tokenized(rows: dict[str, Any]) -> Any:
        tokens = tokenizer(rows["text"], truncation=True, max_length=data.max_seq_length)
        return {**tokens, "labels": [places[str(label)] for label in rows["label"]]}

    tokens = texts.map(tokenized, batched=True, remove_columns=texts["train"].column_names)

    trainer = PrivateTrainer(  # <--
        model=model,
        args=args,
        train_dataset=tokens["train"],
        eval_dataset=tokens.get("validation"),
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
        privacy=privacy,  # <--
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    if data.validation_file is not None:
        trainer.save_metrics("eval", trainer.evaluate())
    print(trainer.plan.statement())


if __name__ == "__main__":
    main()
