"""Who holds what: rules that deal the training samples out to clients.

A partition depends on its options, its seed and the labels alone. Except for `dirichlet-overlap` every sample goes to
exactly one client. Clients left with nothing are kept in the list and reported; they take no part in training.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from oneround.data.images import Dataset
from oneround.errors import RecipeError
from oneround.parts import Part, Slot
from oneround.seeds import derive

Index = NDArray[np.int64]
Random = np.random.RandomState
TRIES = 1000


class Pool(NamedTuple):
    """What a partition may look at: the labels, how many classes there are, and group ids where the data has them."""

    labels: Index
    classes: int
    groups: Index | None


@dataclass(frozen=True)
class Split:
    """A partition that was dealt: the sample numbers of every client."""

    clients: tuple[Index, ...]
    counts: NDArray[np.int64]
    """(clients, classes): how many samples of each class each client holds."""
    shared: int
    """How many samples are held by more than one client."""
    digest: str
    """SHA-256 over the data and who holds which sample: runs are comparable when it is the same."""
    public: Index
    """The samples the server keeps; no client holds any of them."""
    validation: Index
    """The samples held back to choose by; nobody trains on them."""
    held: tuple[Index, ...]
    """Which of those each client held back itself; none where they come from the public images."""

    @property
    def sizes(self) -> list[int]:
        return [len(client) for client in self.clients]

    @property
    def empty(self) -> list[int]:
        return [number for number, size in enumerate(self.sizes) if size == 0]

    def remarks(self) -> list[str]:
        """What a reader of a result has to know about this partition."""
        told = []
        if self.empty:
            names = ", ".join(map(str, self.empty))
            told.append(f"left with no samples and taking no part: client{'s' * (len(self.empty) > 1)} {names}")
        if self.shared:
            told.append(
                f"clients SHARE data: {self.shared:,} images are held by more than one client, {sum(self.sizes):,} client "
                "samples in all; accuracies are not comparable with those of disjoint partitions"
            )
        return told

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


class Partition(Part):
    """A rule that deals samples out."""

    clients: Annotated[int, Field(ge=1)] = 5
    minimum: Annotated[int, Field(ge=0)] = 0
    """Fewest samples a client may end with; a draw that leaves less is drawn again."""

    @property
    def label(self) -> str:
        """Its kind and every option that says something."""
        return self.words({key: value for key, value in self.model_dump().items() if value})

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        """One draw: the sample numbers of each client. `random` draws who gets how much, `mix` which samples."""
        raise NotImplementedError

    def split(
        self,
        data: Dataset,
        seed: int,
        public: float = 0.0,
        validation: float = 0.0,
        clients_hold_back: bool | None = None,
    ) -> Split:
        """Deal the data set out, honouring `minimum` or saying why it cannot be; before that the server takes its public share.

        What is held back for validation comes from every client's samples or from that public share; left open: from the latter
        if there is one.
        """
        of_clients = not public if clients_hold_back is None else clients_hold_back
        kept = _public(data, public, seed)
        rest = np.setdiff1d(np.arange(len(data.train)), kept)
        labels = data.train.labels.numpy()[rest]
        if self.clients > len(labels):
            raise RecipeError(
                f"partition.clients = {self.clients}: must be ≤ {len(labels)}, the number of training samples"
            )
        if self.clients * self.minimum > len(labels):
            raise RecipeError(
                f"partition.minimum = {self.minimum}: {self.clients} clients would need {self.clients * self.minimum} "
                f"samples, there are {len(labels)}; must be ≤ {len(labels) // self.clients}"
            )
        pool = Pool(labels, data.classes, None if data.groups is None else data.groups[rest])
        random, mix = Random(seed), Random(derive(seed, "samples") % 2**32)
        best = -1
        for _ in range(TRIES):
            dealt = self.deal(pool, random, mix)
            held = validation if of_clients else 0.0
            smallest = min(len(client) - int(held * len(client)) for client in dealt)
            if smallest >= self.minimum:
                return _split([rest[client] for client in dealt], kept, data, validation, seed, of_clients)
            best = max(best, smallest)
        raise RecipeError(
            f"partition.minimum = {self.minimum}: no draw of {TRIES} gave every client that many (best: {best}); "
            "ask for less, fewer clients or a larger alpha"
        )


partitions: Slot[Partition] = Slot("partition", Partition, default="dirichlet")


def _public(data: Dataset, share: float, seed: int) -> Index:
    """That share of every class, rounded, at random."""
    labels, random = data.train.labels.numpy(), Random(derive(seed, "public") % 2**32)
    each = [random.permutation(np.flatnonzero(labels == label)) for label in range(data.classes)]
    return np.sort(np.concatenate([samples[: round(share * len(samples))] for samples in each])).astype(np.int64)


def _hold_back(samples: Index, share: float, random: Random) -> tuple[Index, Index]:
    """(kept, held back): that share at random, rounded down, so that nobody is left with nothing."""
    held = np.sort(random.permutation(samples)[: int(share * len(samples))])
    return np.setdiff1d(samples, held), held


def _split(dealt: list[Index], public: Index, data: Dataset, validation: float, seed: int, of_clients: bool) -> Split:
    labels = data.train.labels.numpy()
    random = Random(derive(seed, "validation") % 2**32)
    held: list[Index] = [np.empty(0, np.int64) for _ in dealt]
    chosen = held[0]
    if not of_clients:
        public, chosen = _hold_back(public, validation, random)
    elif validation and len(np.unique(np.concatenate(dealt))) == sum(map(len, dealt)):
        held = [_hold_back(client, validation, random)[1] for client in dealt]
        chosen = np.sort(np.concatenate(held))
    elif validation:  # shared samples are held back from all who have them, so they are drawn for all together
        chosen = _hold_back(np.unique(np.concatenate(dealt)), validation, random)[1]
        left = [np.setdiff1d(client, chosen) for client in dealt]
        needed = [client[:1] for client, kept in zip(dealt, left, strict=True) if len(client) and not len(kept)]
        chosen = np.setdiff1d(chosen, np.concatenate(needed)) if needed else chosen
        held = [np.intersect1d(client, chosen) for client in dealt]
    clients = tuple(np.setdiff1d(client, chosen).astype(np.int64) for client in dealt)
    counts = np.stack([np.bincount(labels[client], minlength=data.classes) for client in clients]).astype(np.int64)
    holders = np.bincount(np.concatenate(clients), minlength=len(labels))
    digest = hashlib.sha256(data.fingerprint.encode())
    for client in clients:
        digest.update(f"/{len(client)}/".encode() + client.tobytes())
    return Split(clients, counts, int((holders > 1).sum()), digest.hexdigest(), public, chosen, tuple(held))


def spoil(labels: Index, split: Split, clients: int, share: float, classes: int, seed: int) -> Index:
    """Labels with that share of so many clients' samples, trained on or held back, moved to another class at random."""
    random, wrong = Random(derive(seed, "label noise") % 2**32), labels.copy()
    with_data = [number for number, size in enumerate(split.sizes) if size]
    if clients > len(with_data):
        raise RecipeError(f"label_noise.clients = {clients}: must be ≤ {len(with_data)}, the clients with data")
    for number in np.sort(random.permutation(with_data)[:clients]):
        mine = np.concatenate([split.clients[number], split.held[number]])
        chosen = random.permutation(mine)[: round(share * len(mine))]
        wrong[chosen] = (labels[chosen] + random.randint(1, max(2, classes), len(chosen))) % classes
    return wrong


