"""Who masks for whom: the public keys of all sites, collected before any of them is sent the broadcast."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from oneround.errors import ProtocolError, RunError
from oneround.federate.pairing import is_key
from oneround.federate.sites import check_name
from oneround.folder import RunFolder
from oneround.observe.words import duration

log = logging.getLogger("oneround")
FILE = "keys.json"


class Roster:
    """Public keys by site. Each is on disk before it counts, so a server that is started again goes on with the same ones."""

    def __init__(self, place: RunFolder, wanted: Sequence[str], expected: int) -> None:
        """`wanted`: who they must be, where that is known; `expected`: how many."""
        self.place, self.wanted, self.expected = place, wanted, expected
        self.run, self.keys = secrets.token_hex(8), dict[str, str]()
        """`run`: what sites know this federation by; each makes a key for it."""
        if (place.path / FILE).is_file():
            told = place.read_json(FILE, ["run", "keys"], "remove it, new keys are asked for")
            self.run, self.keys = told["run"], told["keys"]
            log.info("%d keys are here already: %s", len(self.keys), ", ".join(self.keys))
        else:
            self._write()

    def _write(self) -> None:
        self.place.write_json(FILE, {"run": self.run, "keys": self.keys})

    @property
    def complete(self) -> bool:
        return len(self.keys) >= self.expected

    def whole(self, deadline: float | None) -> dict[str, str]:
        """All keys; if some are missing, waiting for them has ended with that deadline."""
        if not self.complete:
            raise RunError(
                f"{self.place.path}: {len(self.keys)} of {self.expected} keys when the deadline of {duration(deadline or 0)} "
                "passed; they are kept: start the server again to go on waiting"
            )
        return self.keys

    def take(self, name: str, key: str, sender: str, registered: str = "") -> None:
        """Count a site's key. `registered`: whom the sender's own key is registered for, if that is known."""
        check_name(name, registered, sender)
        if not is_key(key):
            raise ProtocolError(f"{sender}: refused, {key[:80]!r} is no public key of 32 bytes that keeps a secret")
        if self.wanted and name not in self.wanted:
            raise ProtocolError(f"{sender}: refused, {name} takes no part")
        if self.keys.get(name, key) != key:
            raise ProtocolError(
                f"{sender}: refused, another key of {name} is here already; give every site a name of its own"
            )
        if key in (other for peer, other in self.keys.items() if peer != name):
            raise ProtocolError(
                f"{sender}: refused, the key of {name} is another site's; give every site a folder of its own"
            )
        if name in self.keys or self.complete:
            return
        self.keys[name] = key
        self._write()
        log.info("%s: key counted (%d of %d)", name, len(self.keys), self.expected)
