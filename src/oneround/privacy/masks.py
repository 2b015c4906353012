"""Secure aggregation of sums: pairwise masks that cancel in the total, so the server learns only the total.

Every two clients share a secret, which the transport agrees on. A client writes its sums as integers modulo 2⁶⁴ and adds, for
every peer, a stream of uniform numbers expanded from their secret by SHAKE-256: one of the two adds it, the other subtracts
it (Bonawitz et al., 2017, without recovery from drop-outs: if one upload is lost, all are sent again). Modulo 2⁶⁴ a uniform
mask is a one-time pad: without the secrets, one upload reveals nothing about its data.

The message's context enters every stream, so no mask is used for two messages. A block of zeros is masked too, so that masks
that do not cancel are detected.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneround.errors import ProtocolError
from oneround.sums.moments import CHECK, CHECKED, Moments, square_of, triangle_of

Numbers = NDArray[np.uint64]

FRACTION_BITS = 24  # bits behind the point: exact to 3e-8 where features are about 1 in size (`sums.rescale`)


@dataclass(frozen=True)
class Masked:
    """One client's sums under masks."""

    client: str
    clients: tuple[str, ...]
    """All clients whose masks cancel together, this one included."""
    context: str
    """Identifies the message and its federation."""
    numbers: dict[str, Tensor]
    """int64, to be added modulo 2⁶⁴"""


class Masker:
    """A client's secrets, and a record of what it has masked."""

    def __init__(
        self,
        client: str,
        secrets: Mapping[str, bytes],
        masked: Mapping[str, str] | None = None,
        remember: Callable[[Mapping[str, str]], None] = lambda masked: None,
        fingerprint_key: bytes = b"",
    ) -> None:
        """`masked`: fingerprints of earlier masked sums, by context; `remember` stores them before masked sums are returned.

        `fingerprint_key`: a secret of this client, so that the stored fingerprints reveal nothing.
        """
        short = next((peer for peer, secret in secrets.items() if len(secret) < 16), None)
        if client in secrets or not secrets or short is not None:
            raise ProtocolError(
                f"{client}: masks need a secret of 16 bytes or more with every other client, at least one"
            )
        self.client, self.secrets = client, dict(secrets)
        self.masked, self.remember, self.fingerprint_key = dict(masked or {}), remember, fingerprint_key

    def mask(self, sums: Moments, context: str) -> Masked:
        """Masked sums. Other sums under the same context would reuse the masks and are refused."""
        tensors = {
            "triangle": triangle_of(sums.gram, torch.float64),
            "cross": sums.cross,
            "total": sums.total,
            "counts": sums.counts,
        }
        plain = {name: _fixed_point(value, len(self.secrets) + 1) for name, value in tensors.items()}
        content = b"".join(plain[name].tobytes() for name in sorted(plain))
        fingerprint = hmac.digest(self.fingerprint_key, content, "sha256").hex()
        if self.masked.setdefault(context, fingerprint) != fingerprint:
            raise ProtocolError(
                f"{self.client}: other sums were masked for '{context}' before; masks are used once, start over with another --out at the server"
            )
        self.remember(self.masked)
        plain[CHECK] = np.zeros(CHECKED, np.uint64)
        numbers = {
            name: torch.from_numpy(self._add_masks(name, value, context).view(np.int64))
            for name, value in plain.items()
        }
        return Masked(self.client, tuple(sorted([self.client, *self.secrets])), context, numbers)

    def _add_masks(self, name: str, value: Numbers, context: str) -> Numbers:
        """The value plus or minus the stream shared with each peer."""
        for peer, secret in self.secrets.items():
            stream = _stream(secret, context, name, value.shape)
            value = value + stream if self.client < peer else value - stream
        return value


def add_up(uploads: Iterable[Masked]) -> Moments:
    """The total of all clients' sums; masks that do not cancel are refused."""
    totals: dict[str, Numbers] = {}
    received: list[str] = []
    first: Masked | None = None
    for upload in uploads:
        first = first or upload
        if (upload.context, upload.clients) != (first.context, first.clients):
            raise ProtocolError(
                f"{upload.client}: masked for another message than {first.client}; ask all clients to upload again"
            )
        if upload.client in received or upload.client not in first.clients:
            raise ProtocolError(f"{upload.client}: uploaded twice or is not one of {', '.join(first.clients)}")
        received.append(upload.client)
        for name, value in upload.numbers.items():
            added = value.numpy().view(np.uint64)
            totals[name] = totals[name] + added if name in totals else added
    if first is None or set(received) != set(first.clients):
        missing = sorted(set(first.clients) - set(received)) if first else ["all clients"]
        raise ProtocolError(f"masks cancel only in the sum of all clients; missing: {', '.join(missing)}")
    if totals.pop(CHECK).any():
        raise ProtocolError(
            "the masks do not cancel: a client masked with another secret or not at all; have all send again"
        )
    plain = {name: torch.from_numpy(value.view(np.int64)).double() / 2**FRACTION_BITS for name, value in totals.items()}
    gram = square_of(plain["triangle"], len(plain["total"]))
    if float(plain["counts"].min()) < 0 or float(gram.diagonal().min()) < 0:
        raise ProtocolError(
            "the total has negative counts or squares: a client masked something other than sums; have all send again"
        )
    return Moments(gram, plain["cross"], plain["total"], plain["counts"])


def simulated_masker(client: str, clients: Iterable[str], seed: int) -> Masker:
    """A client's masker in a simulation. Its secrets follow from the seed, so the masks hide nothing."""
    shared = {
        peer: hashlib.sha256(f"oneround simulation/{seed}/{'/'.join(sorted((client, peer)))}".encode()).digest()
        for peer in clients
        if peer != client
    }
    return Masker(client, shared)


def _fixed_point(value: Tensor, clients: int) -> Numbers:
    """Fixed-point integers; the total of that many clients must still fit."""
    scaled = value.cpu().double() * 2**FRACTION_BITS
    if not bool(torch.isfinite(scaled).all()):
        raise ProtocolError("sums that are not finite cannot be masked; check the images and the features")
    most = 2.0**62 / clients
    if float(scaled.abs().max()) > most:
        raise ProtocolError(
            f"a sum of {float(value.abs().max()):.3g} is too large to be masked; at most {most / 2**FRACTION_BITS:.3g}"
        )
    whole: Numbers = scaled.round().long().numpy().view(np.uint64)
    return whole


def _stream(secret: bytes, context: str, name: str, shape: tuple[int, ...]) -> Numbers:
    """Uniform 64-bit numbers that both holders of the secret can compute."""
    purpose = f"oneround mask/{context}/{name}".encode()
    key = hashlib.sha256(len(secret).to_bytes(4, "big") + secret + purpose).digest()
    return np.frombuffer(hashlib.shake_256(key).digest(8 * int(np.prod(shape, dtype=int))), np.uint64).reshape(shape)
