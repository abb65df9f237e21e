"""Pictures of BERT-Tiny's runs: the paper's three, and two more."""

from __future__ import annotations

from experiments.framework import Experiment
from experiments.tinybert.experiment import run_sweep
from experiments.tinybert.pictures import markdown, pictures

EXPERIMENT = Experiment(name="figures", run=run_sweep, markdown=markdown, pictures=pictures, results="tinybert")
