"""Checks of models: that examples stay independent and that no state keeps private data."""

from dpoptim.validation.example_independence import ExampleMixingError

__all__ = ["ExampleMixingError"]
