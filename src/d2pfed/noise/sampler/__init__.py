"""Exact samplers of integer noise: discrete Gaussians, Skellam, binomial; by lookup."""

from d2pfed.noise.sampler.samplers import (
    MAX_TABLE_SIGMA,
    Binomial,
    CenteredDiscreteGaussian,
    DiscreteGaussian,
    Skellam,
)

__all__ = [
    "CenteredDiscreteGaussian",
    "DiscreteGaussian",
    "Skellam",
    "Binomial",
    "MAX_TABLE_SIGMA",
]
