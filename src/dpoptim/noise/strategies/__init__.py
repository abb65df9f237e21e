"""Strategies: lower triangular matrices C with their sensitivity, errors and streams of C⁻¹z."""
