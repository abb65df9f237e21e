"""Which task a model's class is for, by transformers' own tables of classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dpoptim.integrations.losses.tasks import Task
from dpoptim.integrations.optional import needed

TABLES = {
    Task.MASKED_LM: "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    Task.CAUSAL_LM: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    Task.TEXT_CLASSIFICATION: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    Task.IMAGE_CLASSIFICATION: "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
LABEL_TABLES = {
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
"""Tasks of `LabelLosses`, which a loop or a Trainer of Hugging Face can train, and `dpoptim train` cannot."""
_ENDINGS = {
    "ForMaskedLM": Task.MASKED_LM,
    "LMHeadModel": Task.CAUSAL_LM,
    "ForCausalLM": Task.CAUSAL_LM,
    "ForSequenceClassification": Task.TEXT_CLASSIFICATION,
    "ForImageClassification": Task.IMAGE_CLASSIFICATION,
}


def tasks_of_classes(names: Iterable[str]) -> list[Task]:
    """The tasks that classes of these names are for: by transformers' tables, else by how the names end.

    Edge cases: several where a class does more than one task, none where nothing is known of it.

    >>> tasks_of_classes(["BertForMaskedLM"]), tasks_of_classes(["MyOwnForCausalLM"]), tasks_of_classes(["Thing"])
    ([<Task.MASKED_LM: 'masked-lm'>], [<Task.CAUSAL_LM: 'causal-lm'>], [])
    """
    auto = needed("transformers.models.auto.modeling_auto", "finding the task of a model")
    asked = set(names)
    found = [task for task, table in TABLES.items() if asked & _class_names(getattr(auto, table))]
    by_name = {task for name in asked for ending, task in _ENDINGS.items() if name.endswith(ending)}
    return found or [task for task in TABLES if task in by_name]


def label_tasks_of_classes(names: Iterable[str]) -> list[str]:
    """The same for the tasks whose labels lie beside the logits.

    >>> label_tasks_of_classes(["BertForTokenClassification"]), label_tasks_of_classes(["BertForMaskedLM"])
    (['token-classification'], [])
    """
    auto = needed("transformers.models.auto.modeling_auto", "finding the task of a model")
    asked = set(names)
    return [task for task, table in LABEL_TABLES.items() if asked & _class_names(getattr(auto, table))]


def trained_elsewhere(names: Iterable[str]) -> str | None:
    """What a model with classes of these names is where `dpoptim train` does not do its task; None for others.

    >>> trained_elsewhere(["T5ForConditionalGeneration"])
    'a text-to-text model, trained with dpoptim.app.PrivateTrainer (docs/hugging-face.md), not by `dpoptim train`'
    """
    found = label_tasks_of_classes(names)
    if not found:
        return None
    kind = "text-to-text" if "seq2seq-lm" in found else found[0]
    return f"a {kind} model, trained with dpoptim.app.PrivateTrainer (docs/hugging-face.md), not by `dpoptim train`"


def _class_names(table: Mapping[str, Any]) -> set[str]:
    names: set[str] = set()
    for value in table.values():
        names.update([value] if isinstance(value, str) else value)
    return names
