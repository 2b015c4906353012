"""Additive statistics: sums of fixed features over the clients' images, and ridge regression on their total."""

from oneround.sums.features import (
    EXPONENT,
    constants_from_seed,
    constants_of,
    exponent_of,
    feature_extras,
    features_of,
    rescale,
    size_of,
    stacked_extras,
)
from oneround.sums.gather import gather, steps_of
from oneround.sums.moments import Moments, check_memory, packed, sums_layout, unpacked
from oneround.sums.solve import Solution, solve

__all__ = [
    "EXPONENT",
    "Moments",
    "Solution",
    "check_memory",
    "constants_from_seed",
    "constants_of",
    "exponent_of",
    "feature_extras",
    "features_of",
    "gather",
    "packed",
    "rescale",
    "size_of",
    "solve",
    "stacked_extras",
    "steps_of",
    "sums_layout",
    "unpacked",
]
