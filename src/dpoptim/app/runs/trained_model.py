"""The model that a finished run made, loaded to be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpoptim.app.models import builtin
from dpoptim.app.models.loading import load_model
from dpoptim.app.recipes.recipe import BUILT_IN, read_recipe
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.integrations.losses import Task


def load_trained(directory: str | Path) -> nn.Module:
    """The trained model of a run directory, in evaluation mode, on the CPU; LoRA factors are added to their model.

    Its tokenizer is `load_tokenizer(directory / "model")`, its labels in their order are the recipe's `label_names`.
    Guarantee: the noise key is not read.
    Edge cases: one ValueError line where the folder is no run, or where the run has not finished.
    """
    place = RunDirectory(Path(directory).expanduser())
    if not place.recipe_file.is_file():
        raise ValueError(f"{place.path} is no run directory (it has no recipe.toml); check the path")
    if not place.model.is_dir():
        raise ValueError(f"{place.path} has no model yet; finish the run with: dpoptim train --resume {place.path}")
    recipe = read_recipe(place.recipe_file)
    if recipe.model in BUILT_IN:
        state: dict[str, Any] = torch.load(place.model / "model.pt", map_location="cpu", weights_only=True)
        labels = len(recipe.label_names or ())
        model: nn.Module = builtin.SmallCNN(num_labels=labels)
        if recipe.model == "mlp":
            model = builtin.MLP(columns=next(iter(state.values())).shape[1], num_labels=labels)
        model.load_state_dict(state)
        return model.eval()
    names = recipe.label_names
    return load_model(
        Task(recipe.task),
        place.model,
        num_labels=None if names is None else len(names),
        label_names=names,
        seed=recipe.seed,
    ).eval()
