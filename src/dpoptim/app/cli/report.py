"""Write one HTML file about one or several runs.

The file works offline. It shows the privacy statement, loss curves, gradients and noise, speed, epsilon against steps,
recipe and versions. Several runs share each chart, one colour per run, and a table compares their final numbers.

Every number that depends on private data is either released under the guarantee or marked "not private: for
debugging". Scores are marked as computed on data outside the guarantee. The noise key is never read.

examples:
  dpoptim report runs/first
      writes report.html
  dpoptim report runs/first runs/second -o comparison.html
      both runs in each chart, and a table of their final numbers
  dpoptim report runs/compare-recipe
      all runs of a comparison, without its trials
  dpoptim report runs/first --json
      the same numbers on standard output; writes HTML only with -o
"""

from __future__ import annotations

import argparse
import json
import sys


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run directory of `dpoptim train`, or a folder of `dpoptim compare`"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: report.html)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON to standard output")


def run(options: argparse.Namespace) -> int:
    """Write the page, print the numbers, or both."""
    from dpoptim.app.report.page import all_numbers, write_report
    from dpoptim.app.runs.run_log import read_runs

    runs = read_runs(options.runs)
    if options.output is not None or not options.json:
        output = write_report(runs, options.output or "report.html")
        size = f"{output.stat().st_size / 1000:,.0f} kB"
        print(f"wrote {output} ({size})", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps(all_numbers(runs), indent=1, allow_nan=False))
    for each in runs:
        for note in each.notes:
            print(f"dpoptim: {each.name}: {note}", file=sys.stderr)
    return 0
