"""The record of a run, read from its folder. Comparison, diagnosis and report are views of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from oneround.config.parts import Strict
from oneround.config.recipe import ADDED, Federated, Recipe, current_name
from oneround.errors import OneroundError, RunError
from oneround.protocol import blob
from oneround.runs.folder import RunFolder, client_name
from oneround.runs.log import Curves, EpochMetrics, Measurements, is_number

T = TypeVar("T")


@dataclass(frozen=True)
class RunRecord:
    """A run's recipe and measurements, without its weights; finished or not."""

    path: Path
    """The run's folder, or the file it was kept in."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """The federated half of its recipe with dotted keys: `training.epochs` → 50."""
    whole_recipe: Recipe | None = None
    """None where only its keys were kept."""
    measurements: Measurements = field(default_factory=Measurements)
    result: Mapping[str, Any] | None = None
    """Content of `result.json`; None while the run is not finished."""
    partition: Mapping[str, Any] = field(default_factory=dict)
    """Content of `partition.json`; empty where it was not written."""
    class_names: tuple[str, ...] = ()
    feature_size: int | None = None
    """Dimension of the prototypes; None where no network is trained."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Content of `environment.json`: device, packages, commit."""
    disclosed: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Client → its samples of each class, as its upload discloses them."""
    stopped: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Client that the safeguards stopped → its last epoch and the reason."""
    seconds: float | None = None
    """How long it took from its data to its scores, where a study measured it; time that a kill lost is not in it."""
    bound: float | None = None
    """Accuracy of the same network trained on all data in one place, where a study measured it."""
    unread: tuple[str, ...] = ()
    """Remarks on damaged parts of the folder, which are left out."""

    @classmethod
    def read(cls, folder: Path, strict: Collection[str] = ()) -> RunRecord:
        """Read the folder of a run, finished or not; only its recipe must be there.

        `strict`: files (`result.json`, …) that raise RunError if they are damaged; any other damaged part is left out with a remark.
        """
        run_folder, unread = RunFolder(folder), list[str]()
        recipe = run_folder.read_recipe()

        def part(path: Path, read: Callable[[], T]) -> T | None:
            try:
                return read() if path.is_file() else None
            except OneroundError as error:
                if path.name in strict:
                    raise
                unread.append(f"left out: {error}")
                return None

        manifests = list(_manifests(run_folder, unread))
        histories = [
            {**entry, "event": "epoch", "client": client}
            for client, manifest in manifests
            for entry in manifest["history"]
        ]
        class_names, feature_size = part(run_folder.broadcast, lambda: _classes(run_folder.broadcast)) or ((), None)
        result = part(run_folder.result, run_folder.read_result)
        partition = part(folder / "partition.json", lambda: _partition(run_folder, len(class_names))) or {}
        environment = part(folder / "environment.json", run_folder.read_environment) or {}
        return cls(
            folder,
            keys=keys_of(recipe.plain()),
            whole_recipe=recipe,
            measurements=Measurements.of(chain(histories, run_folder.metrics)),
            result=result,
            partition=partition,
            class_names=class_names or tuple(map(str, range(len(partition["class_counts"][0]) if partition else 0))),
            feature_size=feature_size,
            environment=environment,
            disclosed={name: each["class_counts"] for name, each in manifests if any(each.get("class_counts", ()))},
            stopped={client: (each["epoch"], each["stopped"]) for client, each in manifests if each.get("stopped")},
            bound=part(folder.parent / "study.json", lambda: _bound(folder.parent)),
            unread=tuple(unread),
        )

    # --- what was run ---

    @property
    def recipe(self) -> Recipe:
        if self.whole_recipe is None:
            raise RunError(f"{self.path}: kept without its whole recipe; this needs the run folder")
        return self.whole_recipe

    @property
    def method(self) -> str:
        return str(self.keys["method"])

    @property
    def partition_seed(self) -> int:
        return int(self.keys["seeds.partition"])

    @property
    def trains(self) -> bool:
        """Whether clients train a network."""
        return bool(self.keys.get("objective.terms") != "{}")

    @property
    def measured_on(self) -> Mapping[str, Any]:
        """`device`, `torch` and `commit`; empty where they are not known."""
        known = self.environment
        return known and {"device": known["device"], "torch": known["packages"].get("torch"), "commit": known["commit"]}

    # --- what came out ---

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def accuracy(self) -> dict[str, float]:
        """Test accuracy of every fusion rule, in the result or, before that exists, in the last snapshot."""
        return self._final("rules", self.curves)

    @property
    def costs(self) -> dict[str, float]:
        """What the run took and what else its first rule's model scored: `top5` and `loss` on test images, `bytes_down` and `bytes_up` of all
        clients, `seconds`; what is not known is left out."""
        result = self.result or {}
        score: Mapping[str, float] = next(iter(result.get("rules", {}).values()), {})
        sizes = {name: result[name] for name in ("bytes_down", "bytes_up") if name in result}
        known = {name: score[name] for name in ("top5", "loss") if name in score} | sizes
        elapsed = self.measurements.elapsed
        return known | ({"seconds": elapsed[max(elapsed)]} if elapsed else {})

    @property
    def local_accuracy(self) -> dict[str, float]:
        """Test accuracy of every client's own model, in the result or, before that exists, in the last snapshot."""
        return self._final("clients", self.measurements.local_accuracy)

    def _final(self, key: str, curves: Curves) -> dict[str, float]:
        if self.result is None:
            return {name: curve[max(curve)] for name, curve in curves.items()}
        return {name: score["accuracy"] for name, score in self.result[key].items()}

    @property
    def curves(self) -> Curves:
        """Rule → epoch → test accuracy of the fused model."""
        return self.measurements.curves

    @property
    def validation(self) -> Curves:
        """Rule → epoch → accuracy on the validation images."""
        return self.measurements.validation

    @property
    def main_rule(self) -> str:
        """The fusion rule that makes the model."""
        return next(iter(self.accuracy), None) or self.recipe.fusion[0].label

    @property
    def personalised(self) -> Mapping[str, Mapping[str, float | None]]:
        """Model → client → accuracy on the client's own mix of classes; empty before the result is there."""
        personalised: Mapping[str, Mapping[str, float | None]] = (self.result or {}).get("personalised", {})
        return personalised

    @property
    def partition_digest(self) -> str:
        """Digest of who holds which sample; runs with the same digest can be compared."""
        return str(self.result["partition"] if self.result else self.partition.get("digest", ""))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the result."""
        return tuple(map(str, (self.result or {}).get("remarks", ())))

    @property
    def test_counts(self) -> list[int]:
        """Test images of each class; empty before the result is there."""
        rules = self.result["rules"] if self.result else {}
        return [sum(row) for score in list(rules.values())[:1] for row in score.get("confusion", ())]

    # --- clients ---

    @cached_property
    def partition_counts(self) -> dict[str, list[int]]:
        """Samples of each class by client, as the partition deals them; clients without samples are among them."""
        rows = self.partition.get("class_counts", [])
        return {client_name(number, len(rows)): row for number, row in enumerate(rows)}

    @cached_property
    def counts(self) -> dict[str, Sequence[int]]:
        """Samples of each class by client, without empty clients: of the partition or, where it is unknown, as uploads disclose them."""
        return {name: row for name, row in self.partition_counts.items() if sum(row)} or dict(self.disclosed)

    @property
    def clients(self) -> list[str]:
        """Clients with data."""
        return list(self.counts) or sorted(self.measurements.epochs)

    @property
    def trained(self) -> list[str]:
        """Clients with at least one epoch, and those stopped before."""
        return sorted({*self.measurements.epochs, *self.stopped})

    @property
    def reached(self) -> int:
        """The last epoch that every client has reached, as far as is known."""
        return min((max(by_epoch) for by_epoch in self.measurements.epochs.values()), default=0)

    def largest(self, most: int) -> list[str]:
        """The clients with the most samples, in their original order."""
        names = sorted(self.clients, key=lambda name: -sum(self.counts.get(name, ())))[:most]
        return [name for name in self.clients if name in names]

    def series(self, client: str, *quantities: str) -> list[EpochMetrics]:
        """A client's metrics of the epochs in which all these quantities were measured."""
        entries = self.measurements.epochs.get(client, {}).values()
        return [entry for entry in entries if all(name in entry for name in quantities)]

    def trace(self, quantity: str) -> Curves:
        """Client → epoch → a quantity; empty where it was never measured."""
        traces = {
            client: {epoch: entry[quantity] for epoch, entry in by_epoch.items() if is_number(entry.get(quantity))}
            for client, by_epoch in self.measurements.epochs.items()
        }
        return {client: trace for client, trace in traces.items() if trace}

    def cosines(self) -> dict[tuple[str, str], Curves]:
        """Pair of terms and tensor (features or prototypes) → client → epoch → cosine of the terms' gradients there."""
        traces: dict[tuple[str, str], Curves] = {}
        for client, by_epoch in self.measurements.epochs.items():
            for epoch, entry in by_epoch.items():
                for tensor, gradients in entry.get("gradients", {}).items():
                    for pair, value in gradients["cosine"].items():
                        if value is not None:
                            traces.setdefault((pair, tensor), {}).setdefault(client, {})[epoch] = value
        return traces


