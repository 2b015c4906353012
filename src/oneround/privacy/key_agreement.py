"""Key agreement: every two sites share a secret that the server, which passes their public keys on, does not know.

X25519 and HKDF. A site makes a private key for every federation that asks it for one, stores it in its folder with fingerprints of
what it masked, and never sends it. The server collects the public keys and sends all of them with the broadcast; each site
checks the list and derives a secret with every other one. A server that replaces the sites' keys by its own would learn
the secrets: the keys protect against an honest-but-curious server, not against a malicious one.

A key masks for one broadcast, and so for one roster: sums of the same images under {A, B, C} minus those under {A, B} are
C's own. The site writes the broadcast's digest to disk before it reads an image, and refuses any other with that key.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from oneround.errors import DataError, ProtocolError
from oneround.files import OWNER_ONLY, write_durably

if TYPE_CHECKING:  # PyTorch is loaded by the process that masks, not by the one that sends its key
    from oneround.privacy.masks import Masker

LENGTH = 32  # bytes of a key, private, public or shared
log = logging.getLogger("oneround")


class Binding(NamedTuple):
    """The one broadcast a key masks for."""

    context: str
    """Its SHA-256, which covers the roster."""
    sites: tuple[str, ...]
    """The roster's names."""


class SiteKey(NamedTuple):
    """A site's key for one federation and what it masked with it, in one file: neither exists without the other."""

    path: Path
    private: X25519PrivateKey
    masked: dict[str, str]
    """Broadcast → fingerprint of the sums that were masked for it."""
    binding: Binding | None = None

    @property
    def public(self) -> str:
        return self.private.public_key().public_bytes_raw().hex()

    def write(self, masked: Mapping[str, str]) -> None:
        binding = {"binding": self.binding._asdict()} if self.binding else {}
        content = {"private": self.private.private_bytes_raw().hex(), "masked": dict(masked), **binding}
        write_durably(self.path, json.dumps(content).encode(), mode=OWNER_ONLY)

    @staticmethod
    def read(path: Path) -> SiteKey:
        """The key in this file; DataError if the file is damaged."""
        try:
            content = json.loads(path.read_text())
            private = X25519PrivateKey.from_private_bytes(bytes.fromhex(content["private"]))
            binding = content.get("binding")
            return SiteKey(
                path,
                private,
                {str(key): str(value) for key, value in content["masked"].items()},
                Binding(str(binding["context"]), tuple(map(str, binding["sites"]))) if binding is not None else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{path}: damaged; remove it and start over with another --out at the server") from None


def public_key(folder: Path | None, run: str) -> str:
    """The public key, in hexadecimal, of the site with this folder for that run; the pair is made at the first request."""
    if not re.fullmatch(r"[0-9a-f]{16}", run):
        raise ProtocolError(f"refused, {run[:80]!r} is no id of a run (16 hexadecimal digits)")
    path = _key_folder(folder) / f"{run}.json"
    if not path.exists():
        SiteKey(path, X25519PrivateKey.generate(), {}).write({})
    return SiteKey.read(path).public


def masker_of(name: str, folder: Path | None, roster: Mapping[str, str], digest: str, context: str) -> Masker:
    """The masker of a site's sums, which stores fingerprints of what it masked.

    Args:
        name: the site's name in the roster.
        folder: the site's folder, which has its key.
        roster: the public keys of all sites that mask together.
        digest: of the recipe.
        context: of the broadcast, the only one this key masks for.

    Raises:
        ProtocolError: the roster is not usable, or the key is bound to another broadcast. Nothing is computed then.
    """
    from oneround.privacy.masks import Masker

    secrets = secrets_of(name, folder, roster, digest)
    with _locked(_key_folder(folder)):
        key = bind(_own_key(name, folder, roster), context, roster)
    _warn_of_difference(folder, key)
    fingerprint_key = hashlib.sha256(b"oneround fingerprint" + key.private.private_bytes_raw()).digest()
    return Masker(name, secrets, key.masked, key.write, fingerprint_key)


def bind(key: SiteKey, context: str, roster: Mapping[str, str]) -> SiteKey:
    """Bind the key to this broadcast, on disk; one that is bound to another broadcast is refused."""
    contexts = set(key.masked) | ({key.binding.context} if key.binding else set())
    if contexts - {context}:
        before = f" of {', '.join(key.binding.sites)}" if key.binding else ""
        raise ProtocolError(
            f"refused, this site's key is bound to another broadcast{before}, and a second total would reveal what masks hide; "
            "start over with another --out at the server"
        )
    if key.binding is None:
        key = key._replace(binding=Binding(context, tuple(sorted(roster))))
        key.write(key.masked)
    return key


def _warn_of_difference(folder: Path | None, key: SiteKey) -> None:
    """Log a warning if this site masked within another set of sites before: the two totals differ by the other sites."""
    assert key.binding is not None
    for path in sorted(_key_folder(folder).glob("*.json")):
        other = SiteKey.read(path).binding if path != key.path else None
        if other is not None and other.sites != key.binding.sites:
            log.warning(
                "this site masked with %s before and now masks with %s: over the same images, the two totals reveal the sums "
                "of the sites in which they differ",
                ", ".join(other.sites),
                ", ".join(key.binding.sites),
            )
            return


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time, so that two broadcasts at once do not both find an unbound key."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def secrets_of(name: str, folder: Path | None, roster: Mapping[str, str], digest: str) -> dict[str, bytes]:
    """The secret that a site shares with each other site of the roster, for the recipe of that digest."""
    keys, private = _usable_keys(roster), _own_key(name, folder, roster).private
    return {
        peer: _shared_secret(private, key, f"oneround masks/{digest}/{'/'.join(sorted((name, peer)))}")
        for peer, key in keys.items()
        if peer != name
    }


def is_key(text: str) -> bool:
    """Whether this is a public key, in hexadecimal, that gives a shared secret."""
    if not re.fullmatch(rf"[0-9a-f]{{{2 * LENGTH}}}", text):
        return False
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(text)))
    except ValueError:  # a point of small order: the secret would be known to all
        return False
    return True


