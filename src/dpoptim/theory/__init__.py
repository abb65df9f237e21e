"""The theory of private adaptive optimizers, as functions."""

from dpoptim.theory.bias import second_moment_bias

__all__ = ["second_moment_bias"]
