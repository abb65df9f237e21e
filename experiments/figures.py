"""Pictures of BERT-Tiny's runs: the paper's three, and two that it lacks."""

from __future__ import annotations

from experiments.experiment import Experiment
from experiments.tinybert.captions import markdown
from experiments.tinybert.experiment import run_sweep
from experiments.tinybert.pictures import pictures

EXPERIMENT = Experiment(name="figures", run=run_sweep, markdown=markdown, pictures=pictures, results="tinybert")
