"""Public keys are on disk before they count; a key that cannot be trusted is refused with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from oneround.errors import ProtocolError, RunError
from oneround.federate.intake import Ending
from oneround.federate.roster import Roster
from oneround.runs.folder import RunFolder


def new_key() -> str:
    return X25519PrivateKey.generate().public_key().public_bytes_raw().hex()


@pytest.fixture
def roster(tmp_path: Path) -> Roster:
    return Roster(RunFolder(tmp_path), ["a", "b"], 2)


def test_keys_are_kept_over_a_restart(roster: Roster, tmp_path: Path) -> None:
    keys = {"a": new_key(), "b": new_key()}
    roster.take("a", keys["a"], "node 1")
    again = Roster(RunFolder(tmp_path), ["a", "b"], 2)
    assert again.run == roster.run and again.keys == {"a": keys["a"]} and not again.complete
    again.take("b", keys["b"], "node 2")
    assert again.complete and again.complete_keys(Ending("", "")) == keys


def test_another_folder_is_another_federation(roster: Roster, tmp_path: Path) -> None:
    assert Roster(RunFolder(tmp_path / "other"), ["a", "b"], 2).run != roster.run


def test_missing_keys_are_counted_when_the_deadline_has_passed(roster: Roster) -> None:
    roster.take("a", new_key(), "node 1")
    with pytest.raises(RunError, match="1 of 2 keys when the deadline of 3 s passed; they are kept"):
        roster.complete_keys(Ending("the deadline of 3 s passed", "start again"))


@pytest.mark.parametrize(
    ("name", "key", "registered", "reason"),
    [
        ("a b", None, "", "'a b' is no name for a site"),
        ("b", None, "a", "it speaks for b but its key is registered for a"),
        ("b", "short", "", "'short' is no usable public key"),
        ("b", "zz" * 32, "", "is no usable public key"),
        ("b", "AB" * 32, "", "is no usable public key"),
        ("b", "00" * 32, "", "is no usable public key"),
        ("b", "01" + "00" * 31, "", "is no usable public key"),
        ("c", None, "", "c takes no part"),
        ("a", None, "", "another key of a is here already"),
    ],
)
def test_what_is_refused(roster: Roster, name: str, key: str | None, registered: str, reason: str) -> None:
    roster.take("a", first := new_key(), "node 1")
    with pytest.raises(ProtocolError, match=f"node 2: refused, .*{reason}"):
        roster.take(name, key or new_key(), "node 2", registered)
    assert roster.keys == {"a": first}


def test_two_sites_cannot_share_a_key(roster: Roster) -> None:
    roster.take("a", shared := new_key(), "node 1")
    with pytest.raises(ProtocolError, match="the key of b is another site's"):
        roster.take("b", shared, "node 2")


def test_the_same_key_again_changes_nothing_and_a_late_one_does_not_count(tmp_path: Path) -> None:
    roster = Roster(RunFolder(tmp_path), [], 1)
    roster.take("a", first := new_key(), "node 1")
    roster.take("a", first, "node 1")
    roster.take("late", new_key(), "node 2")
    assert roster.keys == {"a": first}


def test_keys_that_are_damaged_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text('{"run": "r", "keys": {"a": 3}}')
    with pytest.raises(RunError, match=r"keys\.json: damaged \(keys\.a = 3: must be text\); remove it"):
        Roster(RunFolder(tmp_path), ["a", "b"], 2)
