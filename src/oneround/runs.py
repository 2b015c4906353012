"""What a run is about to do, and what it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from oneround import acts
from oneround.crew import Job, crew_size
from oneround.data import Dataset, Images, Split, datasets, partitions
from oneround.data.partition import spoil
from oneround.errors import RecipeError, RunError
from oneround.folder import RunFolder, client_name
from oneround.learning import Emit, silent
from oneround.learning.batches import steps_per_epoch
from oneround.learning.schedules import schedules
from oneround.models.features import features
from oneround.observe.environment import device_name
from oneround.observe.log import MetricsLog
from oneround.observe.words import size_in_words
from oneround.protocol import Broadcast
from oneround.reading import change
from oneround.recipe import Federated, Recipe
from oneround.site import Site, choose_device, threads_per_client
from oneround.sums import steps_of


@dataclass(frozen=True)
class Plan:
    """What a run is about to do, known before it starts."""

    recipe: Recipe
    data: Dataset
    split: Split
    traffic: acts.Traffic

    @staticmethod
    def of(recipe: Recipe, data: Dataset) -> Plan:
        if datasets.of(recipe.data).elsewhere:
            raise RecipeError(
                f"data = {recipe.data.kind}: the images are at the sites, nothing can be simulated here; use oneround federate"
            )
        settled = acts.settle(recipe, data)
        split = partitions.of(settled.partition).split(
            data, settled.seeds.partition, settled.public, settled.validation, settled.clients_hold_back
        )
        if not any(split.sizes):
            raise RecipeError(
                f"partition = {settled.partition.label}, seed {settled.seeds.partition}: every client is left with no "
                "samples, nobody could train; choose another partition.kind, alpha or seed"
            )
        if settled.secure and sum(size > 0 for size in split.sizes) < 2:
            raise RecipeError(
                f"sums.secure: only one client of {settled.partition.label}, seed {settled.seeds.partition}, has samples, and masks need two; "
                "choose another partition.kind, alpha or seed"
            )
        traffic = acts.traffic(settled, data.classes, data.shape, len(split.public))
        return Plan(settled, mislabelled(settled, data, split), split, traffic)

    def traffic_with(self, changes: dict[str, object]) -> acts.Traffic:
        """What would travel if the recipe were another."""
        return acts.traffic(change(self.recipe, changes), self.data.classes, self.data.shape, len(self.split.public))

    def job(self, place: RunFolder, client: str, until: int, told: Mapping[str, float]) -> Job:
        """Work for the crew: train that client to the end of an epoch."""
        number = self.clients[client]
        return place.job(client, self.split.clients[number], until, self.recipe.local, told, self.split.held[number])

    def prepare(self, emit: Emit = silent) -> Broadcast:
        """The first act, on this machine: the server holds the public images."""
        return acts.prepare(self.recipe, self.data.class_names, self.data.shape, self.server(), emit)

    def simulated(self, emit: Emit = silent) -> Broadcast:
        """The same for a simulation, where nobody has keys to agree on."""
        broadcast = self.prepare(emit)
        return replace(broadcast, roster=dict.fromkeys(self.clients, "")) if self.recipe.secure else broadcast

    def server(self, folder: Path | None = None) -> Site:
        """The server on this machine: it holds the public images, and those to choose by."""
        mine, chosen = (
            self.data.train.take(part) if len(part) else None for part in (self.split.public, self.split.validation)
        )
        return Site("server", mine, folder, self.recipe.local, validation=chosen)

    def partition(self) -> dict[str, Any]:
        """`partition.json`: who holds what, and how it was dealt."""
        rule, seed = self.recipe.partition, self.recipe.seeds.partition
        return {"data": self.data.name, "rule": rule.dump(), "seed": seed, **self.split.plain()}

    @property
    def clients(self) -> dict[str, int]:
        """Clients that have data, by name, with their number in the partition."""
        count = len(self.split.clients)
        return {client_name(number, count): number for number, size in enumerate(self.split.sizes) if size}

    def participants(self, number: int) -> list[str]:
        """Who takes part in a round."""
        return acts.participants(self.recipe, list(self.clients), number)

    @cached_property
    def turns(self) -> dict[str, int]:
        """In how many rounds every client takes part."""
        rounds = range(1, self.recipe.rounds + 1)
        counted = Counter(name for number in rounds for name in self.participants(number))
        return {name: counted[name] for name in self.clients}

    @property
    def steps(self) -> int:
        clients = self.clients
        return sum(turns * self.steps_of(self.split.sizes[clients[name]]) for name, turns in self.turns.items())

    def steps_of(self, samples: int) -> int:
        """How many steps a client with so many samples does in a round."""
        training = self.recipe.training
        return training.epochs * steps_per_epoch(samples, training) if self.recipe.trains else steps_of(samples)

    @property
    def stops(self) -> list[int]:
        """Epochs after which uploads are fused and scored, the end of every round among them; the last is the end."""
        epochs, every = self.recipe.training.epochs, self.recipe.snapshots
        if self.recipe.rounds > 1:
            return [epochs * number for number in range(1, self.recipe.rounds + 1)]
        return sorted({*(range(every, epochs, every) if every else ()), epochs})

    def remarks(self, simulated: bool = True) -> list[str]:
        """What a reader of the result has to know."""
        told = self.split.remarks()
        if self.recipe.secure and simulated:
            told.append(
                "masks are made from the seed: a simulation has no secrets, only a real federation hides anything"
            )
        if self.recipe.sums is not None and self.recipe.sums.rank is not None:
            whole = self.traffic_with({"sums.rank": None})
            if whole.up <= self.traffic.up:
                told.append(
                    f"sums.rank = {self.recipe.sums.rank} makes uploads no smaller: {size_in_words(self.traffic.up)}, where all "
                    f"second moments are {size_in_words(whole.up)} and exact; leave rank out"
                )
        if self.recipe.clients_hold_back and len(self.stops) > 1:
            told.append(
                f"{len(self.split.validation):,} images held back by the clients choose the snapshot: in a real federation the "
                "clients would have to score the fused models, an exchange more"
            )
        noise = self.recipe.label_noise
        if noise is not None:
            told.append(
                f"{100 * noise.share:g} % of the labels of {noise.clients} client(s) are wrong on purpose (label_noise)"
            )
        first, *others = acts.rules_of(self.recipe)
        idle = [rule.label for rule in others if rule.between_rounds and self.recipe.rounds > 1]
        if idle:
            told.append(
                f"{', '.join(idle)} is only scored: {first.label} comes first in fusion and goes out to the clients"
            )
        if self.meets_every_epoch:
            told.append("clients learn of each other's prototypes every epoch: simulation only, not a one-round method")
        return told

    @property
    def meets_every_epoch(self) -> bool:
        """Whether clients must know of each other while they train, which only a simulation can offer."""
        alignment = self.recipe.alignment
        return alignment is not None and schedules.of(alignment.schedule).needs_others

    @property
    def meetings(self) -> list[int]:
        """Epochs after which all clients have uploaded."""
        return list(range(1, self.recipe.epochs + 1)) if self.meets_every_epoch else self.stops

    def lines(self) -> list[str]:
        """The run's size in words: samples, steps, parameters, bytes, device."""
        recipe, clients, local = self.recipe, self.clients, self.recipe.local
        sizes = [self.split.sizes[number] for number in clients.values()]
        shown = ", ".join(f"{size:,}" for size in sizes[:10]) + (
            f", … ({min(sizes):,} to {max(sizes):,})" if len(sizes) > 10 else ""
        )
        parameters, down, up = self.traffic.parameters, self.traffic.down, self.traffic.up
        device, at_once = choose_device(local.device), crew_size(local, parameters, len(clients))
        how = (
            f"{at_once} at once, {threads_per_client(local, parameters)} thread(s) each"
            if device.type == "cpu"
            else "one after another"
        )
        channels, height, width = self.data.shape
        each = " and round" if recipe.rounds > 1 else ""
        return [
            f"{recipe.method} on {self.data.name}: {len(self.data.train):,} training and {len(self.data.test):,} test images "
            f"({channels}×{height}×{width}, {self.data.classes} classes), {recipe.partition.label}, seed {recipe.seeds.partition}",
            f"  {len(clients)} clients with {shown} samples"
            + (f"; the server keeps {len(self.split.public):,} public ones" if len(self.split.public) else "")
            + (f"; {len(self.split.validation):,} are held back to choose by" if len(self.split.validation) else ""),
            f"  {self._work()}",
            f"  network: {size_in_words(down)} down and {size_in_words(up)} up per client{each}, "
            f"{size_in_words(sum(self.turns.values()) * (down + up))} in all",
            f"  on {device_name(device)}: clients {how}",
            *(f"  note: {remark}" for remark in self.remarks()),
        ]

    def _work(self) -> str:
        """What every client does."""
        recipe = self.recipe
        summed = ""
        if recipe.sums is not None:
            size = features.of(recipe.sums.features).size_for(self.data.shape)
            summed = f"sums of {size:,} fixed features ({recipe.sums.features.label}), one pass"
        if not recipe.trains:
            return f"{summed}, nothing is trained"
        assert recipe.model.encoder is not None
        rounds = f"{recipe.rounds} rounds of " if recipe.rounds > 1 else ""
        return (
            f"{recipe.model.encoder.label}: {self.traffic.parameters:,} parameters; {rounds}{recipe.training.epochs} epochs, "
            f"{self.steps:,} steps of up to {recipe.training.batch_size} samples{' × 2 views' if recipe.training.views == 2 else ''}"
            + (f"; {summed}" if summed else "")
        )


