"""Secure aggregation of sums: pairwise masks that cancel in the total, so the server adds what it cannot read.

Every two clients share a secret (how they agree on it is the transport's business). A client writes its sums as whole numbers
modulo 2⁶⁴ and adds, for every peer, a stream of uniform numbers expanded from their secret by SHAKE-256: one of the two adds
it, the other subtracts it (Bonawitz et al., 2017, without recovery from drop-outs: if one upload is lost, all are sent again).
Modulo 2⁶⁴ a uniform mask is a one-time pad: to who lacks a secret, one upload says nothing about its data.

The message's context enters every stream, so no mask serves two messages; a block of zeros is masked along, so that masks
which do not cancel are noticed.
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

FRACTION = 24  # bits behind the point: exact to 3e-8 where features are about 1 in size (`sums.evened`)


@dataclass(frozen=True)
class Masked:
    """One client's sums under masks."""

    client: str
    clients: tuple[str, ...]
    """All whose masks cancel together, this one among them."""
    context: str
    """Which message of which federation this is."""
    numbers: dict[str, Tensor]
    """int64, to be added modulo 2⁶⁴"""


class Masker:
    """A client's secrets, and what it has masked with them."""

    def __init__(
        self,
        client: str,
        secrets: Mapping[str, bytes],
        said: Mapping[str, str] | None = None,
        remember: Callable[[Mapping[str, str]], None] = lambda said: None,
        known: bytes = b"",
    ) -> None:
        """`said`: what it masked before, as another process remembered it; `remember` is told before anything is handed out.

        `known`: what only this client knows, so that what is remembered tells nothing to others.
        """
        short = next((peer for peer, secret in secrets.items() if len(secret) < 16), None)
        if client in secrets or not secrets or short is not None:
            raise ProtocolError(
                f"{client}: masks need a secret of 16 bytes or more with every other client, at least one"
            )
        self.client, self.secrets = client, dict(secrets)
        self.said, self.remember, self.known = dict(said or {}), remember, known
        """`said`, by context: a fingerprint of the sums that were masked for it."""

    def mask(self, sums: Moments, context: str) -> Masked:
        """Sums under masks; another message under the same context would use the masks again and is refused."""
        tensors = {
            "triangle": triangle_of(sums.gram, torch.float64),
            "cross": sums.cross,
            "total": sums.total,
            "counts": sums.counts,
        }
        plain = {name: _whole(value, len(self.secrets) + 1) for name, value in tensors.items()}
        said = hmac.digest(self.known, b"".join(plain[name].tobytes() for name in sorted(plain)), "sha256").hex()
        if self.said.setdefault(context, said) != said:
            raise ProtocolError(
                f"{self.client}: other sums were masked for '{context}' before; masks are used once, begin anew with another --out at the server"
            )
        self.remember(self.said)
        plain[CHECK] = np.zeros(CHECKED, np.uint64)
        numbers = {
            name: torch.from_numpy(self._under_masks(name, value, context).view(np.int64))
            for name, value in plain.items()
        }
        return Masked(self.client, tuple(sorted([self.client, *self.secrets])), context, numbers)

    def _under_masks(self, name: str, value: Numbers, context: str) -> Numbers:
        total = value.copy()
        for peer, secret in self.secrets.items():
            stream = _stream(secret, context, name, value.shape)
            total = total + stream if self.client < peer else total - stream
        return total


def add_up(uploads: Iterable[Masked]) -> Moments:
    """The sums of all clients together; masks that do not cancel are refused."""
    totals: dict[str, Numbers] = {}
    seen: list[str] = []
    first: Masked | None = None
    for upload in uploads:
        first = first or upload
        if (upload.context, upload.clients) != (first.context, first.clients):
            raise ProtocolError(f"{upload.client}: masked for another message than {first.client}; have all send again")
        if upload.client in seen or upload.client not in first.clients:
            raise ProtocolError(f"{upload.client}: uploaded twice or is not one of {', '.join(first.clients)}")
        seen.append(upload.client)
        for name, value in upload.numbers.items():
            mine = value.numpy().view(np.uint64)
            totals[name] = totals[name] + mine if name in totals else mine
    if first is None or set(seen) != set(first.clients):
        missing = sorted(set(first.clients) - set(seen)) if first else ["everybody"]
        raise ProtocolError(f"masks cancel only in the sum of all clients; missing: {', '.join(missing)}")
    if totals.pop(CHECK).any():
        raise ProtocolError(
            "the masks do not cancel: a client masked with another secret or not at all; have all send again"
        )
    plain = {name: torch.from_numpy(value.view(np.int64)).double() / 2**FRACTION for name, value in totals.items()}
    gram = square_of(plain["triangle"], len(plain["total"]))
    if float(plain["counts"].min()) < 0 or float(gram.diagonal().min()) < 0:
        raise ProtocolError(
            "the total has negative counts or squares: a client masked something else than sums; have all send again"
        )
    return Moments(gram, plain["cross"], plain["total"], plain["counts"])


def simulated(client: str, clients: Iterable[str], seed: int) -> Masker:
    """A client's masks in a simulation. Whoever knows the seed knows what it shares with the others: masks that hide nothing."""
    shared = {
        peer: hashlib.sha256(f"oneround simulation/{seed}/{'/'.join(sorted((client, peer)))}".encode()).digest()
        for peer in clients
        if peer != client
    }
    return Masker(client, shared)


def _whole(value: Tensor, clients: int) -> Numbers:
    """Fixed-point numbers; the total of that many clients must still fit."""
    scaled = value.cpu().double() * 2**FRACTION
    if not bool(torch.isfinite(scaled).all()):
        raise ProtocolError("sums that are not finite cannot be masked; look at the images and the features")
    most = 2.0**62 / clients
    if float(scaled.abs().max()) > most:
        raise ProtocolError(
            f"a sum of {float(value.abs().max()):.3g} is too large to be masked; at most {most / 2**FRACTION:.3g}"
        )
    whole: Numbers = scaled.round().long().numpy().view(np.uint64)
    return whole


def _stream(secret: bytes, context: str, name: str, shape: tuple[int, ...]) -> Numbers:
    """Uniform 64-bit numbers that both holders of the secret can make."""
    told = f"oneround mask/{context}/{name}".encode()
    key = hashlib.sha256(len(secret).to_bytes(4, "big") + secret + told).digest()
    return np.frombuffer(hashlib.shake_256(key).digest(8 * int(np.prod(shape, dtype=int))), np.uint64).reshape(shape)
