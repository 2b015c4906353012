"""The plan of a run: everything that is known before it starts."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from oneround import acts
from oneround.config.load import change
from oneround.config.recipe import Federated, Recipe
from oneround.data import Dataset, Images, Split, datasets, partitions
from oneround.data.partition import add_label_noise
from oneround.errors import RecipeError
from oneround.formatting import format_bytes
from oneround.protocol import Broadcast, UploadFolder
from oneround.runs.environment import device_name
from oneround.runs.folder import client_name
from oneround.site import Site, choose_device, num_workers, threads_per_client
from oneround.sums import size_of, steps_of
from oneround.training import Emit, silent
from oneround.training.batches import steps_per_epoch


@dataclass(frozen=True)
class Plan:
    """A run as its server sees it. Sites bring their own images, unless the recipe's data set is dealt out (`DealtPlan`)."""

    recipe: Recipe
    """Resolved for the data."""
    data: Dataset
    """The server's test images; if sites bring their own images, its training images are the public ones."""
    split: Split | None = None
    """Who holds which samples, if the recipe's data set is dealt out."""

    @property
    def num_sites(self) -> int:
        clients = self.recipe.partition.clients
        if clients is None:
            raise RecipeError(
                f"partition = {self.recipe.partition.label}: sites bring their own data, so their number is unknown; "
                "set partition.clients"
            )
        return clients

    @property
    def clients(self) -> dict[str, int]:
        """Clients that have samples: name → number in the partition; empty if sites bring their own images."""
        if self.split is None:
            return {}
        count = len(self.split.clients)
        return {client_name(number, count): number for number, size in enumerate(self.split.sizes) if size}

    def participants(self, number: int) -> list[str]:
        """The clients of a round; empty if sites bring their own images: every site that connects takes part."""
        return acts.participants(self.recipe, list(self.clients), number)

    @property
    def needs_other_clients(self) -> bool:
        """Whether clients need each other's prototypes during training, which only a simulation can offer."""
        alignment = self.recipe.alignment
        return alignment is not None and alignment.schedule.needs.other_clients

    @property
    def snapshot_epochs(self) -> list[int]:
        """Epochs after which uploads are fused and scored, the end of every round among them."""
        epochs, chosen = self.recipe.round_epochs, self.recipe.snapshots
        if self.recipe.rounds > 1:
            return self.round_ends
        if isinstance(chosen, int):
            chosen = list(range(chosen, epochs, chosen)) if chosen else []
        return sorted({*chosen, *self.round_ends})

    @property
    def round_ends(self) -> list[int]:
        """Epochs after which a round is over; a second exchange is one pass over the images."""
        ends = [self.recipe.round_epochs * number for number in range(1, self.recipe.rounds + 1)]
        return [*ends, ends[-1] + 1] if self.recipe.stacked else ends

    def prepare(self, emit: Emit = silent) -> Broadcast:
        """The first act: the broadcast of the first round."""
        server = self.server()
        if self.recipe.public and server.data is None:
            raise RecipeError(
                f"public = {self.recipe.public:g}: the server has no public images; put them into public/ below local.data_path"
            )
        return acts.prepare(self.recipe, self.data.class_names, self.data.shape, server, emit)

    def server(self, folder: Path | None = None) -> Site:
        """The server as a site, with the images it holds."""
        return Site("server", self.data.train if len(self.data.train) else None, folder, self.recipe.local)

    def partition_digest(self, uploads: UploadFolder) -> str:
        """Digest of who holds what, as far as the server knows it: from the sites' names and uploads."""
        contents = [(upload.client, upload.content) for upload in uploads]
        return hashlib.sha256(repr(sorted(contents)).encode()).hexdigest()

    def remarks(self) -> list[str]:
        """Remarks in the result on the recipe and the partition."""
        first, *others = acts.rules_of(self.recipe)
        idle = [rule.label for rule in others if rule.needs.state and self.recipe.rounds > 1]
        if not idle:
            return []
        return [
            f"{', '.join(idle)} is only scored: {first.label} is the first rule, so its model starts the next round"
        ]


