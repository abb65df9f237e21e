"""Predict the labels of a table's rows with the model of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.app.data.records import RecordKind, read_columns
from dpoptim.app.data.tables import encode_table, unscaled
from dpoptim.app.recipes.columns import ALL_OTHERS, Number, chosen_columns, column_of
from dpoptim.app.recipes.defaults import label_of
from dpoptim.app.recipes.recipe import read_recipe
from dpoptim.app.runs.run import load_trained
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.integrations.losses import Task

_ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """One prediction per row: a class with its probabilities, or a number in the label's own unit."""

    values: list[Any]  # names of classes, or numbers
    label_names: tuple[str, ...] = ()
    probabilities: NDArray[np.float32] | None = None  # [rows, labels]

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """The predictions as the header and the rows of a table."""
        if self.probabilities is None:
            return ["prediction"], [[value] for value in self.values]
        header = ["prediction", *(f"probability of {name}" for name in self.label_names)]
        return header, [[value, *row.tolist()] for value, row in zip(self.values, self.probabilities, strict=True)]


def predict(directory: str | Path, data: str | Path) -> Predictions:
    """Predict the label of every row of a table, with the columns and scales of the run's recipe.

    Args:
        directory: A finished run on a table.
        data: A file or folder with the run's columns, in any order; other columns are ignored, the label too.

    Raises:
        ValueError: The run has not finished or is not about a table, a column is missing, or a value is not a number.

    Guarantee: predictions reveal no more about the records of the training than the model does. They do reveal the rows
    that are predicted: predictions for training rows, or other private rows, are not covered if they are published.
    """
    place = RunDirectory(Path(directory).expanduser())
    model = load_trained(directory)
    recipe = read_recipe(place.recipe_file)
    task = Task(recipe.task)
    if not task.is_tabular:
        raise ValueError(f"{place.path} is a run of {recipe.task}, and predict reads tables; use load_trained instead")
    columns, locate = read_columns(data, kind=RecordKind.TABULAR)
    declared, label = recipe.columns or {}, str(label_of(recipe))
    used = {name: part for name, part in declared.items() if name != label and name not in (recipe.drop or ())}
    wanted = chosen_columns(list(columns), used, [ALL_OTHERS], str(data))
    features, _ = encode_table(columns, declared, wanted, locate)
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in torch.from_numpy(features).split(_ROWS_AT_ONCE)]).float()
    if task is Task.TABULAR_REGRESSION:
        scale = column_of(label, declared[label])
        assert isinstance(scale, Number)  # training has checked it
        return Predictions(values=unscaled(scale, outputs[:, 0].numpy()).tolist())
    names = recipe.label_names or ()
    chosen = [names[place] for place in outputs.argmax(1).tolist()]
    return Predictions(values=chosen, label_names=tuple(names), probabilities=outputs.softmax(1).numpy())
