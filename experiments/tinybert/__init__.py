"""BERT-Tiny fine-tuned privately on abstracts: the paper's table, tuned and reproduced, and what lies beyond it."""

from __future__ import annotations

from experiments.framework import Experiment
from experiments.tinybert.experiment import run_table
from experiments.tinybert.report import main_table, markdown

EXPERIMENT = Experiment(name="tinybert", run=run_table, markdown=markdown, pictures=lambda lines: {}, table=main_table)
