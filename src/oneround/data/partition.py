"""Partitions: rules that distribute the training samples over the clients.

A partition depends on its options, its seed and the labels alone. Except for `dirichlet-overlap` every sample goes to
exactly one client. Clients without samples stay in the list and are reported; they take no part in training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from oneround.config.parts import PartitionPart, Slot
from oneround.config.sections import Count
from oneround.data.images import Dataset
from oneround.errors import RecipeError
from oneround.seeds import derive

Index = NDArray[np.int64]
Random = np.random.RandomState
Alpha = Annotated[float, Field(gt=0, le=1e6)]
TRIES = 1000


class Pool(NamedTuple):
    """The samples to distribute, as far as a rule may know them."""

    labels: Index
    classes: int
    """How many classes there are."""
    groups: Index | None
    """Group ids, where the data has them."""

    def by_class(self) -> list[Index]:
        """The samples of each class."""
        return [np.flatnonzero(self.labels == label) for label in range(self.classes)]


@dataclass(frozen=True)
class Split:
    """A partitioned data set."""

    clients: tuple[Index, ...]
    """The sample numbers of every client."""
    counts: NDArray[np.int64]
    """(clients, classes): number of samples of each class at each client."""
    shared: int
    """Number of samples that more than one client has."""
    digest: str
    """SHA-256 over the data and every client's samples: runs are comparable if it is the same."""
    public: Index
    """The server's samples; no client has any of them."""
    validation: Index
    """The validation samples; nobody trains on them."""
    client_validation: tuple[Index, ...]
    """The validation samples of each client; empty where they come from the public images."""

    @property
    def sizes(self) -> list[int]:
        return [len(client) for client in self.clients]

    @property
    def empty(self) -> list[int]:
        return [number for number, size in enumerate(self.sizes) if size == 0]

    def remarks(self) -> list[str]:
        """Notes for readers of a result."""
        remarks = []
        if self.empty:
            names = ", ".join(map(str, self.empty))
            remarks.append(f"left with no samples and taking no part: client{'s' * (len(self.empty) > 1)} {names}")
        if self.shared:
            remarks.append(
                f"clients SHARE data: {self.shared:,} images are held by more than one client, {sum(self.sizes):,} client "
                "samples in all; accuracies are not comparable with those of disjoint partitions"
            )
        return remarks

    def plain(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "sizes": self.sizes,
            "empty": self.empty,
            "shared_samples": self.shared,
            "class_counts": self.counts.tolist(),
            "public_samples": len(self.public),
            "validation_samples": len(self.validation),
        }


class Partition(PartitionPart):
    """A rule that distributes samples over clients."""

    clients: Count = 5
    minimum: Annotated[int, Field(ge=0)] = 0
    """Fewest samples per client; a draw that gives a client fewer is repeated."""

    @property
    def label(self) -> str:
        """Its kind and every option that is set."""
        return self.describe({key: value for key, value in self.model_dump().items() if value})

    def num_clients(self, data: Dataset) -> int:
        """Number of clients with this data set; some may be left without samples."""
        return self.clients

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        """One draw: the sample numbers of each client. `random` draws the clients' sizes, `mix` shuffles the samples."""
        raise NotImplementedError

    def split(
        self, data: Dataset, seed: int, public: float = 0.0, validation: float = 0.0, clients_hold_back: bool = False
    ) -> Split:
        """Deal the data set to the clients, after taking the server's public share; RecipeError if no draw reaches `minimum`.

        What is held back for validation comes from that public share, or from every client's samples if there is none or if
        `clients_hold_back`.
        """
        clients, from_clients = self.num_clients(data), clients_hold_back or not public
        public_samples = _public(data, public, seed)
        rest = np.setdiff1d(np.arange(len(data.train)), public_samples)
        if clients > len(rest):
            raise RecipeError(f"partition.clients = {clients}: must be ≤ {len(rest)}, the number of training samples")
        if clients * self.minimum > len(rest):
            raise RecipeError(
                f"partition.minimum = {self.minimum}: {clients} clients would need {clients * self.minimum} "
                f"samples, there are {len(rest)}; must be ≤ {len(rest) // clients}"
            )
        groups = None if data.groups is None else data.groups[rest]
        pool = Pool(data.train.labels.numpy()[rest], data.classes, groups)
        rule = self.model_copy(update={"clients": clients})
        random, mix = Random(seed), _random(seed, "samples")
        held_back_share, best = validation if from_clients else 0.0, -1
        for _ in range(TRIES):
            dealt = rule.deal(pool, random, mix)
            smallest = min(len(client) - int(held_back_share * len(client)) for client in dealt)
            if smallest >= self.minimum:
                return _split([rest[client] for client in dealt], public_samples, data, validation, seed, from_clients)
            best = max(best, smallest)
        raise RecipeError(
            f"partition.minimum = {self.minimum}: no draw of {TRIES} gave every client that many (best: {best}); "
            "ask for less, fewer clients or a larger alpha"
        )


