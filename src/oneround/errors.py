"""The errors a user can cause: one clear line each, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OneroundError(Exception):
    """An error the user can fix. The message is one line: the value, the limit, the fix."""

    exit_code = 2


class RecipeError(OneroundError):
    """A recipe (file, preset or override) that cannot be run as written."""


class DataError(OneroundError):
    """Data that is missing, damaged or not what its name promises."""


class DataMismatch(DataError):
    """Intact data of other classes or another shape than the federation's; the message names the source and no other file."""


class ProtocolError(OneroundError):
    """A message file that was refused: truncated, foreign, oversized, altered or not finite."""


class RunError(OneroundError):
    """A run that cannot continue; finished training is kept."""

    exit_code = 1


class OutOfTime(RunError):
    """The time limit is over; the state is saved between two epochs and the run can be resumed."""


class Interrupted(RunError):
    """The user stopped the run."""

    exit_code = 130


def refused(where: str, reason: str) -> ProtocolError:
    """A ProtocolError about a message from `where`; `reason` may quote the message, so it is made printable and short."""
    return ProtocolError(f"{where}: refused, {printable(reason, 500)}")


def in_one_line(error: Exception) -> str:
    """One line: the message of a OneroundError, type and message of any other exception."""
    text = str(error) if isinstance(error, OneroundError) else f"{type(error).__name__}: {error}"
    return printable(text, 500)


def printable(text: str, longest: int = 200) -> str:
    """One short line without control characters."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split())[:longest])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if a known name is close, else an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
