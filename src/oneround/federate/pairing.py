"""How two sites come to share a secret that the server, which carries their public keys, does not know: X25519 and HKDF.

A site makes a private key for every federation that asks it for one, keeps it in its folder together with a note of what it masked
with it, and never sends it. The server collects the public keys and sends all of them with the broadcast; each site checks the list
and derives a secret with every other one. A server that hands out keys of its own instead of the sites' would learn the secrets: the
list protects from a curious server, not from one that lies.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from oneround.errors import DataError, ProtocolError
from oneround.federate.keys import write_secret
from oneround.federate.sites import SiteFile

if TYPE_CHECKING:  # PyTorch is loaded by the process that masks, not by the one that tells its key
    from oneround.protocol import Broadcast
    from oneround.sums.masks import Masker

LENGTH = 32  # bytes of a key, private, public or shared


class Kept(NamedTuple):
    """A site's key for one federation, and what it masked with it: one file, so that neither is there without the other."""

    path: Path
    private: X25519PrivateKey
    masked: dict[str, str]
    """By broadcast: a fingerprint of the sums that were masked for it."""

    @property
    def public(self) -> str:
        return self.private.public_key().public_bytes_raw().hex()

    def write(self, masked: Mapping[str, str]) -> None:
        told = {"private": self.private.private_bytes_raw().hex(), "masked": dict(masked)}
        write_secret(self.path, json.dumps(told).encode())


def public_key(site: SiteFile, run: str) -> str:
    """What the others of that run need to know of this site, in hexadecimal; its key is made when first asked for."""
    if not re.fullmatch(r"[0-9a-f]{16}", run):
        raise ProtocolError(f"refused, {run[:80]!r} is no name of a run (16 hexadecimal digits)")
    path = _folder(site) / f"{run}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        Kept(path, X25519PrivateKey.generate(), {}).write({})
    return _read(path).public


def masker_of(site: SiteFile, broadcast: Broadcast) -> Masker:
    """What puts this site's sums under masks, and remembers durably that it did."""
    from oneround.sums.masks import Masker

    kept = _own(site, broadcast.roster)
    secrets = secrets_of(site, broadcast.roster, broadcast.digest)
    known = hashlib.sha256(b"oneround fingerprint" + kept.private.private_bytes_raw()).digest()
    return Masker(site.name, secrets, kept.masked, kept.write, known)


def secrets_of(site: SiteFile, roster: Mapping[str, str], digest: str) -> dict[str, bytes]:
    """The secret with each other site of the roster, for the recipe of that digest."""
    keys, private = _checked(roster), _own(site, roster).private
    return {
        peer: _shared(private, key, f"oneround masks/{digest}/{'/'.join(sorted((site.name, peer)))}")
        for peer, key in keys.items()
        if peer != site.name
    }


def is_key(text: str) -> bool:
    """Whether this is a public key in hexadecimal with which a secret can be shared."""
    if not re.fullmatch(rf"[0-9a-f]{{{2 * LENGTH}}}", text):
        return False
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(text)))
    except ValueError:  # a point of small order: the secret would be known to all
        return False
    return True


def _checked(roster: Mapping[str, str]) -> dict[str, bytes]:
    """The roster's keys, if one can mask with them."""
    bad = next((peer for peer, key in roster.items() if not is_key(key)), None)
    if bad is not None:
        raise ProtocolError(
            f"refused, the key of {bad} is none of {LENGTH} bytes that keeps a secret; nothing is masked with it"
        )
    keys = {peer: bytes.fromhex(key) for peer, key in roster.items()}
    if len(set(keys.values())) != len(keys):
        raise ProtocolError("refused, two sites in the list have the same key; each needs a folder of its own")
    if len(keys) < 2:
        raise ProtocolError("refused, there is nobody else in the list of keys, and masks need two")
    return keys


def _own(site: SiteFile, roster: Mapping[str, str]) -> Kept:
    """The key of this site that the roster names."""
    if site.name not in roster:
        raise ProtocolError(
            "refused, the list of keys does not have this site; begin anew with another --out at the server"
        )
    for path in sorted(_folder(site).glob("*.json")):
        kept = _read(path)
        if kept.public == roster[site.name]:
            return kept
    raise ProtocolError(
        "refused, the list of keys has another key for this site than its folder; begin anew with another --out at the server"
    )


def _shared(private: X25519PrivateKey, key: bytes, purpose: str) -> bytes:
    common = private.exchange(X25519PublicKey.from_public_bytes(key))
    return HKDF(algorithm=SHA256(), length=LENGTH, salt=None, info=purpose.encode()).derive(common)


def _folder(site: SiteFile) -> Path:
    if site.folder is None:
        raise DataError("sums.secure: this site has no folder to keep its key in; name one, folder: in its site file")
    return site.folder / "masks"


def _read(path: Path) -> Kept:
    try:
        told = json.loads(path.read_text())
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(told["private"]))
        return Kept(path, private, {str(key): str(value) for key, value in told["masked"].items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path}: damaged; remove it and begin anew with another --out at the server") from None
