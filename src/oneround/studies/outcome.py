"""What a named study shows so far: means, paired differences to its baseline, and the figures of the source note beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

from oneround.analysis.comparison import grouped, measured_on
from oneround.analysis.sheets import Sheet
from oneround.analysis.statistics import (
    Comparison,
    Summary,
    compare_decisive,
    compare_paired,
    figure_verdict,
    paired,
)
from oneround.evaluate import transductive_name
from oneround.formatting import plural
from oneround.models.inference import TRANSDUCTIVE
from oneround.runs.record import RunRecord
from oneround.studies.named_study import Cell, ClientFigures, NamedStudy
from oneround.studies.reproduce import Progress

EVALUATION = "evaluation"
MODES = (EVALUATION, TRANSDUCTIVE)
NOTED = TRANSDUCTIVE  # the mode of the notes' accuracies

T = TypeVar("T")
Accuracies = Mapping[tuple[int, ...], float]
"""Percent by unit: by partition, or by partition and training seed where there is one partition; repeats on a unit are averaged."""
Key = tuple[str, int, str]
"""Setting, epoch, variant."""


@dataclass
class Row:
    """A variant in a setting after an epoch."""

    accuracies: Mapping[str, Accuracies]
    """By mode."""
    noted: float | None
    """The note's accuracy."""
    runs: Sequence[RunRecord]
    differences: dict[str, Comparison] = field(default_factory=dict)
    """By mode, to the baseline."""
    noted_difference: float | None = None
    from_noted: Comparison | None = None
    """Ours minus the note's accuracy."""
    from_noted_difference: Comparison | None = None

    def cells(self, baseline: str | None, traces: Sequence[str], epoch: int) -> dict[str, str]:
        """The row of the table, by head."""
        columns = {"n": str(max(len(each) for each in self.accuracies.values()))}
        columns |= {mode: _each(each) for mode, each in self.accuracies.items()}
        for mode in MODES:
            columns[f"− {baseline}, {mode}"] = _tested(self.differences.get(mode))
        columns["the note"] = _judged(self.noted, self.from_noted, ".2f")
        columns[f"the note − {baseline}"] = _judged(self.noted_difference, self.from_noted_difference, "+.2f")
        for quantity in traces:
            columns[quantity] = _traced(self.runs, quantity, epoch)
        seconds = [run.seconds for run in self.runs if run.seconds is not None]
        columns["s"] = f"{fmean(seconds):.0f}" if seconds else ""
        return columns


def outcome(study: NamedStudy, progress: Progress) -> Sheet:
    """The table of what is measured: a row for each setting, epoch and variant; columns that say nothing are left out."""
    rows = rows_of(study, progress)
    table = [
        {"setting": key[0], "epochs": str(key[1]), "variant": key[2]} | row.cells(study.baseline, study.traces, key[1])
        for key, row in rows.items()
    ]
    heads = [head for head in table[0] if any(cells[head] for cells in table)] if table else []
    heads = [head for head in heads if head not in ("setting", "epochs") or len({cells[head] for cells in table}) > 1]
    notes = _notes(study, progress, rows)
    return Sheet(study.question, heads, [[cells[head] for head in heads] for cells in table], notes)


def rows_of(study: NamedStudy, progress: Progress) -> dict[Key, Row]:
    """The rows of the table, with what is compared in them."""
    rows: dict[Key, Row] = {}
    for setting, cells in grouped(progress.cells, lambda cell: cell.setting).items():
        one_partition = len({cell.partition for cell in cells}) == 1
        epochs = sorted({epoch for cell in cells for epoch in _shown(cell)})
        for epoch in epochs:
            for variant, same in grouped(cells, lambda cell: cell.variant).items():
                measured = {cell: run for cell in same if (run := progress.runs.get(cell)) is not None}
                accuracies = {mode: _by_unit(measured, mode, epoch, one_partition) for mode in MODES}
                if any(accuracies.values()):
                    value = study.note.get(setting, {}).get(variant)
                    noted = value.get(epoch) if isinstance(value, dict) else value if epoch == epochs[-1] else None
                    rows[setting, epoch, variant] = Row(accuracies, noted, list(measured.values()))
    _compare(study, rows)
    return rows


def _shown(cell: Cell) -> list[int]:
    """The epochs of a cell that have a row: those its snapshots name, and the last."""
    snapshots = cell.recipe.snapshots
    return [*(snapshots if isinstance(snapshots, list) else ()), cell.recipe.epochs]


def _by_unit(measured: Mapping[Cell, RunRecord], mode: str, epoch: int, one_partition: bool) -> Accuracies:
    values: dict[tuple[int, ...], list[float]] = {}
    for cell, run in measured.items():
        batch = cell.recipe.evaluation.batch_size
        rule = cell.rule or run.main_rule
        rule = rule if mode == EVALUATION else transductive_name(rule, batch)
        accuracy = run.curves.get(rule, {}).get(epoch)
        if accuracy is not None:
            unit = (cell.partition, cell.seed) if one_partition else (cell.partition,)
            values.setdefault(unit, []).append(100 * accuracy)
    return {unit: fmean(each) for unit, each in values.items()}