def local_accuracy_summary(accuracy: Mapping[str, float]) -> dict[str, float]:
    """Accuracy of the best and of the mean client alone, from that of every client; empty where none is known."""
    values = accuracy.values()
    return {"best client alone": max(values), "mean client alone": fmean(values)} if values else {}


# --- a recipe's keys -------------------------------------------------------------------------------------------------


def flat(tree: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """A recipe's keys with dots: `training.epochs` → 50, `objective.stages.0.share` → 0.2."""
    inner = dict(enumerate(tree)) if isinstance(tree, list) and any(isinstance(each, dict) for each in tree) else tree
    if isinstance(inner, dict) and inner:
        for key, value in inner.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(tree) if isinstance(tree, list | dict) else tree


def tree_of(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `flat`, without keys that are None.

    >>> tree_of({"training.epochs": 50, "fusion.0.kind": "iffi", "fusion.1.kind": "average", "bank": None})
    {'training': {'epochs': 50}, 'fusion': [{'kind': 'iffi'}, {'kind': 'average'}]}
    """
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *path, last = key.split(".")
        node = tree
        for step in path:
            node = node.setdefault(step, {})
        if value is not None:
            node[last] = json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
    lists: dict[str, Any] = _with_lists(tree)
    return lists


def _with_lists(node: Any) -> Any:
    """Mappings whose keys are numbers as lists."""
    if not isinstance(node, dict):
        return node
    below = {key: _with_lists(value) for key, value in node.items()}
    return list(below.values()) if below and all(key.isdecimal() for key in below) else below


def keys_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's keys with dots; keys that the recipe is too old for have their default, which changes nothing."""
    keys = {current_name(key): value for key, value in flat(tree)}
    absent = tuple(f"{key}." for key, value in keys.items() if value is None and "." not in key)
    keys = {key: value for key, value in keys.items() if not key.startswith(absent)}
    sections = {key.rpartition(".")[0] for key in keys}
    added = {f"{name}.{key}": value for name in sections & ADDED.keys() for key, value in ADDED[name].items()}
    return {**_defaults(), **added, **keys}


@lru_cache
def _defaults() -> dict[str, Any]:
    """Defaults of the keys that every recipe has."""
    defaults: dict[str, Any] = {}
    for name, field_info in Federated.model_fields.items():
        if isinstance(field_info.default, Strict):
            defaults |= dict(flat(field_info.default.model_dump(mode="json"), name))
        elif isinstance(field_info.default, int | float):
            defaults[name] = field_info.default
    return defaults


# --- parts of a folder -----------------------------------------------------------------------------------------------


def _manifests(run_folder: RunFolder, unread: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Manifests of the clients' states and uploads; they may be ahead of the log, which is written at snapshots."""
    states = ((path, "state") for path in sorted(run_folder.path.glob("clients/*/*.safetensors")))
    uploads = ((path, "upload") for path in sorted(run_folder.path.glob("uploads/*.safetensors")))
    for path, kind in (*states, *uploads):
        try:
            manifest = blob.peek(path, kind)
        except OneroundError as error:
            if path.exists():  # else a client that is still training has just replaced it
                unread.append(f"left out: {error}")
        else:
            yield manifest["client"], manifest


def _classes(broadcast: Path) -> tuple[tuple[str, ...], int | None]:
    """Names of the classes and the size of a prototype."""
    manifest = blob.peek(broadcast, "broadcast")
    prototypes = manifest["shapes"].get("weights.prototypes")
    return tuple(manifest["class_names"]), prototypes[-1] if prototypes else None


def _partition(run_folder: RunFolder, classes: int) -> Mapping[str, Any]:
    """Content of `partition.json`; `classes`: the required number of classes, 0 if unknown."""
    partition = run_folder.read_partition()
    if {len(row) for row in partition["class_counts"]} != {classes or len(partition["class_counts"][0])}:
        of = f" of {classes} classes" if classes else ""
        raise RunError(
            f"{run_folder.path}/partition.json: damaged (class_counts is no table{of}); {run_folder.rebuild_advice}"
        )
    return partition


def _bound(study: Path) -> float | None:
    value: Any = RunFolder(study).read_json("study.json", "remove it").get("centralised")
    return float(value) if is_number(value) else None
