"""Numbers in words."""

from __future__ import annotations

from oneround.formatting import duration, format_bytes, plural, without_infinity


def test_words() -> None:
    assert [duration(seconds) for seconds in (4, 89, 300, 7200)] == ["4 s", "89 s", "5 min", "2.0 h"]
    assert [format_bytes(count) for count in (12, 1500, 45_000_000, 2.5e12)] == [
        "12 bytes",
        "1.5 kB",
        "45 MB",
        "2500 GB",
    ]
    assert [plural(count, "point") for count in (0, 1, 1.0, 0.5, 7)] == [
        "0 points",
        "1 point",
        "1 point",
        "0.5 points",
        "7 points",
    ]


def test_json_gets_none_for_what_is_not_finite() -> None:
    data = {"a": [1.5, float("inf")], "b": (float("nan"), {"c": 2}), "d": "text", "e": None}
    assert without_infinity(data) == {"a": [1.5, None], "b": [None, {"c": 2}], "d": "text", "e": None}
