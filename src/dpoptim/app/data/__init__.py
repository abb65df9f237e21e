"""Private records: reading them, choosing their columns, and turning them into a model's inputs."""
