"""Diagnoses a run: its record, afterwards or during training, and the features of its encoders.

`diagnose` reads the folder of a run that is finished, stopped or under way. `LiveDiagnosis` is a callback for a run's events. With
`deep`, features of every upload's encoder are computed on the test images of the classes that its client has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from oneround.analysis.diagnosis import RULES, Finding, findings
from oneround.analysis.diagnosis.clients import LEARNABLE
from oneround.analysis.diagnosis.geometry import Geometry, deep_findings, geometry_of
from oneround.analysis.diagnosis.rules import worst_first
from oneround.data import Dataset, load_dataset
from oneround.data.augment import preprocessing
from oneround.errors import OneroundError, RunError
from oneround.formatting import without_infinity
from oneround.models.prototype import network_from
from oneround.runs.folder import RunFolder
from oneround.runs.log import Event
from oneround.runs.record import RunRecord
from oneround.site import choose_device
from oneround.training import Emit
from oneround.training.bank import unit_features

log = logging.getLogger("oneround")


@dataclass(frozen=True)
class Diagnosis:
    """Findings of all rules in a run."""

    run: RunRecord
    findings: tuple[Finding, ...]
    applied: tuple[str, ...]
    """Rules that were applied."""
    skipped: Mapping[str, str]
    """Rules that do not apply to the run, and why."""
    remarks: tuple[str, ...]
    """Parts of the folder that could not be used."""
    geometry: Mapping[str, Geometry] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {
            "method": self.run.recipe.method,
            "epochs": self.run.recipe.epochs,
            "clients": {client: len(self.run.measurements.epochs.get(client, ())) for client in self.run.trained},
            "findings": [finding.plain() for finding in self.findings],
            "looked": list(self.applied),
            "aside": dict(self.skipped),
            "remarks": list(self.remarks),
            "geometry": {client: without_infinity(asdict(each)) for client, each in self.geometry.items()},
        }


def diagnose(run: str | PathLike[str] | RunRecord, *, deep: bool = False, data: Dataset | None = None) -> Diagnosis:
    """Diagnose a run, finished or not.

    Args:
        run: its folder, in which only a recipe must be, or its record.
        deep: also measure the geometry of every encoder's features on test images.
        data: the data set for `deep`, if it is not that of the recipe.
    """
    record = run if isinstance(run, RunRecord) else RunRecord.read(Path(run))
    all_findings, geometries, remarks = findings(record), dict[str, Geometry](), list(record.unread)
    if deep:
        try:
            geometries = dict(_geometries(record, data))
        except OneroundError as error:
            remarks.append(f"the deep check is left out: {error}")
        all_findings = worst_first([*all_findings, *deep_findings(record, geometries)])
    reasons = {rule.name: rule.precondition(record) for rule in RULES}
    applied = tuple(name for name, reason in reasons.items() if not reason)
    skipped = {name: reason for name, reason in reasons.items() if reason}
    return Diagnosis(record, tuple(all_findings), applied, skipped, tuple(remarks), geometries)


# --- during training -------------------------------------------------------------------------------------------------


class LiveDiagnosis:
    """An `emit` for `simulate.run(…, folder, emit=…)` that diagnoses the run during training.

    Every event is passed on to `emit`; `on_finding` is called once for each new finding. After an epoch the rules for clients are
    applied to its client, after a snapshot the others to the run; the folder is read once, when the run begins. Findings that a
    resumed run had before are not reported again. May be called from several threads. If diagnosing itself fails, that is logged
    once and training goes on.
    """

    def __init__(
        self, folder: str | PathLike[str], on_finding: Callable[[Finding], None], emit: Emit = lambda event: None
    ) -> None:
        self.folder, self.on_finding, self.emit = Path(folder), on_finding, emit
        self.lock = threading.Lock()
        self.record: RunRecord | None = None
        self.reported: set[Any] = set()
        self.failed = False

    def __call__(self, event: Event) -> None:
        self.emit(event)
        with self.lock:
            if self.failed:
                return
            try:
                self._diagnose(event)
            except Exception as error:  # whatever it is, it must not end a training of days
                self.failed = True
                log.warning("diagnosis while training ended: %r; afterwards: oneround diagnose %s", error, self.folder)

    def _diagnose(self, event: Event) -> None:
        kind = event["event"]
        if kind == "plan":
            resumed = RunFolder(self.folder).recipe.is_file()
            self.record = RunRecord.read(self.folder) if resumed else None
            self.reported = {finding.key for finding in findings(self.record)} if self.record else set()
        elif kind in ("epoch", "snapshot"):
            first = self.record is None
            self.record = self.record or RunRecord.read(self.folder)  # by the first epoch its recipe is written
            measured = self.record.measurements
            if kind == "epoch":
                entries = measured.epochs.get(event["client"], {})
                for later in [epoch for epoch in entries if epoch > event["epoch"]]:
                    del entries[later]  # trained again after a kill
            measured.add(event)
            self._report(self.record, [event["client"]] if kind == "epoch" else [], whole=first or kind == "snapshot")

    def _report(self, record: RunRecord, clients: Iterable[str], *, whole: bool) -> None:
        """Report new findings at these clients and, if `whole`, in the run."""
        applicable = (rule for rule in RULES if rule.per_client or (whole and not rule.precondition(record)))
        for finding in (finding for rule in applicable for finding in rule.apply(record, clients)):
            if finding.key not in self.reported:
                self.reported.add(finding.key)
                self.on_finding(finding)


# --- geometry of the features ----------------------------------------------------------------------------------------


@torch.inference_mode()
def _geometries(record: RunRecord, data: Dataset | None) -> Iterator[tuple[str, Geometry]]:
    """Every upload's encoder on the test images of its client's classes; a client of one class has no geometry."""
    recipe = record.recipe
    data = data or load_dataset(recipe.data, recipe.local.data_path)
    uploads, device = RunFolder(record.path).uploads(), choose_device(recipe.local.device)
    broadcast, encoder = uploads.broadcast, uploads.broadcast.recipe.model.encoder
    if encoder is None:
        raise RunError("no network was trained, there is no encoder to look at")
    for upload in uploads:
        classes = torch.nonzero(upload.class_counts >= LEARNABLE * upload.samples)[:, 0]
        test = data.test.take(torch.nonzero(torch.isin(data.test.labels, classes))[:, 0])
        if len(torch.unique(test.labels)) > 1:
            net = network_from(encoder, broadcast.shape[0], broadcast.classes, upload.weights).to(device)
            unit = unit_features(net, test.batches(device, *preprocessing(broadcast.recipe)))
            yield upload.client, geometry_of(unit.double().cpu(), test.labels)
