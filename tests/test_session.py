"""A scoring session computes a value once, keeps the last few, and belongs to one site."""

from __future__ import annotations

import pytest

from oneround.session import ScoringSession
from oneround.site import Site


def test_a_value_is_computed_once_per_purpose_and_key() -> None:
    session, calls = ScoringSession(), []

    def compute(value: int) -> int:
        calls.append(value)
        return value

    assert [session.once("a", "key", lambda: compute(1)) for _ in range(3)] == [1, 1, 1]
    assert session.once("b", "key", lambda: compute(2)) == 2, "another purpose, another value"
    assert session.once("a", "other", lambda: compute(3)) == 3
    assert calls == [1, 2, 3]


def test_of_each_purpose_the_last_few_values_stay() -> None:
    session, calls = ScoringSession(), []
    for key in (1, 2, 3, 1, 3):
        session.once("answers", key, lambda key=key: calls.append(key), keep=2)  # type: ignore[misc]
    assert calls == [1, 2, 3, 1], "the first key is dropped by the third, which stays"


def test_a_value_of_none_is_kept_and_a_failure_is_not() -> None:
    session, calls = ScoringSession(), []
    assert session.once("a", 1, lambda: calls.append(1)) is None
    assert session.once("a", 1, lambda: calls.append(1)) is None and calls == [1]

    def fail() -> int:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        session.once("a", 2, fail)
    assert session.once("a", 2, lambda: 7) == 7
    assert session.once("b", 1, lambda: 3) == 3


def test_a_failure_leaves_what_is_kept() -> None:
    session = ScoringSession()
    session.once("a", 1, lambda: "kept")
    with pytest.raises(ZeroDivisionError):
        session.once("a", 2, lambda: 1 / 0)
    assert session.once("a", 1, lambda: "computed again") == "kept"


def test_every_site_has_a_session_of_its_own() -> None:
    one, other = Site("server"), Site("server")
    assert one.session is not other.session
    one.session.once("a", 1, lambda: "one")
    assert other.session.once("a", 1, lambda: "other") == "other"
    assert one == other, "what scoring computes is no part of who a site is"
