"""Generate texts with the model of a finished run.

RUN is a run directory of `dpoptim train` on a causal language model. Rows have the columns of the training data, so the
file can replace that data. The run's statement is written beside the file: generating costs no further privacy. Prompts
and settings that come from private data are not covered.

Run the command again to continue an interrupted file, or to add rows with a larger --num.

examples:
  dpoptim generate runs/reviews --by label --num 1000 --out synthetic.jsonl
      the same number of texts per label; the run had --prompt-template 'A {label} review:'
  dpoptim generate runs/reviews --by label --weights good=3 bad=1 --out synthetic.jsonl
  dpoptim generate runs/assistant --prompts questions.txt --out answers.jsonl
      one response per line of the file
  dpoptim generate runs/letters --num 500 --temperature 0.8 --out letters.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dpoptim.app.cli.options import count, say, silence_libraries


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN", help="a run directory of `dpoptim train`")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument("--num", type=count, metavar="N", help="rows (default: one per prompt of --prompts, else 1000)")
    rows = parser.add_argument_group("prompts")
    rows.add_argument("--by", metavar="COLUMN", help="the same number of rows for each label in this column")
    rows.add_argument(
        "--weights",
        nargs="+",
        metavar="LABEL=X",
        help="with --by: public proportions of the labels; those of the training records are private",
    )
    rows.add_argument("--prompt", metavar="TEXT", help="one prompt for all rows")
    rows.add_argument(
        "--prompts", type=Path, metavar="FILE", help="public prompts: .txt (one per line), .jsonl, .csv or .parquet"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens", type=count, metavar="N", help="default: up to the length at which training texts were cut"
    )
    sampling.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="default: 1; 0 takes the most likely tokens"
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="X",
        help="keep the likely tokens that together have this probability (default: 0.95)",
    )
    sampling.add_argument("--seed", type=count, default=0, metavar="N", help="default: 0")
    sampling.add_argument("--batch-size", type=count, default=32, metavar="N", help="rows at once (default: 32)")
    sampling.add_argument("--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, to standard output")


def run(options: argparse.Namespace) -> int:
    """Write the file, and print what it holds."""
    from rich.console import Console

    from dpoptim.app.progress import ProgressReporter

    silence_libraries()
    weights = None if options.weights is None else dict(map(_weight, options.weights))
    if weights is not None and len(weights) < len(options.weights):
        raise ValueError("--weights has a label twice; give each once")
    if options.prompt is not None and options.prompts is not None:
        raise ValueError("--prompt and --prompts were both given; give one of them")
    from dpoptim.app.synthetic.generate import ROWS, generate

    num, prompts = options.num, options.prompts
    if options.prompt is not None:
        num, prompts = ROWS if num is None else num, [options.prompt]
    names = ("out", "by", "max_new_tokens", "temperature", "top_p", "batch_size", "seed", "device")
    settings = {name: getattr(options, name) for name in names}
    try:
        found = generate(
            options.run_directory, num=num, prompts=prompts, weights=weights,
            progress=ProgressReporter(Console(stderr=True)), **settings,
        )  # fmt: skip
    except KeyboardInterrupt:
        say("interrupted; call the command again to continue")
        return 130
    if options.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    say(f"wrote {found['out']}: {found['rows']:,} rows, {found['new_rows']:,} of them new")
    say(f"{found['guarantee']} ({found['statement']})")
    return 0


def _weight(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        return name, float(number)
    except ValueError:
        raise ValueError(f"--weights {text} must be a label and a number, such as good=3") from None
