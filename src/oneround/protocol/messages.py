"""Broadcast goes down, Upload comes up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from oneround.errors import ProtocolError
from oneround.models.features import features
from oneround.protocol import blob
from oneround.protocol.claims import check_masks, check_sums, counts_of
from oneround.protocol.encoding import as_sent, decode, encode, layout_of
from oneround.reading import parse_federated
from oneround.recipe import Federated
from oneround.sums import expected
from oneround.sums.moments import Expected

History = list[dict[str, Any]]
SLACK = 16 * 2**20  # what an upload may have beside its weights and statistics: manifest, history, header


@dataclass(frozen=True)
class Broadcast:
    """What the server sends every site before training: the federated half of the recipe and where to start."""

    recipe: Federated
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    """(channels, height, width) of the images"""
    weights: dict[str, Tensor]
    """The network's initial parameters and norm statistics, prototypes among them; empty where no network is trained."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """What else the recipe's parts need at every site: `anchors`, `bank.features`, `bank.labels`, `features.*`."""
    round: int = 1
    """Which exchange it begins."""
    roster: dict[str, str] = field(default_factory=dict)
    """Where sums travel under masks: whose masks cancel together, each with its public key (none in a simulation)."""

    @property
    def first_epoch(self) -> int:
        """How many local epochs of the whole training are over when this round begins."""
        return (self.round - 1) * self.recipe.training.epochs

    @property
    def last_epoch(self) -> int:
        """How many are over when it ends."""
        return self.round * self.recipe.training.epochs

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the recipe's federated half; every upload must carry it."""
        return self.recipe.digest

    @cached_property
    def sums(self) -> Expected:
        """Names, shapes and types of the sums every upload must carry."""
        if self.recipe.sums is None:
            return {}
        return expected(self.recipe, features.of(self.recipe.sums.features).size_for(self.shape), self.classes)

    @cached_property
    def context(self) -> str:
        """SHA-256 of the whole message, for masks that are made for this one and no other."""
        return hashlib.sha256(self.pack()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return size_of(self.weights) + size_of(self.extras)

    def pack(self) -> bytes:
        said = {"class_names": list(self.class_names), "shape": list(self.shape), "round": self.round}
        manifest = {"recipe": self.recipe.plain(), **said, "roster": sorted(self.roster.items())}
        return blob.pack("broadcast", _prefixed(weights=self.weights, extras=self.extras), manifest)

    @staticmethod
    def unpack(raw: bytes, where: str = "broadcast") -> Broadcast:
        return Broadcast._from(*blob.unpack(raw, where, "broadcast"), where)

    def write(self, path: Path) -> None:
        blob.write_durably(path, self.pack())

    @staticmethod
    def read(path: Path) -> Broadcast:
        return Broadcast._from(*blob.read(path, "broadcast"), str(path))

    @staticmethod
    def _from(manifest: blob.Manifest, tensors: dict[str, Tensor], where: str) -> Broadcast:
        try:
            channels, height, width = manifest["shape"]
            recipe, names = parse_federated(manifest["recipe"]), tuple(manifest["class_names"])
            number, roster = int(manifest["round"]), [(str(name), str(key)) for name, key in manifest.get("roster", [])]
            if not 1 <= number <= recipe.rounds:
                raise ValueError(f"round {number} of {recipe.rounds}")
            if len(dict(roster)) != len(roster):
                raise ValueError("a name stands twice in the roster")
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{where}: refused, damaged manifest ({error!r})") from None
        parts = _parted(tensors, "weights", "extras")
        return Broadcast(recipe, names, (channels, height, width), **parts, round=number, roster=dict(roster))


@dataclass(frozen=True)
class Upload:
    """What a site sends back: its network, its sums, how much data it stands for, the statistics fusion rules asked for."""

    client: str
    recipe_digest: str
    epoch: int
    """After how many local epochs of the whole training; less than the round's for a snapshot."""
    class_counts: Tensor
    """(classes,) int64: samples the client holds of each class; empty where they are under masks."""
    weights: dict[str, Tensor]
    """Empty where no network is trained."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums of fixed features over its images, as `sums.packed` packs them; empty where the recipe asks for none."""
    history: History = field(default_factory=list)
    """What training measured, an entry an epoch."""
    stopped: str = ""
    """Why training ended before its time, if it did."""
    encoding: str = "fp32"
    """How its tensors travel; here they are as decoded."""
    roster: tuple[str, ...] = ()
    """Where its sums are under masks: all whose masks cancel together, and"""
    context: str = ""
    """for which broadcast they are."""

    @property
    def samples(self) -> int:
        return int(self.class_counts.sum())

    @property
    def size(self) -> int:
        """Bytes of its tensors as they travel."""
        return size_of(self._tensors())

    @property
    def content(self) -> str:
        """SHA-256 of what was learned: the tensors and whose they are, not times or paths."""
        tensors = blob.checksum(self._tensors())
        return _content(self.client, self.recipe_digest, self.epoch, self.class_counts.tolist(), tensors)

    @staticmethod
    def content_of(path: Path) -> str:
        """The same, from what an upload file says of itself; for one whose tensors have been checked before."""
        manifest = blob.peek(path, "upload")
        return _content(*(manifest[key] for key in ("client", "recipe_digest", "epoch", "class_counts", "sha256")))

    def _tensors(self) -> dict[str, Tensor]:
        coded = encode(_prefixed(weights=self.weights, statistics=self.statistics), self.encoding)
        return coded | _prefixed(sums=self.sums)  # which have a precision of their own

    def pack(self) -> bytes:
        manifest = {
            "client": self.client,
            "recipe_digest": self.recipe_digest,
            "epoch": self.epoch,
            "class_counts": self.class_counts.tolist(),
            "history": self.history,
            "stopped": self.stopped,
        }
        if self.roster:
            manifest |= {"roster": list(self.roster), "context": self.context}
        return blob.pack("upload", self._tensors(), manifest)

    def write(self, path: Path, *, flush: bool = True) -> None:
        blob.write_durably(path, self.pack(), flush=flush)

    @staticmethod
    def unpack(raw: bytes, broadcast: Broadcast, statistics: Shapes, where: str = "upload") -> Upload:
        """An upload that answers this broadcast and carries exactly the statistics asked for, or a `ProtocolError`."""
        manifest, tensors = blob.unpack(raw, where, "upload", max_upload_bytes(broadcast, statistics))
        return Upload._from(manifest, tensors, broadcast, statistics, where)

    @staticmethod
    def read(path: Path, broadcast: Broadcast, statistics: Shapes) -> Upload:
        manifest, tensors = blob.read(path, "upload", max_upload_bytes(broadcast, statistics))
        return Upload._from(manifest, tensors, broadcast, statistics, str(path))

    @staticmethod
    def epoch_of(path: Path) -> int | None:
        """The epoch of an upload file, or None if there is no whole one; all of it is read and checked."""
        try:
            return int(blob.read(path, "upload")[0]["epoch"])
        except (ProtocolError, KeyError, TypeError, ValueError):
            return None

    @staticmethod
    def _from(
        manifest: blob.Manifest, tensors: dict[str, Tensor], broadcast: Broadcast, statistics: Shapes, where: str
    ) -> Upload:
        if manifest.get("recipe_digest") != broadcast.digest:
            raise ProtocolError(
                f"{where}: refused, it answers another recipe ({str(manifest.get('recipe_digest'))[:12]}…, expected {broadcast.digest[:12]}…)"
            )
        tensors = _decoded(tensors, broadcast, statistics, where)
        masked = broadcast.recipe.secure
        counts = [] if masked else counts_of(manifest, tensors.get("sums.counts"), broadcast, where)
        parts = _parted(tensors, "weights", "statistics", "sums")
        if parts["sums"] and not masked:
            check_sums(parts["sums"], where)
        epoch, client = manifest.get("epoch"), manifest.get("client")
        first, last = broadcast.first_epoch, broadcast.last_epoch
        if type(epoch) is not int or not first <= epoch <= last or not isinstance(client, str):
            raise ProtocolError(
                f"{where}: refused, client {client!r} at epoch {epoch!r}; expected a name and {first} to {last}"
            )
        if masked:
            check_masks(manifest, client, broadcast, where)
        history = manifest.get("history")
        return Upload(
            client, broadcast.digest, epoch, torch.tensor(counts, dtype=torch.int64), **parts,
            history=history if isinstance(history, list) else [], stopped=str(manifest.get("stopped", "")),
            encoding=broadcast.recipe.upload.encoding,
            roster=tuple(sorted(broadcast.roster)), context=broadcast.context if masked else "",
        )  # fmt: skip


Shapes = dict[str, tuple[int, ...]]


def _content(*said: object) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _decoded(tensors: dict[str, Tensor], broadcast: Broadcast, statistics: Shapes, where: str) -> dict[str, Tensor]:
    """An upload's tensors, which must be the ones this broadcast asks for, as it asks for them."""
    meant = {f"weights.{name}": value for name, value in layout_of(broadcast.weights).items()}
    meant |= {f"statistics.{name}": (shape, torch.float32) for name, shape in statistics.items()}
    encoding = broadcast.recipe.upload.encoding
    sums = {f"sums.{name}": asked for name, asked in broadcast.sums.items()}
    expected, got = as_sent(meant, encoding) | sums, layout_of(tensors)
    for name in sorted(expected.keys() | got.keys()):
        if name not in got or name not in expected:
            raise ProtocolError(
                f"{where}: refused, tensor {name} is {'missing' if name in expected else 'not asked for'}"
            )
        if got[name] != expected[name]:
            (shape, dtype), wanted = got[name], expected[name]
            raise ProtocolError(f"{where}: refused, {name} is {dtype} {shape}, expected {wanted[1]} {wanted[0]}")
    decoded = decode({name: value for name, value in tensors.items() if name not in sums}, encoding)
    for name, tensor in decoded.items() if encoding != "fp32" else ():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ProtocolError(f"{where}: refused, {name} holds values that are not finite once decoded")
    return decoded | {name: tensors[name] for name in sums}


def check_norms(upload: Upload, broadcast: Broadcast, where: str) -> None:
    """Refuse a tensor far larger than where everybody started: `upload.largest_norm` times the broadcast's norm.

    A tensor that starts near zero (a bias, a running mean) may come to that many times one per entry. A running variance is a
    square, so its bound is one too.
    """
    factor = broadcast.recipe.upload.largest_norm
    for name, start in broadcast.weights.items():
        if not start.is_floating_point():
            continue
        norm, floor = float(upload.weights[name].double().norm()), start.numel() ** 0.5
        bound = factor ** (2 if name.endswith("running_var") else 1) * max(float(start.double().norm()), floor)
        if norm > bound:
            raise ProtocolError(
                f"{where}: refused, {name} has norm {norm:.3g}, more than {bound:.3g} (upload.largest_norm = {factor:g})"
            )


def size_of(tensors: dict[str, Tensor]) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _prefixed(**parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Several dictionaries in one: `weights.prototypes`, `extras.anchors`, …"""
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def _parted(tensors: dict[str, Tensor], *parts: str) -> dict[str, dict[str, Tensor]]:
    """The reverse."""
    return {
        part: {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}
        for part in parts
    }


def max_upload_bytes(broadcast: Broadcast, statistics: Shapes) -> int:
    """The most an upload to this broadcast may measure."""
    asked = sum(4 * int(torch.Size(shape).numel()) for shape in statistics.values())
    return size_of(broadcast.weights) + asked + sums_bytes(broadcast.sums) + SLACK


def sums_bytes(sums: Expected) -> int:
    """Bytes of the sums in an upload."""
    return sum(dtype.itemsize * int(torch.Size(shape).numel()) for shape, dtype in sums.values())


class UploadFolder(Sequence[Upload]):
    """Uploads on disk, read and checked one at a time when they are looked at; nothing is kept in memory."""

    def __init__(self, paths: Sequence[Path], broadcast: Broadcast, statistics: Shapes) -> None:
        self.paths, self.broadcast, self.statistics = list(paths), broadcast, statistics

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def key(self) -> tuple[str, ...]:
        """What is in it, as the files say: the same for the same uploads."""
        return tuple(str(blob.peek(path, "upload")["sha256"]) for path in self.paths)

    @overload
    def __getitem__(self, at: int) -> Upload: ...

    @overload
    def __getitem__(self, at: slice) -> UploadFolder: ...

    def __getitem__(self, at: int | slice) -> Upload | UploadFolder:
        if isinstance(at, slice):
            return UploadFolder(self.paths[at], self.broadcast, self.statistics)
        return self._read(self.paths[at])

    def __iter__(self) -> Iterator[Upload]:
        for path in self.paths:
            yield self._read(path)

    def _read(self, path: Path) -> Upload:
        """An upload that lies under its client's name: a copy under another one would count twice."""
        upload = Upload.read(path, self.broadcast, self.statistics)
        if upload.client != path.stem:
            raise ProtocolError(
                f"{path}: refused, it is the upload of {upload.client}; give it that name, {upload.client}{path.suffix}, or leave it out"
            )
        return upload
