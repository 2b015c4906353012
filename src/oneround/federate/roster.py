"""The roster of masked sums: the public keys of all sites, collected before any of them is sent the broadcast."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from oneround.errors import RunError, refused
from oneround.federate.intake import Ending
from oneround.federate.sites import check_name
from oneround.privacy.key_agreement import is_key
from oneround.runs.folder import RunFolder
from oneround.runs.integrity import Content

log = logging.getLogger("oneround")
FILE = "keys.json"


class KeysContent(Content):
    """`keys.json`"""

    run: str
    keys: dict[str, str]


class Roster:
    """Public keys by site. Each is on disk before it counts, so a server that is started again has the same keys."""

    def __init__(self, folder: RunFolder, participants: Sequence[str], expected: int) -> None:
        """`participants`: names of the sites, if they are known; `expected`: their number."""
        self.folder, self.participants, self.expected = folder, participants, expected
        self.run, self.keys = secrets.token_hex(8), dict[str, str]()
        """`run`: the federation's id, for which each site makes a key."""
        if (folder.path / FILE).is_file():
            content = folder.read_json(FILE, "remove it, new keys are asked for", KeysContent)
            self.run, self.keys = content["run"], content["keys"]
            log.info("%d keys are here already: %s", len(self.keys), ", ".join(self.keys))
        else:
            self._write()

    def _write(self) -> None:
        self.folder.write_json(FILE, {"run": self.run, "keys": self.keys})

    @property
    def complete(self) -> bool:
        return len(self.keys) >= self.expected

    def complete_keys(self, ending: Ending) -> dict[str, str]:
        """All keys; RunError if some are missing."""
        if not self.complete:
            raise RunError(
                f"{self.folder.path}: {len(self.keys)} of {self.expected} keys when {ending.reason}; they are kept: {ending.advice}"
            )
        return self.keys

    def take(self, name: str, key: str, sender: str, registered: str = "") -> None:
        """Count a site's key; ProtocolError if it is refused. `registered`: the site that the sender's Flower key is registered for, if known."""
        check_name(name, registered, sender)
        if not is_key(key):
            raise refused(sender, f"{key[:80]!r} is no usable public key (X25519, 32 bytes)")
        if self.participants and name not in self.participants:
            raise refused(sender, f"{name} takes no part")
        if self.keys.get(name, key) != key:
            raise refused(sender, f"another key of {name} is here already; give every site a name of its own")
        if key in (other for peer, other in self.keys.items() if peer != name):
            raise refused(sender, f"the key of {name} is another site's; give every site a folder of its own")
        if name in self.keys or self.complete:
            return
        self.keys[name] = key
        self._write()
        log.info("%s: key counted (%d of %d)", name, len(self.keys), self.expected)
