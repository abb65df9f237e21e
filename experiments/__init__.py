"""The paper's experiments, reproduced: `python -m experiments`."""
