"""A file is replaced whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from oneround.files import OWNER_ONLY, write_durably


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    write_durably(path, b"first")

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_durably(path, b"second")
    assert path.read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_durably(tmp_path / "expected", b"content")
    assert caught.value.filename == str(tmp_path / "expected")


def test_a_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "site.key"
    write_durably(path, b"first")
    write_durably(path, b"second", mode=OWNER_ONLY)
    assert path.read_bytes() == b"second" and stat.S_IMODE(path.stat().st_mode) == OWNER_ONLY