def plan_run(recipe: Recipe, data: Dataset) -> Plan:
    """The plan of a federation's server."""
    if not datasets.of(recipe.data).elsewhere:
        return DealtPlan.of(recipe, data)
    choosing = next((rule.kind for rule in recipe.fusion if rule.needs.validation), None)
    if choosing:
        raise RecipeError(
            f"fusion: {choosing} chooses on images held back from the recipe's own data set, and here sites bring their own; "
            "leave accept_if out"
        )
    if recipe.participation.fraction < 1:
        raise RecipeError(
            f"participation.fraction = {recipe.participation.fraction:g}: sites that bring their own data all take part in every "
            "round; set it to 1"
        )
    return Plan(acts.resolve(recipe, data), data)


@dataclass(frozen=True)
class DealtPlan(Plan):
    """A run on one data set that is dealt out to the clients: a simulation, or a federation that is tried on one machine."""

    split: Split = field()
    traffic: acts.Traffic = field()
    """Bytes of one client in one round."""

    @staticmethod
    def of(recipe: Recipe, data: Dataset) -> DealtPlan:
        """Resolve the recipe and partition the data; RecipeError if the result is a run that cannot be trained."""
        if datasets.of(recipe.data).elsewhere:
            raise RecipeError(
                f"data = {recipe.data.kind}: the images are at the sites, nothing can be simulated here; use oneround federate"
            )
        resolved = acts.resolve(recipe, data)
        data, split = deal(resolved, data)
        if not any(split.sizes):
            raise RecipeError(
                f"partition = {resolved.partition.label}, seed {resolved.seeds.partition}: every client is left with no "
                "samples, nobody could train; choose another partition.kind, alpha or seed"
            )
        if resolved.secure and sum(size > 0 for size in split.sizes) < 2:
            raise RecipeError(
                f"sums.secure: only one client of {resolved.partition.label}, seed {resolved.seeds.partition}, has samples, and masks need two; "
                "choose another partition.kind, alpha or seed"
            )
        clients = sum(size > 0 for size in split.sizes)
        return DealtPlan(
            resolved, data, split, acts.traffic(resolved, data.classes, data.shape, len(split.public), clients)
        )

    @property
    def num_sites(self) -> int:
        return len(self.clients)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of samples of every client that has some."""
        return {name: self.split.sizes[number] for name, number in self.clients.items()}

    @cached_property
    def rounds_by_client(self) -> dict[str, int]:
        """Number of rounds in which each client takes part."""
        rounds = range(1, self.recipe.rounds + 1)
        counts = Counter(name for number in rounds for name in self.participants(number))
        return {name: counts[name] for name in self.clients}

    def server(self, folder: Path | None = None) -> Site:
        """The server as a site, with the public and the validation images."""
        public, validation = (
            self.data.train.take(part) if len(part) else None for part in (self.split.public, self.split.validation)
        )
        return Site("server", public, folder, self.recipe.local, validation=validation)

    def partition(self) -> dict[str, Any]:
        """Content of `partition.json`: who holds what, and the rule and seed that it follows from."""
        rule, seed = self.recipe.partition, self.recipe.seeds.partition
        return {"data": self.data.name, "rule": rule.dump(), "seed": seed, **self.split.plain()}

    def partition_digest(self, uploads: UploadFolder) -> str:
        return self.split.digest

    @property
    def steps(self) -> int:
        """Training steps of all clients in all rounds."""
        clients, sizes = self.clients, self.split.sizes
        return sum(rounds * self.steps_of(sizes[clients[name]]) for name, rounds in self.rounds_by_client.items())

    def steps_of(self, samples: int) -> int:
        """Training steps in one round of a client with that many samples."""
        recipe = self.recipe
        trainings = [recipe.training] * recipe.trains + ([recipe.generator.batching] if recipe.generator else [])
        passed = steps_of(samples) if recipe.sums_only or recipe.stacked else 0
        return sum(each.epochs * steps_per_epoch(samples, each) for each in trainings) + passed

    def remarks(self) -> list[str]:
        remarks = self.split.remarks()
        if self.recipe.sums is not None and self.recipe.sums.rank is not None:
            exact = change(self.recipe, {"sums.rank": None})
            whole = acts.traffic(exact, self.data.classes, self.data.shape, len(self.split.public), len(self.clients))
            if whole.up <= self.traffic.up:
                remarks.append(
                    f"sums.rank = {self.recipe.sums.rank} makes uploads no smaller: {format_bytes(self.traffic.up)}, where all "
                    f"second moments are {format_bytes(whole.up)} and exact; leave rank out"
                )
        if self.recipe.sums is not None and self.recipe.sums.held_back:
            remarks.append(
                f"images held back count {self.recipe.sums.held_back} times in the sums: what {acts.rules_of(self.recipe)[0].label} scores on them "
                "is optimistic"
            )
        if self.recipe.clients_hold_back and len(self.snapshot_epochs) > 1:
            remarks.append(
                f"{len(self.split.validation):,} images held back by the clients choose the snapshot: in a real federation the "
                "clients would have to score the fused models, an exchange more"
            )
        noise = self.recipe.label_noise
        if noise is not None:
            remarks.append(
                f"{100 * noise.share:g} % of the labels of {noise.clients} client(s) are wrong on purpose (label_noise)"
            )
        return remarks + super().remarks()

    def lines(self, batched: bool = False) -> list[str]:
        """The run's size as text: samples, steps, parameters, bytes, device; `batched`: clients train together."""
        recipe, clients, local = self.recipe, self.clients, self.recipe.local
        sizes = [self.split.sizes[number] for number in clients.values()]
        shown = ", ".join(f"{size:,}" for size in sizes[:10])
        if len(sizes) > 10:
            shown += f", … ({min(sizes):,} to {max(sizes):,})"
        parameters, down, up = self.traffic.parameters, self.traffic.down, self.traffic.up
        device, how = choose_device(local.device), "one after another"
        if device.type == "cpu":
            at_once, threads = num_workers(local, parameters, len(clients)), threads_per_client(local, parameters)
            how = f"{at_once} at once, {threads} thread(s) each"
        elif device.type == "cuda" and local.workers != 1:
            how = "two at a time, where its memory has room for both"
        if batched:
            how = "with steps of equal shape together"
        channels, height, width = self.data.shape
        each = " and round" if recipe.rounds > 1 else ""
        return [
            f"{recipe.method} on {self.data.name}: {len(self.data.train):,} training and {len(self.data.test):,} test images "
            f"({channels}×{height}×{width}, {self.data.classes} classes), {recipe.partition.label}, seed {recipe.seeds.partition}",
            f"  {len(clients)} clients with {shown} samples"
            + (f"; the server keeps {len(self.split.public):,} public ones" if len(self.split.public) else "")
            + (f"; {len(self.split.validation):,} are held back for validation" if len(self.split.validation) else ""),
            f"  {self._work()}",
            f"  network: {format_bytes(down)} down and {format_bytes(up)} up per client{each}, "
            f"{format_bytes(sum(self.rounds_by_client.values()) * (down + up))} in all",
            f"  on {device_name(device)}: clients {how}",
        ]

    def _work(self) -> str:
        """The work of the clients as text: sums, training steps, or both."""
        recipe = self.recipe
        summed = ""
        if recipe.sums is not None:
            size = size_of(recipe, self.data.shape, len(self.clients))
            kind = "features, the networks' among them" if recipe.stacked else "fixed features"
            second = " in a second exchange" if recipe.stacked else ""
            summed = f"sums of {size:,} {kind} ({recipe.sums.features.label}), one pass{second}"
        if recipe.sums_only:
            return f"{summed}, nothing is trained"
        rounds = f"{recipe.rounds} rounds of " if recipe.rounds > 1 else ""
        trainings = {recipe.encoder.label: recipe.training} if recipe.trains else {}
        if recipe.generator is not None:
            trainings[recipe.generator.network.label] = recipe.generator.batching
        epochs = " + ".join(str(each.epochs) for each in trainings.values())
        sizes = " and ".join(
            f"{each.batch_size} samples{' × 2 views' * (each.views == 2)}" for each in trainings.values()
        )
        return (
            f"{' and '.join(trainings)}: {self.traffic.parameters:,} parameters; {rounds}{epochs} epochs, "
            f"{self.steps:,} steps of up to {sizes}" + (f"; {summed}" if summed else "")
        )


def deal(recipe: Federated, data: Dataset) -> tuple[Dataset, Split]:
    """Partition the data set: the data, with label noise where the recipe asks for it, and the split."""
    seed, noise = recipe.seeds.partition, recipe.label_noise
    split = partitions.of(recipe.partition).split(
        data, seed, recipe.public, recipe.validation, recipe.clients_hold_back
    )
    if noise is not None:
        labels = add_label_noise(data.train.labels.numpy(), split, noise.clients, noise.share, data.classes, seed)
        data = replace(data, train=Images(data.train.pixels, torch.from_numpy(labels)))
    return data, split
