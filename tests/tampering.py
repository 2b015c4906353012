"""Uploads that somebody changed, and how they are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from oneround import acts
from oneround.config.recipe import Recipe
from oneround.errors import ProtocolError
from oneround.protocol import Broadcast, Upload, blob

Federation = tuple[Recipe, Broadcast, list[Upload]]


def refuse(federation: Federation, raw: bytes, words: str) -> None:
    _, broadcast, _ = federation
    with pytest.raises(ProtocolError, match=words) as caught:
        Upload.unpack(raw, broadcast, acts.statistics_of(broadcast), "from-site-7")
    assert str(caught.value).startswith("from-site-7: refused")
    assert "\n" not in str(caught.value)


def altered(upload: Upload, **changes: Any) -> bytes:
    return replace(upload, **changes).pack()


def repacked(raw: bytes, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> bytes:
    """An upload with other tensors or another manifest, whose checksum is right."""
    manifest, own = blob.unpack(raw, "upload", "upload")
    kept = {key: value for key, value in manifest.items() if key not in ("format", "kind", "shapes", "sha256")}
    return blob.pack("upload", {**own, **(tensors or {})}, {**kept, **changes})


def worded(raw: bytes, **changes: Any) -> bytes:
    """The same tensors under a manifest with other words, as somebody else's program may write it."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    manifest = {**json.loads(header["__metadata__"]["oneround"]), **changes}
    header["__metadata__"]["oneround"] = json.dumps(manifest)
    return framed(json.dumps(header).encode(), raw[8 + length :])


def framed(header: bytes, tensors: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + tensors


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value
