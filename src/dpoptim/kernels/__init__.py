"""Triton and C kernels, each next to a plain function with the same result, and the one place that chooses."""
