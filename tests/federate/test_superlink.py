"""The gate in front of the SuperLink: only sites' messages come in from other machines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from oneround.federate.superlink import Gate


@pytest.mark.parametrize(
    ("path", "host", "passes"),
    [
        ("/v1/fleet/pull-messages", "10.0.0.9", True),
        ("/health", "10.0.0.9", True),
        ("/v1/control/start-run", "10.0.0.9", False),
        ("/v1/control/register-node", "10.0.0.9", False),
        ("/v1/runtime/acquire-task", "10.0.0.9", False),
        ("/docs", "10.0.0.9", False),
        ("/v1/control/start-run", "127.0.0.1", True),
        ("/v1/runtime/acquire-task", "::1", True),
        ("/v1/fleetingly", "10.0.0.9", False),
    ],
)
def test_the_gate(path: str, host: str, passes: bool) -> None:
    """Flower's commands and its server process ask for no key; from other machines only sites' messages come through."""
    passed: list[str] = []
    answers: list[dict[str, Any]] = []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    asyncio.run(Gate(inside)({"type": "http", "path": path, "client": (host, 5)}, None, send))
    assert passed == ([path] if passes else [])
    assert [answer.get("status") for answer in answers] == ([] if passes else [403, None])
