"""Compare variants at one privacy budget: tuned, and repeated over seeds."""
