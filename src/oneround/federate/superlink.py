"""Flower's SuperLink with a gate: `python -m oneround.federate.superlink` takes the options of `flower-superlink`.

Flower serves three things on one port: the sites' messages, whose senders are authenticated; the commands of `flwr run` and
`flwr supernode register`; and the work of the ServerApp's own process. The last two ask for no key, so whoever reaches the port
could start code of their own or register themselves. The gate lets other machines through to the sites' messages only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware

OPEN = ("/v1/fleet/", "/health")
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Awaitable[Any]], Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]


class Gate:
    """Refuses whatever is not meant for sites, unless it comes from this machine."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(OPEN) and not _from_here(scope.get("client")):
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"only from the server itself"})
            return
        await self.app(scope, receive, send)


def _from_here(client: tuple[str, int] | None) -> bool:
    return client is not None and ipaddress.ip_address(client[0]).is_loopback


def main() -> None:
    own = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate), *own())
    flower_superlink()


if __name__ == "__main__":
    main()
