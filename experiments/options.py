"""Options of more than one command line."""

from __future__ import annotations

from argparse import _ActionsContainer
from pathlib import Path


def add_machine(parser: _ActionsContainer) -> None:
    """Add --model, --device and --workers."""
    parser.add_argument("--model", metavar="M", help="a model's folder or name, for experiments that need one")
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu (default), cuda, cuda:1")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that share the device (tinybert, fashion_mnist)"
    )


def add_output(parser: _ActionsContainer) -> None:
    """Add --out and --commit."""
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER", help="default: results")
    parser.add_argument("--commit", metavar="TEXT", help="record this as the commit (default: ask git)")
