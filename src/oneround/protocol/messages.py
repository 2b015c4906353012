"""Messages: Broadcast from the server to the sites, Upload from a site to the server."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from oneround.config.load import parse_federated
from oneround.config.recipe import Federated, digest_of
from oneround.errors import ProtocolError, refused
from oneround.models.prototype import Layout
from oneround.protocol import blob
from oneround.protocol.encoding import bytes_of, decode, encode, encoded_layout, layout_of
from oneround.protocol.validate import check_history, check_masks, check_sums, check_weights, counts_of
from oneround.sums import size_of, sums_layout

History = list[dict[str, Any]]
SLACK = 16 * 2**20  # bytes for an upload's manifest, history and header, beside its tensors


@dataclass(frozen=True)
class Broadcast:
    """Server to sites, before training: the federated half of the recipe and the initial weights."""

    recipe: Federated
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    """(channels, height, width) of the images"""
    weights: dict[str, Tensor]
    """The network's initial parameters and norm statistics, prototypes among them; empty where no network is trained."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Further tensors that the recipe's parts need at every site: `anchors`, `bank.features`, `bank.labels`, `features.*`."""
    round: int = 1
    """Number of the round that it starts, from 1."""
    roster: dict[str, str] = field(default_factory=dict)
    """For masked sums: the clients whose masks cancel together, each with its public key (empty in a simulation)."""
    generator: dict[str, Tensor] = field(default_factory=dict)
    """The generator's initial parameters; empty where none is trained."""
    depths: dict[str, int] = field(default_factory=dict)
    """Where the server chose a split before training: the clients with the number of blocks that each shares."""
    experts: tuple[str, ...] = ()
    """In a second exchange: the clients whose networks are in the extras, in the order of their features."""
    digest: str = ""
    """SHA-256 of the recipe's federated half as first written; every upload must carry it.

    It is stored and never recomputed, so that keys added to recipes by later versions invalidate no upload.
    """

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", self.recipe.digest)

    @property
    def first_epoch(self) -> int:
        """Number of local epochs completed when this round begins."""
        return (self.round - 1) * self.recipe.round_epochs

    @property
    def last_epoch(self) -> int:
        """Number of local epochs completed when this round ends."""
        return self.first_epoch + (1 if self.experts else self.recipe.round_epochs)

    @property
    def masked(self) -> bool:
        """Whether uploads that answer it are under masks."""
        return self.recipe.secure and bool(self.sums)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def parameters(self) -> int:
        """Number of values in the networks; 0 where none is trained."""
        return sum(tensor.numel() for tensor in prefixed(**self.networks).values())

    @property
    def networks(self) -> dict[str, dict[str, Tensor]]:
        """Every network's values, by the name that its tensors have in a message."""
        return {"weights": self.weights, "generator": self.generator}

    @cached_property
    def sums(self) -> Layout:
        """Names, shapes and types of the sums every upload must carry."""
        if self.recipe.sums is None or (self.recipe.stacked and not self.experts):
            return {}
        return sums_layout(self.recipe, size_of(self.recipe, self.shape, len(self.experts)), self.classes)

    @cached_property
    def context(self) -> str:
        """SHA-256 of the whole message; masks are bound to it."""
        return hashlib.sha256(self.pack()).hexdigest()

    def pack(self) -> bytes:
        manifest = {
            "recipe": self.recipe.plain(),
            "recipe_digest": self.digest,
            "class_names": list(self.class_names),
            "shape": list(self.shape),
            "round": self.round,
            "roster": sorted(self.roster.items()),
        }
        if self.depths:
            manifest["depths"] = dict(sorted(self.depths.items()))
        if self.experts:
            manifest["experts"] = list(self.experts)
        return blob.pack("broadcast", prefixed(**self.networks, extras=self.extras), manifest)

    @staticmethod
    def unpack(raw: bytes, where: str = "broadcast") -> Broadcast:
        return Broadcast._from(*blob.unpack(raw, where, "broadcast"), where)._with_context_of(raw)

    def write(self, path: str | PathLike[str]) -> None:
        blob.write_durably(Path(path), self.pack())

    @staticmethod
    def read(path: str | PathLike[str]) -> Broadcast:
        broadcast = Broadcast._from(*blob.read(Path(path), "broadcast"), str(path))
        return broadcast._with_context_of(Path(path).read_bytes()) if broadcast.recipe.secure else broadcast

    def _with_context_of(self, raw: bytes) -> Broadcast:
        """Itself, its context set from the received bytes, whichever version wrote them."""
        self.__dict__["context"] = hashlib.sha256(raw).hexdigest()
        return self

    @staticmethod
    def _from(manifest: blob.Manifest, tensors: dict[str, Tensor], where: str) -> Broadcast:
        try:
            recipe, number, roster = parse_federated(manifest["recipe"]), manifest["round"], manifest.get("roster", [])
            if not 1 <= number <= recipe.exchanges:
                raise ValueError(f"round {number} of {recipe.exchanges}")
            if len(dict(roster)) != len(roster):
                raise ValueError("a name stands twice in the roster")
            digest = manifest.get("recipe_digest") or digest_of(manifest["recipe"])
        except (KeyError, TypeError, ValueError) as error:
            raise refused(where, f"damaged manifest ({error!r})") from None
        channels, height, width = manifest["shape"]
        names, shape = tuple(manifest["class_names"]), (channels, height, width)
        groups = split_by_prefix(tensors, "weights", "generator", "extras")
        return Broadcast(
            recipe,
            names,
            shape,
            **groups,
            round=number,
            roster=dict(roster),
            depths=manifest.get("depths", {}),
            experts=tuple(manifest.get("experts", ())),
            digest=digest,
        )


