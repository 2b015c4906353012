"""How two sites come to share a secret that the server, which carries their public keys, does not know: X25519 and HKDF.

A site makes one private key, keeps it in its folder and never sends it. The server collects the public keys and sends all of
them with the broadcast; each site checks the list and derives a secret with every other one. A server that hands out keys of its
own instead of the sites' would learn the secrets: the list protects from a curious server, not from one that lies.
"""

from __future__ import annotations

from collections.abc import Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from oneround.errors import DataError, ProtocolError
from oneround.federate.keys import write_secret
from oneround.federate.sites import SiteFile

LENGTH = 32  # bytes of a key, private, public or shared


def public_key(site: SiteFile) -> str:
    """What the others need to know of this site, in hexadecimal."""
    return _private_key(site).public_key().public_bytes_raw().hex()


def secrets_of(site: SiteFile, roster: Mapping[str, str], digest: str) -> dict[str, bytes]:
    """The secret with each other site of the roster, for the recipe of that digest."""
    private = _private_key(site)
    keys = _checked(site.name, private.public_key().public_bytes_raw(), roster)
    return {
        peer: _shared(private, key, f"oneround masks/{digest}/{'/'.join(sorted((site.name, peer)))}", peer)
        for peer, key in keys.items()
        if peer != site.name
    }


def is_key(text: str) -> bool:
    """Whether this is a public key in hexadecimal."""
    try:
        return len(bytes.fromhex(text)) == LENGTH
    except ValueError:
        return False


def _checked(name: str, own: bytes, roster: Mapping[str, str]) -> dict[str, bytes]:
    """The roster's keys, if this site can mask with them."""
    bad = next((peer for peer, key in roster.items() if not is_key(key)), None)
    if bad is not None:
        raise ProtocolError(f"refused, the key of {bad} is not one of {LENGTH} bytes; this site masks nothing with it")
    keys = {peer: bytes.fromhex(key) for peer, key in roster.items()}
    if keys.get(name) != own:
        what = "has another key for this site" if name in keys else "does not have this site"
        raise ProtocolError(f"refused, the list of keys {what}; begin anew with another --out at the server")
    if len(set(keys.values())) != len(keys):
        raise ProtocolError("refused, two sites in the list have the same key; each needs a folder of its own")
    if len(keys) < 2:
        raise ProtocolError("refused, there is nobody else in the list of keys, and masks need two")
    return keys


def _shared(private: X25519PrivateKey, key: bytes, purpose: str, peer: str) -> bytes:
    try:
        common = private.exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:  # a point of small order: the secret would be known to all
        raise ProtocolError(f"refused, the key of {peer} is none that keeps a secret") from None
    return HKDF(algorithm=SHA256(), length=LENGTH, salt=None, info=purpose.encode()).derive(common)


def _private_key(site: SiteFile) -> X25519PrivateKey:
    """The key in the site's folder; made where there is none yet."""
    if site.folder is None:
        raise DataError("sums.secure: this site has no folder to keep its key in; name one, folder: in its site file")
    path = site.folder / "masks.key"
    if not path.exists():
        site.folder.mkdir(parents=True, exist_ok=True)
        write_secret(path, X25519PrivateKey.generate().private_bytes_raw())
    raw = path.read_bytes()
    if len(raw) != LENGTH:
        raise DataError(
            f"{path}: damaged, {len(raw)} bytes instead of {LENGTH}; remove it and begin anew with another --out at the server"
        )
    return X25519PrivateKey.from_private_bytes(raw)
