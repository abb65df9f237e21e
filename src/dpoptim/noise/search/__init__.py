"""Searches for good strategies. They cannot affect ε: each strategy checks itself and computes its sensitivity."""