@dataclass(frozen=True)
class Upload:
    """Site to server: its networks, its sums, its class counts and the statistics that fusion rules require."""

    client: str
    recipe_digest: str
    epoch: int
    """Number of local epochs completed; a snapshot has fewer than the round."""
    class_counts: Tensor
    """(classes,) int64: the client's samples of each class; empty where sums are masked."""
    weights: dict[str, Tensor]
    """Empty where no network is trained."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    generator: dict[str, Tensor] = field(default_factory=dict)
    """The moving average of its generator's weights; empty where none is trained."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums of fixed features over its images, as `sums.packed` packs them; empty where the recipe asks for none."""
    history: History = field(default_factory=list)
    """Training metrics, one entry per epoch."""
    stopped: str = ""
    """Why training stopped early; empty if it did not."""
    encoding: str = "fp32"
    """Encoding of its tensors in a message; here they are decoded."""
    roster: tuple[str, ...] = ()
    """For masked sums: all clients whose masks cancel together."""
    context: str = ""
    """For masked sums: the context of the broadcast they answer."""

    @property
    def samples(self) -> int:
        return int(self.class_counts.sum())

    @property
    def content(self) -> str:
        """SHA-256 of the tensors, the client and the counts, without times or paths."""
        tensors = blob.checksum(self._tensors())
        return _content(self.client, self.recipe_digest, self.epoch, self.class_counts.tolist(), tensors)

    @staticmethod
    def content_of(path: str | PathLike[str]) -> str:
        """`content` of an upload file, from its manifest alone; for a file whose tensors have been checked already."""
        manifest = blob.peek(Path(path), "upload")
        return _content(*(manifest[key] for key in ("client", "recipe_digest", "epoch", "class_counts", "sha256")))

    @property
    def networks(self) -> dict[str, dict[str, Tensor]]:
        """Every network's values, by the name that its tensors have in a message."""
        return {"weights": self.weights, "generator": self.generator}

    def _tensors(self) -> dict[str, Tensor]:
        encoded = encode(prefixed(**self.networks, statistics=self.statistics), self.encoding)
        return encoded | prefixed(sums=self.sums)  # sums have a precision of their own

    def _manifest(self) -> blob.Manifest:
        manifest: blob.Manifest = {
            "client": self.client,
            "recipe_digest": self.recipe_digest,
            "epoch": self.epoch,
            "class_counts": self.class_counts.tolist(),
            "history": self.history,
            "stopped": self.stopped,
        }
        if self.roster:
            manifest |= {"roster": list(self.roster), "context": self.context}
        return manifest

    def pack(self) -> bytes:
        return blob.pack("upload", self._tensors(), self._manifest())

    def write(self, path: str | PathLike[str], *, flush: bool = True) -> None:
        blob.write(Path(path), "upload", self._tensors(), self._manifest(), flush=flush, read_soon=True)

    @staticmethod
    def unpack(raw: bytes, broadcast: Broadcast, statistics: Shapes, where: str = "upload") -> Upload:
        """An upload that answers this broadcast with exactly the required statistics, or a `ProtocolError`."""
        manifest, tensors = blob.unpack(raw, where, "upload", max_upload_bytes(broadcast, statistics))
        return Upload._from(manifest, tensors, broadcast, statistics, where)

    @staticmethod
    def read(
        path: str | PathLike[str], broadcast: Broadcast, statistics: Shapes, known_sums: set[str] | None = None
    ) -> Upload:
        """`known_sums`: checksums of sums that need not be checked again; those of this upload are added."""
        path = Path(path)
        manifest, tensors, checksums = blob.read_parts(path, "upload", max_upload_bytes(broadcast, statistics))
        sums = checksums.get("sums", "")
        upload = Upload._from(manifest, tensors, broadcast, statistics, str(path), sums in (known_sums or ()))
        if known_sums is not None:
            known_sums.add(sums)
        return upload

    @staticmethod
    def epoch_of(path: str | PathLike[str]) -> int | None:
        """The epoch of an upload file, or None if it is missing or damaged; the whole file is read and checked."""
        try:
            return int(blob.read(Path(path), "upload")[0]["epoch"])
        except ProtocolError:
            return None

    @staticmethod
    def _from(
        manifest: blob.Manifest,
        tensors: dict[str, Tensor],
        broadcast: Broadcast,
        statistics: Shapes,
        where: str,
        summed: bool = False,
    ) -> Upload:
        """`summed`: its sums are known to be possible."""
        if manifest["recipe_digest"] != broadcast.digest:
            raise refused(
                where,
                f"it answers another recipe ({manifest['recipe_digest'][:12]}…, expected {broadcast.digest[:12]}…)",
            )
        tensors = _decoded(tensors, broadcast, statistics, where)
        masked = broadcast.masked
        counts = [] if masked else counts_of(manifest, tensors.get("sums.counts"), broadcast, where)
        groups = split_by_prefix(tensors, "weights", "generator", "statistics", "sums")
        check_weights(groups["weights"], where)
        if groups["sums"] and not masked and not summed:
            check_sums(groups["sums"], where)
        epoch, client = manifest["epoch"], manifest["client"]
        first, last = broadcast.first_epoch, broadcast.last_epoch
        if not first <= epoch <= last:
            raise refused(where, f"{client} at epoch {epoch}; expected {first} to {last}")
        if masked:
            check_masks(manifest, client, broadcast, where)
        check_history(manifest["history"], broadcast, where)
        return Upload(
            client,
            broadcast.digest,
            epoch,
            torch.tensor(counts, dtype=torch.int64),
            **groups,
            history=manifest["history"],
            stopped=manifest.get("stopped", ""),
            encoding=broadcast.recipe.upload.encoding,
            roster=tuple(sorted(broadcast.roster)),
            context=broadcast.context if masked else "",
        )


