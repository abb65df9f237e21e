"""Train, generate, report, compare and audit. Names are imported on first use, so the command line starts fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpoptim.app.data.examples import Batch
    from dpoptim.app.data.records import RecordKind, Records, read_records
    from dpoptim.app.models.loading import add_lora, load_model, load_tokenizer
    from dpoptim.app.models.prepared import Prepared, prepare
    from dpoptim.app.recipes.recipe import Recipe, read_recipe
    from dpoptim.app.runs.metrics import Scores, evaluate
    from dpoptim.app.runs.predict import Predictions, predict
    from dpoptim.app.runs.run import load_trained, resume, train
    from dpoptim.app.runs.run_directory import RunDirectory
    from dpoptim.app.runs.run_log import read_log
    from dpoptim.app.runs.setup import RunSetup, prepare_run
    from dpoptim.app.synthetic.evaluate import SyntheticScores, evaluate_synthetic
    from dpoptim.app.synthetic.generate import generate

__all__ = [
    "Batch",
    "Predictions",
    "Prepared",
    "Recipe",
    "RecordKind",
    "Records",
    "RunDirectory",
    "RunSetup",
    "Scores",
    "SyntheticScores",
    "add_lora",
    "evaluate",
    "evaluate_synthetic",
    "generate",
    "load_model",
    "load_tokenizer",
    "load_trained",
    "predict",
    "prepare",
    "prepare_run",
    "read_log",
    "read_recipe",
    "read_records",
    "resume",
    "train",
]
_MODULES = {
    "data.examples": ("Batch",),
    "data.records": ("RecordKind", "Records", "read_records"),
    "models.loading": ("add_lora", "load_model", "load_tokenizer"),
    "models.prepared": ("Prepared", "prepare"),
    "recipes.recipe": ("Recipe", "read_recipe"),
    "runs.metrics": ("Scores", "evaluate"),
    "runs.predict": ("Predictions", "predict"),
    "runs.run": ("load_trained", "resume", "train"),
    "runs.run_directory": ("RunDirectory",),
    "runs.run_log": ("read_log",),
    "runs.setup": ("RunSetup", "prepare_run"),
    "synthetic.evaluate": ("SyntheticScores", "evaluate_synthetic"),
    "synthetic.generate": ("generate",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"dpoptim.app.{module}"), name)
            return value
    raise AttributeError(f"module 'dpoptim.app' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
