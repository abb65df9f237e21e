"""Private training runs: records, models and losses from files and names, recipes, runs and their directories."""

from __future__ import annotations

from dpoptim.app.data.inputs import Batch
from dpoptim.app.data.records import Kind, Records, read_records
from dpoptim.app.models.loading import add_lora, load_model, load_tokenizer
from dpoptim.app.models.prepared import Prepared, prepare
from dpoptim.app.recipes.recipe import Recipe, read_recipe
from dpoptim.app.runs.metrics import Scores, evaluate
from dpoptim.app.runs.run import resume, train
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.app.runs.run_log import read_log
from dpoptim.app.runs.setup import RunSetup, prepare_run
from dpoptim.app.runs.trained_model import load_trained

__all__ = [
    "Batch",
    "Kind",
    "Prepared",
    "Recipe",
    "Records",
    "RunDirectory",
    "Scores",
    "RunSetup",
    "add_lora",
    "evaluate",
    "load_model",
    "load_tokenizer",
    "load_trained",
    "prepare",
    "read_log",
    "read_recipe",
    "read_records",
    "resume",
    "prepare_run",
    "train",
]