def _usable_keys(roster: Mapping[str, str]) -> dict[str, bytes]:
    """The roster's keys, if they are usable."""
    bad = next((peer for peer, key in roster.items() if not is_key(key)), None)
    if bad is not None:
        raise ProtocolError(
            f"refused, the key of {bad} is no usable public key (X25519, {LENGTH} bytes); nothing is masked with it"
        )
    keys = {peer: bytes.fromhex(key) for peer, key in roster.items()}
    if len(set(keys.values())) != len(keys):
        raise ProtocolError("refused, two sites in the list have the same key; each needs a folder of its own")
    if len(keys) < 2:
        raise ProtocolError("refused, the list of keys has one site only, and masks need two")
    return keys


def _own_key(name: str, folder: Path | None, roster: Mapping[str, str]) -> SiteKey:
    """This site's key that is in the roster."""
    if name not in roster:
        raise ProtocolError(
            "refused, the list of keys does not have this site; start over with another --out at the server"
        )
    for path in sorted(_key_folder(folder).glob("*.json")):
        key = SiteKey.read(path)
        if key.public == roster[name]:
            return key
    raise ProtocolError(
        "refused, the list of keys has another key for this site than its folder; start over with another --out at the server"
    )


def _shared_secret(private: X25519PrivateKey, key: bytes, purpose: str) -> bytes:
    """The secret for one purpose that this private key and the peer's public key agree on."""
    common = private.exchange(X25519PublicKey.from_public_bytes(key))
    return HKDF(algorithm=SHA256(), length=LENGTH, salt=None, info=purpose.encode()).derive(common)


def _key_folder(folder: Path | None) -> Path:
    """The folder of a site's keys, within its own folder."""
    if folder is None:
        raise DataError("sums.secure: this site has no folder to keep its key in; name one, folder: in its site file")
    return folder / "masks"