def _compare(study: NamedStudy, rows: Mapping[Key, Row]) -> None:
    """Put into the rows what is compared; p values are corrected for all rows of a mode together."""
    bases = {key: rows.get((*key[:2], study.baseline or "")) for key in rows if key[2] != study.baseline}
    for mode in MODES:
        found = {key: _paired(rows[key], base, mode) for key, base in bases.items() if base}
        for key, comparison in _together(compare_paired, found).items():
            rows[key].differences[mode] = comparison
    for key, base in bases.items():
        if base and base.noted is not None and (own := rows[key].noted) is not None:
            rows[key].noted_difference = own - base.noted
    apart = {key: _minus(row.accuracies[NOTED].values(), row.noted) for key, row in rows.items()}
    against = {
        key: _minus(row.differences[NOTED].difference.values, row.noted_difference)
        for key, row in rows.items()
        if NOTED in row.differences
    }
    judged = _together(
        compare_decisive,
        {(kind, key): each for kind, by in enumerate((apart, against)) for key, each in by.items()},
    )
    for key, row in rows.items():
        row.from_noted, row.from_noted_difference = judged.get((0, key)), judged.get((1, key))


def _minus(values: Iterable[float], figure: float | None) -> Summary:
    """Empty where the note has no figure."""
    return Summary(() if figure is None else tuple(value - figure for value in values))


def _paired(row: Row, base: Row, mode: str) -> Summary:
    """Differences on the units that both have."""
    ours, theirs = row.accuracies[mode], base.accuracies[mode]
    shared = [unit for unit in theirs if unit in ours]
    return paired([ours[unit] for unit in shared], [theirs[unit] for unit in shared])


def _together(
    compare: Callable[[Sequence[Summary]], list[Comparison]], differences: Mapping[T, Summary]
) -> dict[T, Comparison]:
    """Comparisons that are corrected together; empty differences are left out."""
    present = {key: each for key, each in differences.items() if each.values}
    return dict(zip(present, compare(list(present.values())), strict=True))


# --- text ------------------------------------------------------------------------------------------------------------


def _each(accuracies: Accuracies) -> str:
    """`58.8 ± 5.8 (58.6 56.5 61.2)`"""
    values = tuple(accuracies.values())
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else ""
    return f"{Summary(values):.1f} ({' '.join(f'{value:.1f}' for value in values)})"


def _tested(comparison: Comparison | None) -> str:
    """`-4.7 ± 14.9, p 0.84`"""
    if comparison is None:
        return ""
    return f"{comparison.difference:+.1f}" + ("" if comparison.corrected is None else f", p {comparison.corrected:.2g}")


def _judged(noted: float | None, apart: Comparison | None, form: str) -> str:
    """`58.77, reproduced`"""
    if noted is None:
        return ""
    return f"{noted:{form}}" + ("" if apart is None else f", {figure_verdict(apart)}")


def _traced(runs: Sequence[RunRecord], quantity: str, epoch: int) -> str:
    """Mean over clients after an epoch, of every run; mean and interval over runs."""
    values = [
        fmean(each) for run in runs if (each := [by[epoch] for by in run.trace(quantity).values() if epoch in by])
    ]
    return f"{Summary(tuple(values)):.3g}" if values else ""


def _notes(study: NamedStudy, progress: Progress, rows: Mapping[Key, Row]) -> list[str]:
    several = any(len(unit) == 1 for row in rows.values() for each in row.accuracies.values() for unit in each)
    what = "partition" if several or study.training_seeds is None else "training seed"
    done = f"{len(progress.runs)} of {plural(len(progress.cells), 'cell')} measured"
    lines = [
        f"{done}; test accuracy in %, mean ± 95 % (each {what}); transductive: batch norm on the statistics of shuffled test batches; "
        "s: seconds of a cell; traces: mean over clients at that epoch"
        + (f"; rule: {study.rule}" if study.rule else ""),
    ]
    if study.baseline is not None:
        lines.append(
            f"− {study.baseline}: paired differences, p of a two-sided t-test, Holm-corrected for all rows of a mode"
        )
    if study.note:
        lines.append(
            f"the note ({study.source}): its figures are transductive; refuted where ours differ (Holm-corrected), reproduced where they "
            "lie in our interval and that is at most ± 2 points wide, with three values or more"
        )
    return [
        *lines,
        *(line for each in study.figures for line in _by_client(each, progress)),
        *measured_on(list(progress.runs.values())),
    ]


def _by_client(figures: ClientFigures, progress: Progress) -> list[str]:
    """A quantity of every client beside the note's, mean over runs."""
    of = (figures.setting, figures.variant)
    runs = [run for cell, run in progress.runs.items() if (cell.setting, cell.variant) == of]
    by_run = [[by.get(figures.epoch) for by in run.trace(figures.quantity).values()] for run in runs]
    whole = [[value for value in each if value is not None] for each in by_run]
    whole = [each for each in whole if len(each) == len(figures.values)]
    if not whole:
        return []
    ours = [fmean(each) for each in zip(*whole, strict=True)]
    off = [abs(one - other) / abs(other) for one, other in zip(ours, figures.values, strict=True)]
    shown, noted = (" ".join(f"{value:.4g}" for value in values) for values in (ours, figures.values))
    where = f"{figures.quantity} of {figures.variant} after epoch {figures.epoch}, client by client"
    return [
        f"{where}: {shown} (mean of {plural(len(whole), 'run')}); the note {noted}; at most {100 * max(off):.0f} % apart"
    ]
