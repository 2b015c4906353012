"""federate server, client and keys refuse what cannot work in one line."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from oneround.cli import app
from oneround.errors import OneroundError


def refused(*words: str) -> str:
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, OneroundError) and "\n" not in str(error)
    return str(error)


def test_what_the_commands_refuse(tmp_path: Path) -> None:
    assert "name what to make" in refused("federate", "keys", str(tmp_path / "keys"))
    assert "give --keys FOLDER" in refused("federate", "server", "demo", "--out", str(tmp_path / "out"))
    outside = ["federate", "server", "demo", "--insecure", "--host", "0.0.0.0", "--out", str(tmp_path / "out")]
    assert "--insecure with --host 0.0.0.0: only on this machine" in refused(*outside)
    client = ["federate", "client", "--insecure", "--name", "a", "--folder", str(tmp_path / "a")]
    assert "only on this machine" in refused(*client, "--server", "10.1.2.3:9092", "--set", "share=0")
    assert "write it as HOST:PORT" in refused(*client, "--server", "localhost", "--set", "share=0")
    assert "no such file or folder" in refused(*client, "--server", "localhost:1", "--data", str(tmp_path / "none"))
    assert "give data" in refused(*client, "--server", "localhost:1")
    assert not (tmp_path / "out").exists()