def server_of(recipe: Recipe, data: Dataset, folder: Path) -> Site:
    """The server of a run, with the images it holds itself: its share of the data, or its own where sites bring theirs."""
    if not datasets.of(recipe.data).elsewhere:
        return Plan.of(recipe, data).server(folder)
    return Site("server", data.train if len(data.train) else None, folder, recipe.local)


def mislabelled(recipe: Federated, data: Dataset, split: Split) -> Dataset:
    """The data with wrong labels at some clients, where the recipe asks for it."""
    if recipe.label_noise is None:
        return data
    wrong = spoil(data.train.labels.numpy(), split, recipe.label_noise.clients, recipe.label_noise.share, data.classes, recipe.seeds.partition)  # fmt: skip
    return replace(data, train=Images(data.train.pixels, torch.from_numpy(wrong)))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Result:
    """What a run found."""

    folder: Path
    rules: Mapping[str, float]
    """Test accuracy of every fusion rule on the same uploads."""
    clients: Mapping[str, float]
    """Test accuracy of every client alone."""
    curves: Mapping[str, Mapping[int, float]]
    """Accuracy of every rule after so many local epochs."""
    validation: Mapping[str, Mapping[int, float]]
    """The same on images held back to choose by; empty where none are."""
    partition: str
    remarks: tuple[str, ...]
    personalised: Mapping[str, float] = field(default_factory=dict)
    """Accuracy on each client's own mix of classes, mean over clients: of rules, of clients alone, of personal models."""

    @staticmethod
    def read(folder: Path) -> Result:
        place = RunFolder(folder)
        if not place.result.is_file():
            raise RunError(f"{folder}: no finished run here (no result.json); go on with {place.resumption}")
        told = place.read_result()
        curves: dict[str, dict[int, float]] = {}
        validation: dict[str, dict[int, float]] = {}
        for event in MetricsLog(folder / "metrics.jsonl"):
            if event.get("event") == "snapshot":
                curves.setdefault(event["rule"], {})[event["epoch"]] = event["accuracy"]
                if "validation" in event:
                    validation.setdefault(event["rule"], {})[event["epoch"]] = event["validation"]
        rules = {name: score["accuracy"] for name, score in told["rules"].items()}
        clients = {name: score["accuracy"] for name, score in told["clients"].items()}
        personal = {name: _mean(by.values()) for name, by in told.get("personalised", {}).items()}
        known = {name: value for name, value in personal.items() if value is not None}
        return Result(folder, rules, clients, curves, validation, told["partition"], tuple(told["remarks"]), known)

    @property
    def chosen(self) -> dict[str, int]:
        """By rule: the snapshot that is best on validation data, the earliest of equals."""
        return {rule: max(curve, key=lambda epoch: (curve[epoch], -epoch)) for rule, curve in self.validation.items()}