def _shares(random: Random, alpha: float, parts: int) -> NDArray[np.float64]:
    """Dirichlet proportions; for an alpha so small that every gamma draw is zero, all goes to one part at random."""
    shares = random.dirichlet([alpha] * parts)
    return shares if np.isfinite(shares).all() else np.eye(parts)[random.randint(parts)]


def _whole(random: Random, shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Proportions → counts that sum to `total`: floored, the remainder given to distinct parts drawn at random."""
    counts = np.floor(shares * total).astype(np.int64)
    remainder = total - int(counts.sum())
    counts[random.choice(len(counts), remainder, replace=False)] += 1
    return counts


def _cut(samples: Index, counts: NDArray[np.int64]) -> list[Index]:
    return np.split(samples, np.cumsum(counts)[:-1])


@partitions.register("dirichlet")
class Dirichlet(Partition):
    """Each class is dealt to the clients in Dirichlet(α) proportions; every sample once."""

    alpha: Annotated[float, Field(gt=0, le=1e6)] = 0.05
    """Small: each class goes to few clients. Large: everybody gets the same mix."""

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        dealt: list[list[Index]] = [[] for _ in range(self.clients)]
        for label in range(pool.classes):
            samples = np.flatnonzero(pool.labels == label)
            counts = _whole(random, _shares(random, self.alpha, self.clients), len(samples))
            for client, piece in zip(dealt, _cut(mix.permutation(samples), counts), strict=True):
                client.append(piece)
        return [np.concatenate(client) for client in dealt]


@partitions.register("dirichlet-overlap")
class DirichletOverlap(Partition):
    """Each client takes its Dirichlet share of ten times class 0 from every class on its own, so clients share samples.

    Kept to reproduce published numbers that were made this way; a run that uses it says so.
    """

    alpha: Annotated[float, Field(gt=0, le=1e6)] = 0.05

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        shares = np.stack([_shares(random, self.alpha, self.clients) for _ in range(pool.classes)])
        wanted = np.round(10 * (pool.labels == 0).sum() * shares)
        dealt: list[list[Index]] = [[] for _ in range(self.clients)]
        for label in range(pool.classes):
            samples = np.flatnonzero(pool.labels == label)
            for client in range(self.clients):
                take = int(min(len(samples), wanted[label, client]))
                dealt[client].append(mix.permutation(samples)[:take])
        return [np.concatenate(client) for client in dealt]


@partitions.register("iid")
class Iid(Partition):
    """Everybody gets an equal random part."""

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        return list(np.array_split(mix.permutation(len(pool.labels)), self.clients))


@partitions.register("quantity-skew")
class QuantitySkew(Partition):
    """Everybody gets the same mix of classes, but Dirichlet(α) shares of the whole."""

    alpha: Annotated[float, Field(gt=0, le=1e6)] = 0.5

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        counts = _whole(random, _shares(random, self.alpha, self.clients), len(pool.labels))
        return _cut(mix.permutation(len(pool.labels)), counts)


@partitions.register("shards")
class Shards(Partition):
    """Everybody gets samples of `labels_per_client` classes; the holders of a class share it equally."""

    labels_per_client: Annotated[int, Field(ge=1)] = 2

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        classes = pool.classes
        if self.labels_per_client > classes:
            raise RecipeError(
                f"partition.labels_per_client = {self.labels_per_client}: must be ≤ {classes}, the number of classes"
            )
        if self.clients * self.labels_per_client < classes:
            raise RecipeError(
                f"partition.labels_per_client = {self.labels_per_client}: {self.clients} clients × {self.labels_per_client} "
                f"labels leave some of {classes} classes to nobody; use at least {-(-classes // self.clients)}"
            )
        # Walk through a shuffled ring of classes: each class is held equally often (give or take one), never twice by one client.
        ring = random.permutation(classes)
        held = [
            [int(ring[(client * self.labels_per_client + step) % classes]) for step in range(self.labels_per_client)]
            for client in range(self.clients)
        ]
        dealt: list[list[Index]] = [[] for _ in range(self.clients)]
        for label in range(pool.classes):
            holders = [client for client in range(self.clients) if label in held[client]]
            samples = mix.permutation(np.flatnonzero(pool.labels == label))
            for client, piece in zip(holders, np.array_split(samples, len(holders)), strict=True):
                dealt[client].append(piece)
        return [np.concatenate(client) for client in dealt]


@partitions.register("natural")
class Natural(Partition):
    """Clients as the data has them: samples with the same group id stay together."""

    clients: Annotated[int, Field(ge=1)] | None = None  # type: ignore[assignment]
    """Left out: one client per group. Fewer than groups: groups are dealt out, the largest first, to the smallest client."""

    def split(
        self,
        data: Dataset,
        seed: int,
        public: float = 0.0,
        validation: float = 0.0,
        clients_hold_back: bool | None = None,
    ) -> Split:
        if data.groups is None:
            raise RecipeError("partition = natural: this data set has no group ids (group_train in the .npz)")
        there = int(data.groups.max()) + 1
        wanted = there if self.clients is None else self.clients
        if wanted > there:
            raise RecipeError(f"partition.clients = {wanted}: must be ≤ {there}, the number of groups")
        bounded = self.model_copy(update={"clients": wanted})
        return Partition.split(bounded, data, seed, public, validation, clients_hold_back)

    def deal(self, pool: Pool, random: Random, mix: Random) -> list[Index]:
        groups = pool.groups
        assert groups is not None
        members = [np.flatnonzero(groups == group) for group in range(int(groups.max()) + 1)]
        if self.clients == len(members):
            return members
        assert self.clients is not None
        dealt: list[list[Index]] = [[] for _ in range(self.clients)]
        for group in sorted(random.permutation(len(members)), key=lambda group: -len(members[group])):
            smallest = min(dealt, key=lambda client: sum(len(piece) for piece in client))
            smallest.append(members[group])
        return [np.concatenate(client) for client in dealt]
