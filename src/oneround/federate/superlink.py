"""Flower's SuperLink behind a gate: `python -m oneround.federate.superlink` takes the options of `flower-superlink`.

Flower serves three things on one port: the sites' messages, whose senders are authenticated; the commands of `flwr run` and
`flwr supernode register`; and the requests of the ServerApp's own process. The last two need no key, so anybody who reaches
the port could run code of their own or register a site. The gate accepts only the sites' messages from other machines.
"""

from __future__ import annotations

import ipaddress

from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

SITE_PATHS = ("/v1/fleet/", "/health")


class Gate:
    """Refuses requests from other machines, unless they are meant for sites."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(SITE_PATHS) and not _is_local(scope.get("client")):
            await PlainTextResponse("only from the server itself", 403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _is_local(client: tuple[str, int] | None) -> bool:
    return client is not None and ipaddress.ip_address(client[0]).is_loopback


def main() -> None:
    flower_middleware = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate), *flower_middleware())
    flower_superlink()


if __name__ == "__main__":
    main()
