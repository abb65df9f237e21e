"""Fine-tune a masked language model on private texts: a Trainer script with three changes, marked <--.

    python examples/bert_masked_lm.py --model_name_or_path bert-base-uncased --train_file notes.txt \
        --output_dir out --epsilon 8 --delta 1e-6 --per_device_train_batch_size 32 --gradient_accumulation_steps 32
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    TrainingArguments,
)

from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer  # <-- replaces transformers.Trainer

BUILDERS = {"txt": "text", "jsonl": "json"}


@dataclass
class Data:
    """Model and data."""

    model_name_or_path: str = field(metadata={"help": "A model on the Hub, or a folder."})
    train_file: str = field(metadata={"help": "Private texts: .txt (one per line), .jsonl or .csv with a column text."})
    validation_file: str | None = field(default=None, metadata={"help": "Evaluation texts; they are not protected."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are truncated to this many tokens."})
    mlm_probability: float = field(default=0.15, metadata={"help": "The fraction of tokens to mask."})


def main() -> None:
    # <-- PrivacyArguments adds --epsilon, --delta and the other privacy options
    data, args, privacy = HfArgumentParser((Data, TrainingArguments, PrivacyArguments)).parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(data.model_name_or_path)
    model = AutoModelForMaskedLM.from_pretrained(data.model_name_or_path)

    files = {"train": data.train_file}
    if data.validation_file is not None:
        files["validation"] = data.validation_file
    ending = Path(data.train_file).suffix.lstrip(".")
    texts = load_dataset(BUILDERS.get(ending, ending), data_files=files)

    # Keep one record per example: joining texts and cutting them into blocks would spread a person over several.
    tokens = texts.map(
        lambda rows: tokenizer(rows["text"], truncation=True, max_length=data.max_seq_length),
        batched=True,
        remove_columns=texts["train"].column_names,
    )

    trainer = PrivateTrainer(  # <--
        model=model,
        args=args,
        train_dataset=tokens["train"],
        eval_dataset=tokens.get("validation"),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=data.mlm_probability),
        processing_class=tokenizer,
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
