"""One encoding for every file and message: a safetensors file with a JSON manifest in its header.

The manifest names the format version, the kind of message, every tensor's shape and a SHA-256 over all tensor bytes.
Reading checks all of it. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from oneround.errors import ProtocolError, refused
from oneround.files import write_durably as write_durably  # callers write the messages that they pack
from oneround.protocol.validate import check_manifest

FORMAT = 1
THREADED_BYTES = 4 << 20  # bytes; smaller messages are hashed faster without threads
MAX_HEADER = 100_000_000  # bytes
Manifest = dict[str, Any]


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and the SHA-256 of each tensor's bytes."""
    return _combined(_digests(tensors))


def _combined(digests: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Each tensor's line in the checksum, in their order; of large messages computed on all cores."""

    def line(name: str) -> str:
        tensor = tensors[name]
        digest = hashlib.sha256(_buffer(tensor)).hexdigest()
        return f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{digest}\n"

    names = sorted(tensors)
    if sum(tensor.nbytes for tensor in tensors.values()) < THREADED_BYTES:
        return dict(zip(names, map(line, names), strict=True))
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(line, names), strict=True))


def pieces(kind: str, tensors: Mapping[str, Tensor], manifest: Manifest) -> tuple[str, list[bytes | memoryview]]:
    """The checksum of the tensors, and a message in pieces that are its bytes one after another.

    Tensors must be on the CPU and are not copied. The bytes are those of `safetensors.torch.save`, which makes them in one go, while
    no other thread of Python runs.
    """
    digest = checksum(tensors)
    return digest, _pieces(kind, tensors, manifest, digest)


def _pieces(kind: str, tensors: Mapping[str, Tensor], manifest: Manifest, digest: str) -> list[bytes | memoryview]:
    full = {
        "format": FORMAT,
        "kind": kind,
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "sha256": digest,
        **manifest,
    }
    header: dict[str, Any] = {"__metadata__": {"oneround": json.dumps(full, sort_keys=True)}}
    order, end, content = list(TYPES), 0, []
    for name in sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name)):
        tensor = tensors[name]
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
        content.append(_buffer(tensor))
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return [len(raw).to_bytes(8, "little") + raw, *content]


TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names in the header, in the order of a file: large ones first, so that each is aligned."""


def _buffer(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def pack(kind: str, tensors: Mapping[str, Tensor], manifest: Manifest) -> bytes:
    """A message as bytes. Tensors must be on the CPU."""
    return b"".join(pieces(kind, tensors, manifest)[1])


def write(
    path: Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    manifest: Manifest,
    *,
    flush: bool = True,
    read_soon: bool = False,
) -> None:
    """Write a message, replacing the file. `read_soon`: this process reads it too, and need not check its content again."""
    digests = _digests(tensors)
    write_durably(path, *_pieces(kind, tensors, manifest, _combined(digests)), flush=flush)
    if read_soon and all(_finite(tensor) for tensor in tensors.values()):
        _remember(path, kind, _version(path), digests)


def unpack(raw: bytes, where: str, kind: str, max_bytes: int | None = None) -> tuple[Manifest, dict[str, Tensor]]:
    """A message from bytes, or a `ProtocolError` with `where` and the reason."""
    manifest, tensors, _ = _unpack(raw, where, kind, max_bytes)
    return manifest, tensors


def _unpack(
    raw: bytes, where: str, kind: str, max_bytes: int | None = None
) -> tuple[Manifest, dict[str, Tensor], dict[str, str]]:
    """A message and the digest of each of its tensors."""
    _check_size(len(raw), max_bytes, where)
    manifest = _manifest(raw, where, kind)
    try:
        tensors = safetensors.torch.load(raw)
    except Exception as error:  # the library raises several kinds on damaged input
        raise refused(where, f"damaged or truncated ({error})") from None
    if manifest.get("shapes") != {name: list(tensor.shape) for name, tensor in tensors.items()}:
        raise refused(where, "its tensors are not those its manifest lists")
    digests = _digests(tensors)
    if manifest.get("sha256") != _combined(digests):
        raise refused(where, "its content does not match its checksum")
    for name, tensor in tensors.items():
        if not _finite(tensor):
            raise refused(where, f"{name} holds values that are not finite")
    return manifest, tensors, digests


def _finite(tensor: Tensor) -> bool:
    """Whether all values are finite. So is then their sum, where it cannot overflow; adding up is faster than looking at each."""
    if not tensor.is_floating_point():
        return True
    if tensor.dtype == torch.float64:
        return bool(torch.isfinite(tensor).all())
    return math.isfinite(float(tensor.sum(dtype=torch.float64)))


def _check_size(size: int, max_bytes: int | None, where: str) -> None:
    if max_bytes is not None and size > max_bytes:
        raise refused(where, f"{size:,} bytes is more than the {max_bytes:,} this message may have")


def _manifest(raw: bytes, where: str, kind: str) -> Manifest:
    """The manifest in the header of a safetensors file, with clear errors for files of other formats."""
    if len(raw) < 8:
        raise refused(where, f"{len(raw)} bytes is too short for a safetensors file")
    length = int.from_bytes(raw[:8], "little")
    try:
        if length > min(len(raw) - 8, MAX_HEADER):
            raise ValueError
        header = json.loads(raw[8 : 8 + length])
    except RecursionError:
        raise refused(where, "its header is nested too deep") from None
    except ValueError:
        foreign = "a pickle or zip file" if raw[:1] == b"\x80" or raw[:2] == b"PK" else "truncated or foreign"
        raise refused(where, f"{foreign}; only safetensors files are read") from None
    try:
        manifest: Manifest = json.loads(header["__metadata__"]["oneround"])
    except RecursionError:
        raise refused(where, "damaged manifest (nested too deep)") from None
    except (KeyError, TypeError, ValueError):
        raise refused(where, "a safetensors file but not written by oneround (no manifest)") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise refused(where, f"format {version}; this version reads format {FORMAT}")
    if manifest.get("kind") != kind:
        raise refused(where, f"of the kind {manifest.get('kind')}, expected {kind}")
    check_manifest(manifest, kind, where)
    return manifest


def read(path: Path, kind: str, max_bytes: int | None = None) -> tuple[Manifest, dict[str, Tensor]]:
    """A message from a file. Its size is checked before reading, its content the first time this process reads it.

    After that its tensors are mapped: those that nobody looks at are not read.
    """
    manifest, tensors, _ = read_parts(path, kind, max_bytes)
    return manifest, tensors


def read_parts(
    path: Path, kind: str, max_bytes: int | None = None
) -> tuple[Manifest, dict[str, Tensor], Mapping[str, str]]:
    """`read`, and a checksum for each part of the message: of the tensors whose names begin with the same word and a dot."""
    try:
        version = _version(path)
        _check_size(version.size, max_bytes, str(path))
        known = _verified.get((path, kind))
        if known is not None and known.version == version:
            manifest = peek(path, kind)
            tensors = safetensors.torch.load_file(path)
            if _version(path) == version:
                return manifest, tensors, known.parts
            version = _version(path)  # replaced meanwhile
        raw = path.read_bytes()
    except (OSError, safetensors.SafetensorError) as error:
        raise ProtocolError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    manifest, tensors, digests = _unpack(raw, str(path), kind, max_bytes)
    return manifest, tensors, _remember(path, kind, version, digests).parts


def move(path: Path, to: Path, kind: str) -> None:
    """Replace a message by another that this process has written; it need not be checked again."""
    known = _verified.pop((path, kind), None)
    before = _version(path)
    path.replace(to)
    after = _version(to)  # renaming changes the time of its status
    if known is not None and known.version == before and after._replace(status_changed=before.status_changed) == before:
        _verified[to, kind] = known._replace(version=after)


class Version(NamedTuple):
    """What changes when a file is replaced."""

    changed: int
    status_changed: int
    inode: int
    size: int


def _version(path: Path) -> Version:
    stat = path.stat()
    return Version(stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size)


class Verified(NamedTuple):
    """A file whose content this process has verified."""

    version: Version
    parts: dict[str, str]
    """Checksum of the tensors of each part, the first word of their names."""


def _remember(path: Path, kind: str, version: Version, digests: Mapping[str, str]) -> Verified:
    if len(_verified) >= MAX_VERIFIED:
        _verified.clear()
    verified = _verified[path, kind] = Verified(version, _by_part(digests))
    return verified


def _by_part(digests: Mapping[str, str]) -> dict[str, str]:
    groups = itertools.groupby(digests.items(), lambda item: item[0].partition(".")[0])
    return {part: _combined(dict(members)) for part, members in groups}


MAX_VERIFIED = 10_000
_verified: dict[tuple[Path, str], Verified] = {}


def is_whole(path: Path, kind: str) -> bool:
    """Whether a file holds an undamaged message of this kind."""
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
            header = file.read(min(int.from_bytes(start, "little"), MAX_HEADER))
    except OSError as error:
        raise ProtocolError(f"{path}: cannot be read ({error.strerror})") from None
    return _manifest(start + header, str(path), kind)
