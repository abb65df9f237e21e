"""The theory of private adaptive optimizers, as functions."""

from dpoptim.theory.advice_alternatives import Alternative
from dpoptim.theory.advice_signal import GradientSignal
from dpoptim.theory.advice_window import ScaleWindow, scale_window
from dpoptim.theory.adviser import Advice, Forecast, advise
from dpoptim.theory.bias import second_moment_bias
from dpoptim.theory.exponents import Cost, best_exponent, least_noise_cost, noise_cost
from dpoptim.theory.gradient_probe import measure_signal
from dpoptim.theory.noise_choice import Candidate, Choice, choose_noise, format_bytes
from dpoptim.theory.regimes import (
    Signal,
    largest_dimension_bias_correction,
    largest_dimension_ime,
    largest_dimension_post_processing,
    smallest_batch_bias_correction,
    smallest_batch_ime,
    smallest_batch_post_processing,
)
from dpoptim.theory.second_moments import (
    ime_negative_probability,
    moment_weights,
    negative_probability,
    second_moment_mean,
    second_moment_variance,
)
from dpoptim.theory.steady_state import (
    SecondMomentRegime,
    clip_norm_window,
    collapsed_state,
    contraction_factor,
    feedback,
    mean_field,
    predict,
)
from dpoptim.theory.steady_state import steady_state as steady_second_moment  # steady_state is the module
from dpoptim.theory.update_noise import (
    bias_correction_update_bound,
    first_update_sensitivity,
    momentum_noise_variance,
    post_processing_update_rms,
    scaled_noise_stddev,
    update_sensitivity,
)

__all__ = [
    "Advice",
    "Alternative",
    "Candidate",
    "Choice",
    "Cost",
    "SecondMomentRegime",
    "Forecast",
    "GradientSignal",
    "ScaleWindow",
    "Signal",
    "advise",
    "best_exponent",
    "bias_correction_update_bound",
    "choose_noise",
    "clip_norm_window",
    "collapsed_state",
    "contraction_factor",
    "feedback",
    "first_update_sensitivity",
    "format_bytes",
    "ime_negative_probability",
    "largest_dimension_bias_correction",
    "largest_dimension_ime",
    "largest_dimension_post_processing",
    "least_noise_cost",
    "mean_field",
    "measure_signal",
    "moment_weights",
    "momentum_noise_variance",
    "negative_probability",
    "noise_cost",
    "post_processing_update_rms",
    "predict",
    "scale_window",
    "scaled_noise_stddev",
    "second_moment_bias",
    "second_moment_mean",
    "second_moment_variance",
    "smallest_batch_bias_correction",
    "smallest_batch_ime",
    "smallest_batch_post_processing",
    "steady_second_moment",
    "update_sensitivity",
]
