"""Flower's processes: a port that another program uses is noticed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from oneround.errors import RunError
from oneround.federate import processes
from oneround.federate.processes import SuperLink


def test_a_port_that_is_taken_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PORT_TIMEOUT", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            RunError, match=f"port {port} is in use by another program; end it, or choose another --port"
        ):
            SuperLink(tmp_path / "flower", "127.0.0.1", port).start()
    assert not processes.is_taken("127.0.0.1", port)
