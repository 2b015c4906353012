"""Statistics that add: sums over every client's images of fixed features, and what follows from their total."""

from oneround.sums.features import EXPONENT, announce, constants_of, evened, exponent_of, features_of
from oneround.sums.gather import gather, steps_of
from oneround.sums.moments import Moments, check_room, expected, packed, unpacked
from oneround.sums.solve import Solution, solve

__all__ = [
    "EXPONENT",
    "Moments",
    "Solution",
    "announce",
    "check_room",
    "constants_of",
    "evened",
    "expected",
    "exponent_of",
    "features_of",
    "gather",
    "packed",
    "solve",
    "steps_of",
    "unpacked",
]
