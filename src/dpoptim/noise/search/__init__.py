"""Searches for good strategies. A search cannot affect ε: each strategy checks itself and states its sensitivity."""
