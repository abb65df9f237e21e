"""Private data, models and losses for training: from files and names to per-example losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpoptim.training.accelerate_path import prepare_accelerate
from dpoptim.training.batch_losses import losses_for
from dpoptim.training.inputs import Batch
from dpoptim.training.metrics import Scores, evaluate
from dpoptim.training.models import add_lora, load_model, load_tokenizer
from dpoptim.training.prepared import Prepared, prepare
from dpoptim.training.privacy_arguments import PrivacyArguments
from dpoptim.training.recipe import Recipe, read_recipe
from dpoptim.training.records import Kind, Records, read_records
from dpoptim.training.run import resume, train
from dpoptim.training.run_directory import RunDirectory
from dpoptim.training.run_log import read_log
from dpoptim.training.setup import Setup, set_up
from dpoptim.training.tasks import Outcome, Task

if TYPE_CHECKING:
    from dpoptim.training.hugging_face import PrivateTrainer

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
    from dpoptim.training.hugging_face import PrivateTrainer

    return PrivateTrainer
