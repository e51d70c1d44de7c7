"""Exact samplers of integer noise: discrete Gaussians, Skellam, binomial; fast by lookup, and one in rationals."""

from d2pfed.noise.sampler.reference import discrete_gaussian
from d2pfed.noise.sampler.samplers import (
    MAX_TABLE_SIGMA,
    Binomial,
    CentredDiscreteGaussian,
    DiscreteGaussian,
    Skellam,
)

__all__ = [
    "CentredDiscreteGaussian",
    "DiscreteGaussian",
    "Skellam",
    "Binomial",
    "discrete_gaussian",
    "MAX_TABLE_SIGMA",
]
