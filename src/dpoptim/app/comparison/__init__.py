"""Several variants at one privacy budget: tuned, repeated over seeds, told apart."""
