"""Compare synthetic texts with the real texts that they replace.

One classifier is trained on synthetic texts, and one on the same number of real texts. Both are tested on held-out real
texts. The command also compares lengths, vocabulary and copies of training texts with those of the held-out texts.

All results are computed from real texts without noise: they are NOT PRIVATE.

examples:
  dpoptim evaluate-synthetic --synthetic synthetic.jsonl --train reviews.csv --test held_out.csv
      a fast classifier of words and pairs of words; labels are in the column "label"
  dpoptim evaluate-synthetic ... --label-column stars --model ./bert-tiny
      fine-tunes a model instead
  dpoptim evaluate-synthetic --synthetic answers.jsonl --train chats.jsonl --test held_out.jsonl --json
"""

from __future__ import annotations

import argparse
import json

from dpoptim.app.cli.options import count, output_console, silence_libraries, table_of


def add_options(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("texts", description=".jsonl, .csv, .parquet, .txt, a folder or a dataset's name")
    files.add_argument("--synthetic", required=True, metavar="DATA", help="synthetic texts")
    files.add_argument("--train", required=True, metavar="DATA", help="the private training texts")
    files.add_argument("--test", required=True, metavar="DATA", help="real texts that were not used in training")
    files.add_argument("--text-column", metavar="NAME", help="default: text; of chats, the responses")
    files.add_argument(
        "--label-column", metavar="NAME", help="default: label; without labels, no classifier is trained"
    )
    how = parser.add_argument_group("comparison")
    how.add_argument("--model", default="bag-of-words", metavar="NAME", help="classifier (default: bag-of-words)")
    how.add_argument("--seed", type=count, default=0, metavar="N", help="default: 0")
    how.add_argument("--device", default="auto", metavar="NAME", help="auto (default), cpu, cuda")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, to standard output")


def run(options: argparse.Namespace) -> int:
    """Print the scores as text or as JSON."""
    from rich.console import Console

    from dpoptim.app.progress import ProgressReporter
    from dpoptim.app.synthetic.evaluate import evaluate_synthetic

    silence_libraries()
    names = ("text_column", "label_column", "model", "seed", "device")
    settings = {name: getattr(options, name) for name in names}
    with ProgressReporter(Console(stderr=True)) as progress:
        found = evaluate_synthetic(options.synthetic, options.train, options.test, stage=progress.stage, **settings)
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    if found.accuracy is None:
        print("no classifier was trained, because not all texts have labels (--label-column names their column)\n")
    else:
        print(f"accuracy of a {found.model} classifier on {found.texts['test']['texts']:,} real test texts, after")
        for name, text in (("synthetic", "synthetic"), ("training", "real")):
            low, high = (f"{100 * value:.1f}" for value in found.intervals[name])
            accuracy = f"{100 * found.accuracy[name]:.1f} % (95 % interval: {low} to {high})"
            print(f"  training on {found.learned_from:,} {text} texts: {accuracy}")
        print(f"The most common label alone gives {100 * found.accuracy['most common label']:.1f} %.\n")
    rows = []
    for name, one in found.texts.items():
        repeats = found.copies.get(name)
        rows.append(
            {
                "texts": name,
                "number": f"{one['texts']:,}",
                "distinct": f"{100 * one['distinct_texts'] / one['texts']:.1f} %",
                "words (5–95 %)": f"{one['words_median']:.0f} ({one['words_low']:.0f}–{one['words_high']:.0f})",
                "vocabulary": f"{one['distinct_words']:,}",
                "covers test words": f"{100 * one['covered']:.1f} %",
                "exact copies": "" if repeats is None else f"{repeats['exact']}",
                "near copies": "" if repeats is None else f"{repeats['near']}",
                "longest": "" if repeats is None else f"{repeats['longest']} words",
            }
        )
    output_console().print(table_of(rows, words=1))
    for one in found.worst:
        print(f"row {one['row']} has {one['words']} words in a row of training record {one['training_record']}")
    print("\nA near copy has half of its runs of five words in one training text; exact copies count, too.")
    print("The test texts show how many copies are chance.\n")
    print("Not private: all numbers are computed from real texts without noise. Do not publish them, and do not choose")
    print("settings of a run by them, unless you account for it.")
    return 0