partitions: Slot[Partition] = Slot("partition", Partition, default="dirichlet")


def _random(seed: int, purpose: str) -> Random:
    return Random(derive(seed, purpose) % 2**32)


def _public(data: Dataset, share: float, seed: int) -> Index:
    """The server's share of every class, rounded, at random."""
    random = _random(seed, "public")
    classes = Pool(data.train.labels.numpy(), data.classes, None).by_class()
    return np.sort(np.concatenate([random.permutation(each)[: round(share * len(each))] for each in classes]))


def _hold_back(samples: Index, share: float, random: Random) -> Index:
    """A share of the samples at random, rounded down, so that no client is left without samples."""
    return np.sort(random.permutation(samples)[: int(share * len(samples))])


def hold_back(samples: int, share: float, seed: int) -> tuple[Index, Index]:
    """The numbers of the samples that a site trains on, and of those it holds back."""
    every = np.arange(samples)
    chosen = _hold_back(every, share, Random(seed % 2**32))
    return np.setdiff1d(every, chosen), chosen


def _split(dealt: list[Index], public: Index, data: Dataset, validation: float, seed: int, from_clients: bool) -> Split:
    labels = data.train.labels.numpy()
    random = _random(seed, "validation")
    every = np.unique(np.concatenate(dealt))
    held_back: list[Index] = [np.empty(0, np.int64) for _ in dealt]
    chosen = held_back[0]
    if not from_clients:
        chosen = _hold_back(public, validation, random)
        public = np.setdiff1d(public, chosen)
    elif validation and len(every) == sum(map(len, dealt)):
        held_back = [_hold_back(client, validation, random) for client in dealt]
        chosen = np.sort(np.concatenate(held_back))
    elif validation:  # shared samples are held back from all who have them, so they are drawn for all together
        chosen = _hold_back(every, validation, random)
        remaining = [np.setdiff1d(client, chosen) for client in dealt]
        needed = [client[:1] for client, rest in zip(dealt, remaining, strict=True) if len(client) and not len(rest)]
        chosen = np.setdiff1d(chosen, np.concatenate(needed)) if needed else chosen
        held_back = [np.intersect1d(client, chosen) for client in dealt]
    clients = tuple(np.setdiff1d(client, chosen).astype(np.int64) for client in dealt)
    counts = np.stack([np.bincount(labels[client], minlength=data.classes) for client in clients]).astype(np.int64)
    holders = np.bincount(np.concatenate(clients), minlength=len(labels))
    digest = hashlib.sha256(data.fingerprint.encode())
    for client in clients:
        digest.update(f"/{len(client)}/".encode() + client.tobytes())
    return Split(clients, counts, int((holders > 1).sum()), digest.hexdigest(), public, chosen, tuple(held_back))


def add_label_noise(labels: Index, split: Split, clients: int, share: float, classes: int, seed: int) -> Index:
    """The labels with noise: at that many clients, this share of the labels (training and validation) becomes another class at random."""
    random, noisy = _random(seed, "label noise"), labels.copy()
    with_data = [number for number, size in enumerate(split.sizes) if size]
    if clients > len(with_data):
        raise RecipeError(f"label_noise.clients = {clients}: must be ≤ {len(with_data)}, the clients with data")
    for number in np.sort(random.permutation(with_data)[:clients]):
        samples = np.concatenate([split.clients[number], split.client_validation[number]])
        wrong = random.permutation(samples)[: round(share * len(samples))]
        noisy[wrong] = (labels[wrong] + random.randint(1, classes, len(wrong))) % classes
    return noisy


def _shares(random: Random, alpha: float, parts: int) -> NDArray[np.float64]:
    """Dirichlet proportions; for an alpha so small that every gamma draw is zero, all goes to one part at random."""
    shares = random.dirichlet([alpha] * parts)
    return shares if np.isfinite(shares).all() else np.eye(parts)[random.randint(parts)]


