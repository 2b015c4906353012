"""Runs to diagnose: real ones, and doctored histories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneround.analysis.diagnosis import Finding, findings
from oneround.analysis.diagnosis.diagnose import LiveDiagnosis, diagnose
from oneround.config.load import load
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.runs.log import Measurements, MetricsLog
from oneround.runs.record import RunRecord
from oneround.simulate import run as simulate

SMALL = {"model.encoder": {"kind": "cnn", "width": 4}, "training.batch_size": 32, "fusion": ["iffi"], "partition.clients": 3, "partition.alpha": 0.5,
         "local.workers": 1, "snapshots": 0, "trace.every": 1}  # fmt: skip


def recipe_of(preset: str, epochs: int, **changes: Any) -> Recipe:
    given = {**SMALL, "training.epochs": epochs, **{key.replace("__", "."): value for key, value in changes.items()}}
    return load(preset, given.items())


class Ran:
    """A run, what was reported while it trained, and what is found in its folder."""

    def __init__(self, folder: Path, data: Dataset, recipe: Recipe) -> None:
        self.folder, self.reported = folder, list[Finding]()
        simulate(recipe, folder, data=data, emit=LiveDiagnosis(folder, self.reported.append))
        self.diagnosis = diagnose(folder)

    def of(self, rule: str) -> list[Finding]:
        return [finding for finding in self.diagnosis.findings if finding.rule == rule]

    @property
    def rules(self) -> set[str]:
        return {finding.rule for finding in self.diagnosis.findings}

    def series(self, key: str) -> dict[str, dict[int, float]]:
        """Straight from metrics.jsonl."""
        found: dict[str, dict[int, float]] = {}
        for event in MetricsLog(self.folder / "metrics.jsonl"):
            if event["event"] == "epoch" and key in event:
                found.setdefault(event["client"], {})[event["epoch"]] = event[key]
        return found

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


OVER_LAMBDA = {"exploding-lambda", "over-alignment", "unstable-sigma"}
ALIGNED = recipe_of("etf-decoupled", 40)
PLAIN = recipe_of("fafi", 20)


def record_of(
    recipe: Recipe,
    entries: Mapping[str, Sequence[dict[str, Any]]] | None = None,
    counts: Mapping[str, list[int]] | None = None,
    tested: Sequence[int] = (),
    **measured: Any,
) -> RunRecord:
    """Doctored: entries and class counts by client, `tested` images of each class, and curves of `Measurements`."""
    epochs = {client: {entry["epoch"]: entry for entry in each} for client, each in (entries or {}).items()}
    confusion = [[count if at == label else 0 for at in range(len(tested))] for label, count in enumerate(tested)]
    scores = {"rules": {"iffi": {"accuracy": 0.5, "confusion": confusion}}, "clients": {}}
    return RunRecord(
        Path("doctored"),
        whole_recipe=recipe,
        measurements=Measurements(epochs=dict(epochs), **measured),
        result={**scores, "partition": "", "remarks": []} if tested else None,
        class_names=("x", "y"),
        feature_size=16,
        disclosed=counts or {},
    )


def history(recipe: Recipe, n: int = 20, **columns: Any) -> RunRecord:
    """Doctored: one client; each column a list, or a value for all epochs."""
    entries = [
        {"epoch": epoch, **{name.replace("__", "-"): column[epoch - 1] if isinstance(column, list) else column for name, column in columns.items()}}
        for epoch in range(1, n + 1)
    ]  # fmt: skip
    return record_of(recipe, {"a": entries}, {"a": [50, 50]})


def seen(run: RunRecord, rule: str) -> list[tuple[int | None, float]]:
    return [(each.epoch, each.value) for each in findings(run) if each.rule == rule]
