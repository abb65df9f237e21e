"""A run's settings: as a file says them, with defaults, and as the plan and optimizer that they mean."""
