"""Print the columns of a table as a recipe to fill in.

The recipe has the names of the columns and none of their values. Fill in each column from what is publicly known, and
pass the file to `dpoptim train`. The declarations decide how numbers are scaled and which categories the model sees.

examples:
  dpoptim columns patients.csv --label-column outcome > recipe.toml
      then fill in recipe.toml, and: dpoptim train recipe.toml --model mlp --epsilon 3
"""

from __future__ import annotations

import argparse
import json
import sys


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="a .csv, .tsv, .jsonl or .parquet file")
    parser.add_argument("--label-column", metavar="NAME", help="the column to predict (default: label)")
    parser.add_argument("--json", action="store_true", help="print the names of the columns as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the template."""
    from dpoptim.app.data.records import RecordKind, read_columns
    from dpoptim.app.recipes.columns import template

    names = list(read_columns(options.data, kind=RecordKind.TABULAR)[0])
    label = options.label_column
    if label is not None and label not in names:
        raise ValueError(f"--label-column {label} is not a column; the columns are {', '.join(names)}")
    if options.json:
        print(json.dumps({"columns": names, "label_column": label}, ensure_ascii=False))
        return 0
    sys.stdout.write(template(names, label=label, source=options.data))
    return 0
