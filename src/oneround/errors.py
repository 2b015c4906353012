"""The errors a user can cause: one clear line each, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OneroundError(Exception):
    """Something the user can put right. The message is one line: the value, the limit, the fix."""

    exit_code = 2


class RecipeError(OneroundError):
    """A recipe (file, preset or override) that cannot be run as written."""


class DataError(OneroundError):
    """Data that is missing, damaged or not what its name promises."""


class UnlikeData(DataError):
    """Data that is whole but not what the federation is about; the message names no file but the source it begins with."""


class ProtocolError(OneroundError):
    """A message file that was refused: truncated, foreign, oversized, altered or not finite."""


class RunError(OneroundError):
    """A run that could not go on; what was trained so far is kept."""

    exit_code = 1


class OutOfTime(RunError):
    """The time that was given is over; everything is saved between two epochs and can go on later."""


class Interrupted(RunError):
    """The user stopped the run."""

    exit_code = 130


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when something close is known, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
