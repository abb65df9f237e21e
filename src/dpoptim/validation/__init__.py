"""Checks of models: that examples stay independent and that no state keeps private data."""
