"""A private training run, in its directory: made, logged, stopped, resumed, scored."""
