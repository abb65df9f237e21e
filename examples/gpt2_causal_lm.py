"""Fine-tune a causal language model on private texts: a Trainer script with three changes, marked <--.

    python examples/gpt2_causal_lm.py --model_name_or_path gpt2 --train_file letters.jsonl \
        --output_dir out --epsilon 8 --delta 1e-6 --per_device_train_batch_size 16 --gradient_accumulation_steps 64
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
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
    max_seq_length: int = field(default=256, metadata={"help": "Longer texts are truncated to this many tokens."})


def main() -> None:
    # <-- PrivacyArguments adds --epsilon, --delta and the other privacy options
    data, args, privacy = HfArgumentParser((Data, TrainingArguments, PrivacyArguments)).parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(data.model_name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(data.model_name_or_path)

    files = {"train": data.train_file}
    if data.validation_file is not None:
        files["validation"] = data.validation_file
    ending = Path(data.train_file).suffix.lstrip(".")
    texts = load_dataset(BUILDERS.get(ending, ending), data_files=files)

    def tokenized(rows: dict[str, Any]) -> Any:
        # Keep one record per example, ended by the end-of-text token; joined blocks would mix records.
        closed = [text + tokenizer.eos_token for text in rows["text"]]
        return tokenizer(closed, truncation=True, max_length=data.max_seq_length)

    tokens = texts.map(tokenized, batched=True, remove_columns=texts["train"].column_names)

    trainer = PrivateTrainer(  # <--
        model=model,
        args=args,
        train_dataset=tokens["train"],
        eval_dataset=tokens.get("validation"),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
        privacy=privacy,  # <--
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    if data.validation_file is not None:
        scores = trainer.evaluate()
        scores["perplexity"] = math.exp(min(scores["eval_loss"], 100.0))
        trainer.save_metrics("eval", scores)
    print(trainer.plan.statement())


if __name__ == "__main__":
    main()
