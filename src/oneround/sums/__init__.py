"""Statistics that add: sums over every client's images of fixed features, and what follows from their total."""

from oneround.sums.features import announce, constants_of, features_of
from oneround.sums.gather import gather, steps_of
from oneround.sums.moments import Moments, expected, packed, unpacked
from oneround.sums.solve import Solution, solve

__all__ = [
    "Moments",
    "Solution",
    "announce",
    "constants_of",
    "expected",
    "features_of",
    "gather",
    "packed",
    "solve",
    "steps_of",
    "unpacked",
]
