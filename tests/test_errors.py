"""Error texts are one short line without control characters; a misspelt word is told its nearest neighbour."""

from __future__ import annotations

import pytest

from oneround import errors
from oneround.errors import OneroundError


def test_what_is_printed_is_one_line_without_control_characters() -> None:
    assert errors.printable("a\n\x1b[31mred\x07\u202e  b") == "a ?[31mred?? b"
    assert errors.printable("x" * 300) == "x" * 200
    assert errors.printable("λ ≥ 0 – 圆") == "λ ≥ 0 – 圆"


def test_a_refusal_names_its_source_and_cannot_break_the_line() -> None:
    error = errors.refused("client_000", "tensor 'a\nerror: b' is not finite")
    assert isinstance(error, errors.ProtocolError)
    assert str(error) == "client_000: refused, tensor 'a error: b' is not finite"


def test_an_expected_error_is_its_text_and_another_is_named() -> None:
    assert errors.in_one_line(errors.RunError("out of disk")) == "out of disk"
    assert errors.in_one_line(ValueError("bad\nvalue")) == "ValueError: bad value"


def test_a_close_name_is_suggested_and_a_far_one_is_not() -> None:
    assert errors.did_you_mean("epohcs", ["seed", "epochs"]) == "; did you mean 'epochs'?"
    assert errors.did_you_mean("xyzzy", ["seed", "epochs"]) == ""


@pytest.mark.parametrize(("kind", "code"), [(errors.RecipeError, 2), (errors.RunError, 1), (errors.Interrupted, 130)])
def test_exit_codes(kind: type[OneroundError], code: int) -> None:
    assert kind("x").exit_code == code
