"""Pictures of BERT-Tiny's runs: the paper's three, and two that it lacks."""

from __future__ import annotations

from dpoptim.reproduce.experiment import Experiment
from dpoptim.reproduce.tinybert.captions import markdown
from dpoptim.reproduce.tinybert.experiment import run_sweep
from dpoptim.reproduce.tinybert.pictures import pictures

EXPERIMENT = Experiment(name="figures", run=run_sweep, markdown=markdown, pictures=pictures, results="tinybert")
