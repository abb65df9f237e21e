"""Private training runs: records, models and losses from files and names, recipes, runs and their directories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpoptim.training.data.inputs import Batch
from dpoptim.training.data.records import Kind, Records, read_records
from dpoptim.training.hugging_face.accelerate_path import prepare_accelerate
from dpoptim.training.hugging_face.arguments import PrivacyArguments
from dpoptim.training.losses.batch_losses import losses_for
from dpoptim.training.losses.tasks import Outcome, Task
from dpoptim.training.models.loading import add_lora, load_model, load_tokenizer
from dpoptim.training.models.prepared import Prepared, prepare
from dpoptim.training.recipes.recipe import Recipe, read_recipe
from dpoptim.training.runs.metrics import Scores, evaluate
from dpoptim.training.runs.run import resume, train
from dpoptim.training.runs.run_directory import RunDirectory
from dpoptim.training.runs.run_log import read_log
from dpoptim.training.runs.setup import Setup, set_up
from dpoptim.training.runs.trained_model import load_trained

if TYPE_CHECKING:
    from dpoptim.training.hugging_face.trainer import PrivateTrainer

__all__ = [
    "Batch",
    "Kind",
    "Outcome",
    "Prepared",
    "PrivacyArguments",
    "PrivateTrainer",
    "Recipe",
    "Records",
    "RunDirectory",
    "Scores",
    "Setup",
    "Task",
    "add_lora",
    "evaluate",
    "load_model",
    "load_tokenizer",
    "load_trained",
    "losses_for",
    "prepare",
    "prepare_accelerate",
    "read_log",
    "read_recipe",
    "read_records",
    "resume",
    "set_up",
    "train",
]


def __getattr__(name: str) -> Any:
    """`PrivateTrainer` is imported when it is asked for: it needs transformers and accelerate."""
    if name != "PrivateTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import accelerate  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"PrivateTrainer needs transformers and accelerate ({error}); run: pip install transformers accelerate"
        ) from error
    from dpoptim.training.hugging_face.trainer import PrivateTrainer

    return PrivateTrainer
