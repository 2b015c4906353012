"""The result of a run, as `run` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from statistics import fmean

from oneround.errors import RunError
from oneround.runs.folder import RunFolder
from oneround.runs.log import best_epoch
from oneround.runs.record import RunRecord


@dataclass(frozen=True)
class Result:
    """Accuracies of a finished run, as shares from 0 to 1."""

    folder: Path
    rules: Mapping[str, float]
    """Test accuracy of every fusion rule on the same uploads."""
    clients: Mapping[str, float]
    """Test accuracy of every client's own model."""
    curves: Mapping[str, Mapping[int, float]]
    """Rule → local epochs → test accuracy."""
    validation: Mapping[str, Mapping[int, float]]
    """The same on validation images; empty where there are none."""
    partition: str
    """Digest of which client holds which sample."""
    remarks: tuple[str, ...]
    personalised: Mapping[str, float] = field(default_factory=dict)
    """Model (rule, local or personal) → accuracy on each client's own mix of classes, averaged over clients."""

    @staticmethod
    def read(folder: str | PathLike[str]) -> Result:
        """The result of a finished run; RunError if there is none, or a damaged one."""
        run_folder = RunFolder(Path(folder))
        if not run_folder.result.is_file():
            raise RunError(
                f"{folder}: no finished run here (no result.json); continue with {run_folder.resume_command}"
            )
        return Result.of(RunRecord.read(run_folder.path, strict=["result.json"]))

    @staticmethod
    def of(record: RunRecord) -> Result:
        """The result of a finished run, from its record."""
        return Result(
            record.path,
            record.accuracy,
            record.local_accuracy,
            record.curves,
            record.validation,
            record.partition_digest,
            record.remarks,
            mean_over_clients(record.personalised),
        )

    @property
    def chosen(self) -> dict[str, int]:
        """Rule → the epoch of its best snapshot on validation images, the earliest of equals."""
        return {rule: best_epoch(curve) for rule, curve in self.validation.items()}


def mean_over_clients(personal: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """Model → mean over the clients whose accuracy is known."""
    known = {name: [value for value in by.values() if value is not None] for name, by in personal.items()}
    return {name: fmean(values) for name, values in known.items() if values}
