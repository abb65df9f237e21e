"""The theory of private adaptive optimizers, as functions. They raise ValueError for arguments out of range."""

from dpoptim.theory.adviser import Advice, Forecast, GradientSignal, advise
from dpoptim.theory.gradient_probe import measure_signal
from dpoptim.theory.noise_choice import Alternative, Candidate, Choice, choose_noise, format_bytes
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
    second_moment_bias,
    second_moment_mean,
    second_moment_variance,
)
from dpoptim.theory.stability_window import (
    ScaleWindow,
    SecondMomentRegime,
    clip_norm_window,
    contraction_factor,
    feedback,
    mean_field,
    predict,
    scale_window,
    steady_second_moment,
)
from dpoptim.theory.update_noise import (
    Cost,
    best_exponent,
    least_noise_cost,
    momentum_noise_variance,
    noise_cost,
    post_processing_update_rms,
    scaled_noise_stddev,
)

__all__ = [
    "Advice",
    "Alternative",
    "Candidate",
    "Choice",
    "Cost",
    "Forecast",
    "GradientSignal",
    "ScaleWindow",
    "SecondMomentRegime",
    "Signal",
    "advise",
    "best_exponent",
    "choose_noise",
    "clip_norm_window",
    "contraction_factor",
    "feedback",
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
]
