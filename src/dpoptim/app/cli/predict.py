"""Predict the rows of a table with a finished run.

RUN is a run directory of `dpoptim train` on a table. The new table needs the columns of the run, in any order. All
other columns, and the label, are ignored. For each row, the output has the predicted class and the probability of each
class, or the predicted number.

examples:
  dpoptim predict runs/first --data new.csv
      prints CSV
  dpoptim predict runs/first --data new.csv --out predictions.csv
  dpoptim predict runs/first --data new.csv --json
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from pathlib import Path

from dpoptim.app.files import check_target, write_text


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN", help="a run directory of `dpoptim train`")
    parser.add_argument("--data", required=True, metavar="FILE", help=".csv, .tsv, .jsonl, .parquet or a folder")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the .csv file to write (default: print it)")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, to standard output")


def run(options: argparse.Namespace) -> int:
    """Print the predictions, or write them to a file."""
    if options.out is not None:
        check_target("--out", options.out, ".csv")
        data, out = Path(options.data).expanduser().resolve(), options.out.resolve()
        if data.exists() and data in (out, *out.parents):
            raise ValueError(f"--out {options.out} would write into --data {options.data}; choose a different file")
    from dpoptim.app.runs.predict import predict

    header, rows = predict(options.run_directory, options.data).rows()
    if options.json:
        print(json.dumps([dict(zip(header, row, strict=True)) for row in rows], ensure_ascii=False))
    if options.out is not None or not options.json:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        if options.out is None:
            sys.stdout.write(text.getvalue())
        else:
            write_text(options.out, text.getvalue())
            print(f"wrote {options.out} ({len(rows):,} predictions)", file=sys.stderr)
    return 0