Shapes = dict[str, tuple[int, ...]]


def _content(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _decoded(tensors: dict[str, Tensor], broadcast: Broadcast, statistics: Shapes, where: str) -> dict[str, Tensor]:
    """An upload's decoded tensors; names, shapes and types must be those this broadcast requires."""
    decoded_layout = layout_of(prefixed(**broadcast.networks))
    decoded_layout |= {f"statistics.{name}": (shape, torch.float32) for name, shape in statistics.items()}
    encoding = broadcast.recipe.upload.encoding
    sums = {f"sums.{name}": layout for name, layout in broadcast.sums.items()}
    expected, got = encoded_layout(decoded_layout, encoding) | sums, layout_of(tensors)
    for name in sorted(expected.keys() | got.keys()):
        if name not in got or name not in expected:
            raise refused(where, f"tensor {name} is {'missing' if name in expected else 'not asked for'}")
        if got[name] != expected[name]:
            (shape, dtype), (expected_shape, expected_dtype) = got[name], expected[name]
            raise refused(where, f"{name} is {dtype} {shape}, expected {expected_dtype} {expected_shape}")
    decoded = decode({name: value for name, value in tensors.items() if name not in sums}, encoding)
    for name, tensor in decoded.items() if encoding != "fp32" else ():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise refused(where, f"{name} holds values that are not finite once decoded")
    return decoded | {name: tensors[name] for name in sums}


def check_norms(upload: Upload, broadcast: Broadcast, where: str) -> None:
    """Refuse a tensor whose norm exceeds `upload.largest_norm` times the broadcast's.

    A tensor that starts near zero (a bias, a running mean) is compared with ones. A running variance is a square, so its
    factor is squared.
    """
    factor = broadcast.recipe.upload.largest_norm
    uploaded = prefixed(**upload.networks)
    for name, start in prefixed(**broadcast.networks).items():
        if not start.is_floating_point():
            continue
        norm, floor = float(uploaded[name].double().norm()), start.numel() ** 0.5
        bound = factor ** (2 if name.endswith("running_var") else 1) * max(float(start.double().norm()), floor)
        if norm > bound:
            raise refused(
                where,
                f"{name.removeprefix('weights.')} has norm {norm:.3g}, more than {bound:.3g} (upload.largest_norm = {factor:g})",
            )


def prefixed(**parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Several dictionaries in one, each with its prefix: `weights.prototypes`, `extras.anchors`, …"""
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def split_by_prefix(tensors: dict[str, Tensor], *prefixes: str) -> dict[str, dict[str, Tensor]]:
    """The reverse of `prefixed`."""
    return {prefix: strip_prefix(tensors, prefix) for prefix in prefixes}


def strip_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix.`, under the rest of their names."""
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}


def max_upload_bytes(broadcast: Broadcast, statistics: Shapes) -> int:
    """The maximum size of an upload to this broadcast."""
    statistics_bytes = sum(4 * math.prod(shape) for shape in statistics.values())
    return bytes_of(layout_of(prefixed(**broadcast.networks))) + statistics_bytes + bytes_of(broadcast.sums) + SLACK


class UploadFolder(Sequence[Upload]):
    """Uploads on disk, read and checked one at a time on access; nothing is kept in memory."""

    def __init__(
        self,
        paths: Iterable[str | PathLike[str]],
        broadcast: Broadcast,
        statistics: Shapes,
        known_sums: set[str] | None = None,
    ) -> None:
        """`known_sums`: checksums of sums that were checked before; it grows as uploads are read."""
        self.paths, self.broadcast, self.statistics = [Path(path) for path in paths], broadcast, statistics
        self._known_sums = set() if known_sums is None else known_sums

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def sums_key(self) -> tuple[str, ...]:
        """Checksums of the uploads' sums; equal for equal sums, whatever networks come with them."""
        return tuple(blob.read_parts(path, "upload")[2].get("sums", "") for path in self.paths)

    @overload
    def __getitem__(self, at: int) -> Upload: ...

    @overload
    def __getitem__(self, at: slice) -> UploadFolder: ...

    def __getitem__(self, at: int | slice) -> Upload | UploadFolder:
        if isinstance(at, slice):
            return UploadFolder(self.paths[at], self.broadcast, self.statistics, self._known_sums)
        return self._read(self.paths[at])

    def __iter__(self) -> Iterator[Upload]:
        for path in self.paths:
            yield self._read(path)

    def _read(self, path: Path) -> Upload:
        """Read an upload; refused where its file does not have its client's name, since a copy would count twice."""
        upload = Upload.read(path, self.broadcast, self.statistics, self._known_sums)
        if upload.client != path.stem:
            name = f"{upload.client}{path.suffix}"
            raise refused(str(path), f"it is the upload of {upload.client}; give it that name, {name}, or leave it out")
        return upload
