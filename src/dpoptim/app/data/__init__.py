"""Private records: read from where they lie, as a model takes them, and masked."""
