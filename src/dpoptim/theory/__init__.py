"""The theory of private adaptive optimizers, as functions."""

from dpoptim.theory.bias import second_moment_bias
from dpoptim.theory.choice import Candidate, Choice, choose_noise, format_bytes

__all__ = ["Candidate", "Choice", "choose_noise", "format_bytes", "second_moment_bias"]
