"""Noise strategies: lower-triangular matrices C, their sensitivity, errors and streams of C⁻¹z."""
