"""Files of a run folder."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from oneround.errors import RunError
from oneround.runs.folder import RunFolder, client_name
from oneround.runs.integrity import Content


def test_names_of_clients_are_as_wide_as_the_largest() -> None:
    assert client_name(7, 10) == "client_007" and client_name(7, 10_001) == "client_00007"


class Pair(Content):
    x: int
    y: int


def test_json_is_read_with_the_keys_it_must_have(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("a.json", {"x": 1})
    assert folder.read_json("a.json", "remove it") == {"x": 1}
    with pytest.raises(RunError, match=r"a\.json: damaged \(y: is required\); remove it"):
        folder.read_json("a.json", "remove it", Pair)
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(RunError, match=r"\(content = \[1\]: must be a mapping of keys to values\)"):
        folder.read_json("a.json", "remove it")
    (tmp_path / "a.json").write_bytes(b"\xff")
    with pytest.raises(RunError, match=r"a\.json: damaged"):
        folder.read_json("a.json", "remove it")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).locked(),
        pytest.raises(RunError, match="another process is running here"),
        RunFolder(tmp_path).locked(),
    ):
        pass
    with RunFolder(tmp_path).locked():
        pass


def test_a_process_that_is_ending_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as ending:
        ending.enter_context(RunFolder(tmp_path).locked())
        threading.Timer(0.5, ending.pop_all().close).start()
        with RunFolder(tmp_path).locked(patience=60):
            assert [record.message for record in caplog.records] == [
                f"{tmp_path}: waiting for another process here to end"
            ]


def test_few_bad_uploads_of_a_sender_are_kept(tmp_path: Path) -> None:
    for _ in range(5):
        RunFolder(tmp_path).quarantine("../evil").write_bytes(b"x")
    names = [path.name for path in (tmp_path / "quarantine").iterdir()]
    assert len(names) == 3 and all(name.startswith(".._evil.") for name in names)
