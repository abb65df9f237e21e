"""Searches for good strategies, and the errors they minimize. They cannot affect ε: each strategy checks itself."""
