"""A file is replaced whole or not at all."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from oneround.files import OWNER_ONLY, BackgroundFlush, write_durably


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


def test_files_are_flushed_while_the_program_goes_on_and_all_are_on_disk_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_busy, flushed = threading.Event(), list[str]()

    def slow(descriptor: int) -> None:
        assert disk_is_busy.wait(10)
        flushed.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)

    monkeypatch.setattr("os.fsync", slow)
    with BackgroundFlush() as flush:
        for name in ("one", "two"):
            write_durably(tmp_path / name, b"content", flush=False)
            flush.add(tmp_path / name)
            flush.add(tmp_path / name)  # once is enough
        assert not flushed
        disk_is_busy.set()
    assert flushed == ["one", "two", tmp_path.name]


def test_a_disk_that_fails_in_the_background_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    write_durably(tmp_path / "upload", b"content")
    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="Input/output error") as caught, BackgroundFlush() as flush:
        flush.add(tmp_path / "upload")
    assert caught.value.filename == str(tmp_path / "upload")
    with pytest.raises(RuntimeError, match="first"), BackgroundFlush() as flush:
        flush.add(tmp_path / "upload")
        raise RuntimeError("first")
    flush.add(tmp_path / "late")


def test_a_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "site.key"
    write_durably(path, b"first")
    write_durably(path, b"second", mode=OWNER_ONLY)
    assert path.read_bytes() == b"second" and stat.S_IMODE(path.stat().st_mode) == OWNER_ONLY