def _to_counts(random: Random, shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Proportions → counts that sum to `total`: floored, the remainder given to distinct parts drawn at random."""
    counts = np.floor(shares * total).astype(np.int64)
    remainder = total - int(counts.sum())
    counts[random.choice(len(counts), remainder, replace=False)] += 1
    return counts


def _cut(samples: Index, counts: NDArray[np.int64]) -> list[Index]:
    return np.split(samples, np.cumsum(counts)[:-1])


def _concatenated(pieces: Iterable[Iterable[Index]]) -> list[Index]:
    """Each client's pieces in one array; there may be none."""
    return [np.concatenate([np.empty(0, np.int64), *client]) for client in pieces]


@partitions.register("dirichlet")
class Dirichlet(Partition):
    """Each class is split over the clients in Dirichlet(α) proportions; every sample once."""

    alpha: Alpha = 0.05
    """Small: each class goes to few clients. Large: every client gets the same mix."""

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        pieces = []
        for samples in pool.by_class():
            counts = _to_counts(random, _shares(random, self.alpha, self.clients), len(samples))
            pieces.append(_cut(mix.permutation(samples), counts))
        return _concatenated(zip(*pieces, strict=True))


@partitions.register("dirichlet-overlap")
class DirichletOverlap(Partition):
    """Each client takes its Dirichlet share of ten times class 0 from every class on its own, so clients share samples.

    Kept to reproduce published results; a run that uses it says so.
    """

    alpha: Alpha = 0.05

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        shares = np.stack([_shares(random, self.alpha, self.clients) for _ in range(pool.classes)])
        requested = np.round(10 * (pool.labels == 0).sum() * shares).astype(np.int64)
        pieces = [
            [mix.permutation(samples)[:number] for number in numbers]
            for samples, numbers in zip(pool.by_class(), requested, strict=True)
        ]
        return _concatenated(zip(*pieces, strict=True))


@partitions.register("iid")
class Iid(Partition):
    """Every client gets an equal random part."""

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        return list(np.array_split(mix.permutation(len(pool.labels)), self.clients))


@partitions.register("quantity-skew")
class QuantitySkew(Partition):
    """Every client gets the same mix of classes, but a Dirichlet(α) share of the samples."""

    alpha: Alpha = 0.5

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        counts = _to_counts(random, _shares(random, self.alpha, self.clients), len(pool.labels))
        return _cut(mix.permutation(len(pool.labels)), counts)


@partitions.register("shards")
class Shards(Partition):
    """Every client gets samples of `labels_per_client` classes; the holders of a class share it equally."""

    labels_per_client: Count = 2

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        classes = pool.classes
        if self.labels_per_client > classes:
            raise RecipeError(
                f"partition.labels_per_client = {self.labels_per_client}: must be ≤ {classes}, the number of classes"
            )
        if self.clients * self.labels_per_client < classes:
            raise RecipeError(
                f"partition.labels_per_client = {self.labels_per_client}: {self.clients} clients × {self.labels_per_client} "
                f"labels leave some of {classes} classes without a client; use at least {-(-classes // self.clients)}"
            )
        # Walk through a shuffled ring of classes: each class is held equally often (give or take one), never twice by one client.
        ring = random.permutation(classes)
        classes_of = [
            [int(ring[(client * self.labels_per_client + step) % classes]) for step in range(self.labels_per_client)]
            for client in range(self.clients)
        ]
        dealt: list[list[Index]] = [[] for _ in range(self.clients)]
        for label, samples in enumerate(pool.by_class()):
            holders = [client for client in range(self.clients) if label in classes_of[client]]
            for client, piece in zip(holders, np.array_split(mix.permutation(samples), len(holders)), strict=True):
                dealt[client].append(piece)
        return _concatenated(dealt)


@partitions.register("natural")
class Natural(Partition):
    """Clients as the data has them: samples with the same group id stay together."""

    clients: Count | None = None  # type: ignore[assignment]
    """Default: one client per group. With fewer clients than groups, each group goes to the smallest client, the largest group first."""

    def num_clients(self, data: Dataset) -> int:
        if data.groups is None:
            raise RecipeError("partition = natural: this data set has no group ids (group_train in the .npz)")
        groups = int(data.groups.max()) + 1
        if self.clients is not None and self.clients > groups:
            raise RecipeError(f"partition.clients = {self.clients}: must be ≤ {groups}, the number of groups")
        return groups if self.clients is None else self.clients

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        assert pool.groups is not None and self.clients is not None
        groups = range(max(int(pool.groups.max()) + 1, self.clients))
        members = [np.flatnonzero(pool.groups == group) for group in groups]
        if self.clients == len(members):
            return members
        dealt: list[list[Index]] = [[] for _ in range(self.clients)]
        for group in sorted(random.permutation(len(members)), key=lambda group: -len(members[group])):
            smallest = min(dealt, key=lambda client: sum(len(piece) for piece in client))
            smallest.append(members[group])
        return _concatenated(dealt)
