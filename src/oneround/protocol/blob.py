"""One encoding for everything that is written or sent: a safetensors file with a JSON manifest in its header.

The manifest names the format version, the kind of message, every tensor's shape and a SHA-256 over all tensor bytes.
Reading checks all of it. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from oneround.errors import ProtocolError

FORMAT = 1
MANY = 4 << 20  # bytes; fewer are hashed before threads have started
Manifest = dict[str, Any]


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and the SHA-256 of each tensor's bytes (many of them side by side on all cores)."""

    def line(name: str) -> str:
        tensor = tensors[name]
        inner = hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{inner.hexdigest()}\n"

    names = sorted(tensors)
    if sum(tensor.nbytes for tensor in tensors.values()) < MANY:
        return hashlib.sha256("".join(map(line, names)).encode()).hexdigest()
    with ThreadPoolExecutor() as pool:
        return hashlib.sha256("".join(pool.map(line, names)).encode()).hexdigest()


def pack(kind: str, tensors: Mapping[str, Tensor], manifest: Manifest) -> bytes:
    """A message as bytes. Tensors must be on the CPU."""
    full = {
        "format": FORMAT,
        "kind": kind,
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "sha256": checksum(tensors),
        **manifest,
    }
    return safetensors.torch.save(dict(tensors), metadata={"oneround": json.dumps(full, sort_keys=True)})


def unpack(
    raw: bytes, where: str, kind: str, max_bytes: int | None = None, *, known: bool = False
) -> tuple[Manifest, dict[str, Tensor]]:
    """A message from bytes, or a `ProtocolError` that names `where` and the reason. `known`: its content was checked before."""
    if max_bytes is not None and len(raw) > max_bytes:
        raise ProtocolError(
            f"{where}: refused, {len(raw):,} bytes is more than the {max_bytes:,} this message may have"
        )
    header = _header(raw, where)
    try:
        tensors = safetensors.torch.load(raw)
    except Exception as error:  # the library raises several kinds on damaged input
        raise ProtocolError(f"{where}: refused, damaged or truncated ({error})") from None
    manifest = _manifest(header, where, kind)
    if manifest.get("shapes") != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise ProtocolError(f"{where}: refused, its tensors are not those its manifest lists")
    if known:
        return manifest, tensors
    if manifest.get("sha256") != checksum(tensors):
        raise ProtocolError(f"{where}: refused, its content does not match its checksum")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ProtocolError(f"{where}: refused, {name} holds values that are not finite")
    return manifest, tensors


def _header(raw: bytes, where: str) -> dict[str, Any]:
    """The safetensors header, with plain words for what people hand in by mistake."""
    if len(raw) < 8:
        raise ProtocolError(f"{where}: refused, {len(raw)} bytes is too short for a safetensors file")
    length = int.from_bytes(raw[:8], "little")
    try:
        if length > min(len(raw) - 8, 100_000_000):
            raise ValueError
        header = json.loads(raw[8 : 8 + length])
    except ValueError:
        foreign = "a pickle or zip file" if raw[:1] == b"\x80" or raw[:2] == b"PK" else "truncated or foreign"
        raise ProtocolError(f"{where}: refused, {foreign}; only safetensors files are read") from None
    return header if isinstance(header, dict) else {}


def _manifest(header: dict[str, Any], where: str, kind: str) -> Manifest:
    try:
        manifest = json.loads(header["__metadata__"]["oneround"])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError(f"{where}: refused, a safetensors file but not written by oneround (no manifest)") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        version = manifest.get("format") if isinstance(manifest, dict) else None
        raise ProtocolError(f"{where}: refused, format {version}; this version reads format {FORMAT}")
    if manifest.get("kind") != kind:
        raise ProtocolError(f"{where}: refused, of the kind {manifest.get('kind')}, expected {kind}")
    return manifest


def read(path: Path, kind: str, max_bytes: int | None = None) -> tuple[Manifest, dict[str, Tensor]]:
    """A message from a file; its size is checked before it is read, its content when this process reads it first."""
    try:
        stat = path.stat()
        size, stamp = stat.st_size, (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size)
        if max_bytes is not None and size > max_bytes:
            raise ProtocolError(f"{path}: refused, {size:,} bytes is more than the {max_bytes:,} this message may have")
        raw = path.read_bytes()
    except OSError as error:
        raise ProtocolError(f"{path}: cannot be read ({error.strerror})") from None
    found = unpack(raw, str(path), kind, max_bytes, known=_checked.get((path, kind)) == stamp)
    if len(_checked) >= MOST_CHECKED:
        _checked.clear()
    _checked[path, kind] = stamp
    return found


MOST_CHECKED = 10_000
_checked: dict[tuple[Path, str], tuple[int, ...]] = {}
"""Files whose content this process has compared with its checksum, as they were then."""


def is_whole(path: Path, kind: str) -> bool:
    """Whether a file holds such a message, undamaged."""
    try:
        read(path, kind)
    except ProtocolError:
        return False
    return True


def peek(path: Path, kind: str) -> Manifest:
    """The manifest alone, without reading the tensors."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            raw = start + file.read(min(length, 100_000_000))
    except OSError as error:
        raise ProtocolError(f"{path}: cannot be read ({error.strerror})") from None
    return _manifest(_header(raw, str(path)), str(path), kind)


def write_durably(path: Path, raw: bytes, *, flush: bool = True) -> None:
    """All or nothing: a temporary file, flushed to disk, renamed into place.

    Without `flush` it survives the death of the program but not that of the machine; what is damaged then shows when read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(raw)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # a full disk does not say where, and nobody knows the temporary file
        if error.errno is not None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
