"""The list of experiments; each is a module of this package with an `EXPERIMENT`, imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from experiments.experiment import Experiment

NAMES: dict[str, str] = {
    "logistic": "AdaGrad on sparse 1-D logistic regression: the paper's first example, over many dataset draws",
    "quadratic": "the badly scaled quadratic in two dimensions: preconditioners, noise ellipses, trajectories",
    "theory": "the theory's limits and closed forms, each beside a simulation",
    "tinybert": "BERT-Tiny on arXiv abstracts: the paper's table (needs --data and --model, and a GPU at paper scale)",
    "figures": "pictures of BERT-Tiny's runs, and the runs against the clip norm that one of them needs (as tinybert)",
}
"""What each is, in the order in which a run of all goes."""


def experiment(name: str) -> Experiment:
    """The experiment of that name.

    >>> experiment("theory").name
    'theory'
    """
    if name not in NAMES:
        raise ValueError(f"experiment={name!r} must be one of {', '.join(NAMES)}")
    found: Experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    return found


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The experiments of those names in the list's order, each once; "all" is every one.

    >>> [one.name for one in chosen(["theory", "theory"])]
    ['theory']
    """
    for name in names:
        if name != "all" and name not in NAMES:
            raise ValueError(f"experiment={name!r} must be one of {', '.join(NAMES)} or all")
    return [experiment(name) for name in NAMES if name in names or "all" in names]
