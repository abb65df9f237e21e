"""Private data, models and losses for training: from files and names to per-example losses."""

from dpoptim.training.inputs import Batch
from dpoptim.training.metrics import Scores, evaluate
from dpoptim.training.models import add_lora, load_model, load_tokenizer
from dpoptim.training.prepared import Prepared, prepare
from dpoptim.training.records import Kind, Records, read_records
from dpoptim.training.tasks import Outcome, Task

__all__ = [
    "Batch",
    "Kind",
    "Outcome",
    "Prepared",
    "Records",
    "Scores",
    "Task",
    "add_lora",
    "evaluate",
    "load_model",
    "load_tokenizer",
    "prepare",
    "read_records",
]
