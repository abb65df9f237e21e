"""Training runs: preparing them, the training loop, their directories and logs, and metrics."""
