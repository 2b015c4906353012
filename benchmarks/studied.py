"""Records of `oneround reproduce` as evidence: what a named study says of a claim, once results/ has its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean, stdev

from oneround.analysis.statistics import Summary, paired
from oneround.formatting import plural
from oneround.runs.record import RunRecord
from oneround.studies.named_study import cells, read_study
from oneround.studies.outcome import MODES, Key, Row, rows_of
from oneround.studies.reproduce import Progress, read_progress

RECORDS = Path(__file__).parent.parent / "results"
FAMILY = ("anchors", "family", "v10-repairs")
"""Studies of the same settings on the same partitions, whose variants can be compared with each other."""


@lru_cache
def progress_of(name: str) -> Progress | None:
    """What is measured of a study; None without its record."""
    file = RECORDS / f"{name}.json"
    progress = read_progress(cells(read_study(name)), file) if file.is_file() else None
    return progress if progress and progress.runs else None


@lru_cache
def study_rows(name: str) -> Mapping[Key, Row]:
    """What a study shows, by setting, epoch and variant; empty without its record."""
    progress = progress_of(name)
    return rows_of(read_study(name), progress) if progress else {}


def last_rows(name: str, variant: str) -> dict[str, Row]:
    """A variant after its last epoch, by setting."""
    ends = {setting: epoch for setting, epoch, _ in sorted(study_rows(name), key=lambda key: key[1])}
    found = {setting: study_rows(name).get((setting, end, variant)) for setting, end in ends.items()}
    in_order = [setting for setting in read_study(name).settings if found.get(setting)]
    return {setting: row for setting in in_order if (row := found[setting]) is not None}


@dataclass(frozen=True)
class Variant:
    """A variant of the family's studies."""

    study: str
    row: Row

    @property
    def runs(self) -> list[RunRecord]:
        return sorted(self.row.runs, key=lambda run: run.partition_seed)


def of_family(name: str) -> Variant | None:
    """A variant in the first of the family's studies that has it."""
    for study in FAMILY:
        for row in last_rows(study, name).values():
            return Variant(study, row)
    return None


def shared(*variants: Variant | None) -> list[list[RunRecord]]:
    """Their runs on the partitions that all have; none where one is missing."""
    present = [each for each in variants if each is not None]
    if len(present) < len(variants):
        return [[] for _ in variants]
    seeds = set.intersection(*({run.partition_seed for run in each.runs} for each in present))
    runs = [[run for run in each.runs if run.partition_seed in seeds] for each in present]
    for same in zip(*runs, strict=True):
        assert len({run.partition_digest for run in same}) == 1, (
            f"partition {same[0].partition_seed} is not the same one"
        )
    return runs


def difference(one: Row, other: Row, mode: str) -> Summary:
    """The first minus the second in points, on the partitions and seeds that both have."""
    ours, theirs = one.accuracies[mode], other.accuracies[mode]
    units = [unit for unit in ours if unit in theirs]
    return paired([ours[unit] for unit in units], [theirs[unit] for unit in units])


def mean_client(row: Row) -> Row:
    """The same runs with the accuracy of the mean client alone, which is measured in evaluation mode only."""
    alone = {(run.partition_seed,): 100 * mean(run.local_accuracy.values()) for run in row.runs}
    return Row({mode: alone if mode == MODES[0] else {} for mode in MODES}, None, row.runs)


def differences(
    name: str, variant: str, baseline: str, setting: str = "", baseline_setting: str = "", alone: bool = False
) -> dict[str, dict[str, Summary]]:
    """By setting and mode, a variant minus another (`alone`: minus its mean client), in a setting of its own where one is named."""
    ours, theirs = last_rows(name, variant), last_rows(name, baseline)
    found: dict[str, dict[str, Summary]] = {}
    for own in [setting] if setting else ours:
        row, base = ours.get(own), theirs.get(baseline_setting or own)
        if row is not None and base is not None:
            base = mean_client(base) if alone else base
            by_mode = {mode: difference(row, base, mode) for mode in MODES}
            found[own] = {mode: each for mode, each in by_mode.items() if each.values}
    return {own: by_mode for own, by_mode in found.items() if by_mode}


def description(name: str) -> str:
    """`25 of 25 cells, 5 partitions, both modes, 63 s a run on NVIDIA H200`; cells that differ in a rule share a run."""
    progress = progress_of(name)
    assert progress is not None
    runs = list({id(run): run for run in progress.runs.values()}.values())
    seconds = [run.seconds for run in runs if run.seconds is not None]
    devices = sorted({str(run.measured_on.get("device")) for run in runs if run.measured_on})
    partitions = plural(len({run.partition_seed for run in runs}), "partition")
    return (
        f"{len(progress.runs)} of {plural(len(progress.cells), 'cell')}, {partitions}, both modes, "
        f"{mean(seconds):.1f} s a run" + (f" on {' and '.join(devices)}" if devices else "")
    )


def spread_of_reruns() -> str:
    """By how much one recipe varies with the training seed; empty where three runs are not measured."""
    for row in last_rows("rerun-noise", "V4").values():
        values = {mode: list(row.accuracies[mode].values()) for mode in MODES}
        if all(len(each) > 2 for each in values.values()):
            spread = " and ".join(f"{stdev(each):.1f} ({mode})" for mode, each in values.items())
            return f"Ours: FAFI on one partition with {len(values[MODES[0]])} training seeds has a standard deviation of {spread} points."
    return ""


def turned() -> list[tuple[str, float, dict[str, Summary]]]:
    """Forms of alignment: name, cosine of prototypes to their anchors at the end, difference to FAFI by mode."""
    found = []
    for name in read_study("aligned").variants:
        if name != "V4" and (by_setting := differences("aligned", name, "V4")):
            ((setting, by_mode),) = by_setting.items()
            traces = [run.trace("anchor_cosine") for run in last_rows("aligned", name)[setting].runs]
            ends = [by_epoch[max(by_epoch)] for by_client in traces for by_epoch in by_client.values()]
            if ends:
                found.append((name, mean(ends), by_mode))
    return found
