"""Tables of a comparison: methods with verdicts, epochs × methods, λ per client, peaks, prototypes and anchors, epochs to an accuracy,
gradient cosines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from oneround.analysis.comparison import Entry, Group
from oneround.analysis.sheets import VERDICT, Sheet
from oneround.analysis.statistics import Comparison
from oneround.errors import RecipeError
from oneround.formatting import format_bytes, plural
from oneround.runs.log import Curves
from oneround.runs.record import RunRecord


def methods_sheet(group: Group, interest: float) -> Sheet:
    """Methods: mean and interval, each partition, the paired difference and its verdict."""
    named = "rule" if len(group.runs) == 1 < len(group.entries) else "method"
    heads = [named, "mean ± 95 %", "each partition", f"minus {group.short(group.baseline)}", "p", "effect", VERDICT]
    rows, data = [], []
    for entry in group.entries:
        tested = group.comparisons.get(entry.name)
        by_partition = " ".join(f"{value:.1f}" for value in entry.summary.values)
        cells = [group.short(entry), f"{entry.summary:.1f}", by_partition]
        if tested is None:
            cells += ["", "", "", "baseline"]
        else:
            effect = "" if tested.effect is None else f"{tested.effect:+.2f}"
            p = "" if tested.corrected is None else f"{tested.corrected:.2g}"
            cells += [f"{tested.difference:+.1f}", p, effect, tested.verdict(interest)]
        rows.append(cells)
        data.append(_row_data(entry, tested, interest))
    repeats = f", up to {group.repeats} repeats each, averaged first" if group.repeats > 1 else ""
    notes = [f"test accuracy in %, {plural(len(group.seeds), 'partition')} (seeds {_listed(group.seeds)}){repeats}"]
    if group.comparisons:
        notes.append(
            "differences are paired on the same partition; p: two-sided paired t-test, Holm-corrected for "
            f"{plural(len(group.comparisons), 'comparison')}; effect: mean difference in standard deviations of the differences"
        )
    return Sheet(group.title, heads, rows, [*notes, *group.remarks], data)


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, seeds))


def rounds_sheet(group: Group, every: int = 1) -> Sheet:
    """Local epochs × methods, with the difference of each to the baseline."""
    curves = {entry.name: entry.curve() for entry in group.entries}
    entries = [entry for entry in group.entries if curves[entry.name]]  # local models have no curve
    if group.baseline not in entries:
        raise RecipeError(f"--baseline {group.short(group.baseline)}: has no curve over epochs; choose a rule")
    trained = [entry for entry in entries if entry.runs[0].trains] or entries
    epochs = _every(every, set.intersection(*(set(curves[entry.name]) for entry in trained)))
    for entry in entries:
        if not entry.runs[0].trains:  # a single pass; its accuracy is shown at every epoch of the others
            curves[entry.name] = dict.fromkeys(epochs, curves[entry.name][max(curves[entry.name])])
    others = [entry for entry in entries if entry is not group.baseline]
    base = curves[group.baseline.name]
    heads = ["epoch", *(group.short(entry) for entry in entries), *(f"Δ {group.short(entry)}" for entry in others)]
    rows = []
    for epoch in epochs:
        differences = (curves[entry.name][epoch] - base[epoch] for entry in others)
        accuracies = (f"{curves[entry.name][epoch]:.2f}" for entry in entries)
        rows.append([str(epoch), *accuracies, *(f"{difference:+.2f}" for difference in differences)])
    note = f"mean test accuracy in % over partitions {_listed(group.seeds)}; Δ: minus {group.short(group.baseline)}"
    return Sheet(f"{group.title}: accuracy over local epochs", heads, rows, [note], curves)


def lambda_sheets(group: Group, every: int = 1) -> list[Sheet]:
    """λ per client and epoch, for each method that has one, on its first partition."""
    sheets = []
    for method, (run, *_) in group.runs.items():
        raw, effective = run.trace("lambda_raw"), run.trace("lambda_effective")
        if not raw:
            continue
        epochs = _every(every, {epoch for trace in raw.values() for epoch in trace})
        same = raw == effective
        shown = {} if same else effective
        rows = [
            [str(epoch), *(_lambda(raw[client].get(epoch), shown.get(client, {}).get(epoch)) for client in raw)]
            for epoch in epochs
        ]
        note = f"partition {run.partition_seed}" + ("" if same else "; raw λ → truly effective λ")
        title = f"λ of {method}" + (f", {group.setting}" if group.setting else "")
        sheets.append(Sheet(title, ["epoch", *raw], rows, [note], {"raw": raw, "effective": effective}))
    return sheets


def peaks_sheet(group: Group) -> Sheet:
    """Runs: growth of λ, and loss of accuracy since the peak."""
    heads = ["method", "partition", "λ first → last", "most growth", "peak %", "final %", "drop"]
    rows = []
    for entry in group.entries:
        for run in entry.runs:
            curve = {epoch: 100 * value for epoch, value in run.curves.get(entry.rule, {}).items()}
            if not curve:
                raise RecipeError(f"{entry.name}: has no curve over epochs; choose a rule")
            weights = [list(trace.values()) for trace in run.trace("lambda_raw").values()]
            largest = max(weights, key=lambda values: values[-1], default=None)
            growth = max((values[-1] / values[0] for values in weights if values[0] > 0), default=None)
            peak, final = max(curve.values()), curve[max(curve)]
            of_lambda = ["" if largest is None else f"{largest[0]:.3g} → {largest[-1]:.3g}"]
            of_lambda += ["" if growth is None else f"× {growth:.3g}"]
            of_accuracy = [f"{peak:.1f}", f"{final:.1f}", f"{peak - final:.1f}"]
            rows.append([group.short(entry), str(run.partition_seed), *of_lambda, *of_accuracy])
    notes = [
        "λ raw, of the client whose λ is largest at the end; most growth: of any client, last epoch over first; peak: best snapshot, "
        "seen on test data; drop: points from there to the end",
        *group.remarks,
    ]
    return Sheet(f"{group.title}: growth of λ and fall of accuracy", heads, rows, notes)


def anchors_sheet(group: Group) -> Sheet:
    """Runs: how far prototypes turned towards their anchors, their length, and what is left of L_align."""
    heads = ["method", "partition", "cos(P, A) first → last", "least", "length first → last", "L_align first → last"]
    rows = []
    for entry in group.entries:
        for run in entry.runs:
            cosines = run.trace("anchor_cosine")
            if not cosines:
                continue
            least = min(trace[max(trace)] for trace in cosines.values())
            cells = [
                _first_and_last(cosines),
                f"{least:.3f}",
                *(_first_and_last(run.trace(name)) for name in ("prototype_norm", "align")),
            ]
            rows.append([group.short(entry), str(run.partition_seed), *cells, f"{100 * run.accuracy[entry.rule]:.1f}"])
    if not rows:
        raise RecipeError("none of these runs traced where its prototypes are (alignment); --layout methods or rounds")
    note = "means over clients after the first and the last epoch; least: of the client whose prototypes turned least"
    return Sheet(f"{group.title}: prototypes and their anchors", [*heads, "final %"], rows, [note, *group.remarks])


def _first_and_last(traces: Curves) -> str:
    """`0.012 → 0.950`: means over clients after the first and the last epoch; empty where nothing was measured."""
    return " → ".join(f"{fmean(trace[end(trace)] for trace in traces.values()):.3f}" for end in (min, max) if traces)


def costs_sheet(runs: Sequence[RunRecord]) -> Sheet:
    """Methods in any setting, on one machine or on many: accuracy, top-5, loss, bytes of all clients and seconds; means over runs."""
    heads = ["method", "clients", "runs", "rounds × epochs", "accuracy %", "top-5 %", "loss", "down", "up", "seconds"]
    forms: dict[str, Callable[[float], str]] = {
        "top5": lambda share: f"{100 * share:.1f}", "loss": lambda loss: f"{loss:.3f}", "bytes_down": format_bytes,
        "bytes_up": format_bytes, "seconds": lambda seconds: f"{seconds:.0f}",
    }  # fmt: skip
    rows, data = [], []
    for (method, clients), same in _alike(runs).items():
        costs = [run.costs for run in same]
        known = {name: fmean(each[name] for each in costs) for name in forms if all(name in each for each in costs)}
        accuracy = fmean(run.accuracy[run.main_rule] for run in same)
        trained = f"{same[0].keys.get('rounds', 1)} × {same[0].keys.get('training.epochs', 1)}"
        shown = [form(known[name]) if name in known else "" for name, form in forms.items()]
        rows.append([method, str(clients), str(len(same)), trained, f"{100 * accuracy:.1f}", *shown])
        data.append({"method": method, "clients": clients, "runs": len(same), "accuracy": accuracy, **known})
    devices = sorted({str(run.measured_on["device"]) for run in runs if run.measured_on})
    note = (
        "on test images, by the rule that makes each run's model; means over runs, which are not paired: partitions and numbers of clients "
        "differ; bytes: of all clients in all rounds (one client is one machine, where nothing has to be sent); seconds: with scoring"
    )
    return Sheet(
        "Accuracy and its price", heads, rows, [note, *([f"measured on {', '.join(devices)}"] if devices else [])], data
    )


def _alike(runs: Sequence[RunRecord]) -> dict[tuple[str, int], list[RunRecord]]:
    """Runs by method (and its rule, where runs of a method have several) and number of clients."""
    rules = {(run.method, run.main_rule) for run in runs}
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    for run in runs:
        several = sum(method == run.method for method, _ in rules) > 1
        name = f"{run.method} · {run.main_rule}" if several else run.method
        groups.setdefault((name, int(run.keys.get("partition.clients") or len(run.local_accuracy))), []).append(run)
    return groups


def goals_sheet(group: Group, goals: Sequence[float]) -> Sheet:
    """Local epochs (or rounds, if there are several) and seconds until every method reaches each accuracy in %."""
    heads = ["method", "best", "final", *(f"to {goal:g} %" for goal in goals)]
    rows, data = [], []
    for entry in group.entries:
        runs = [run for run in entry.runs if run.curves.get(entry.rule)]
        if not runs:
            continue  # local models have no curve
        curves = [{epoch: 100 * value for epoch, value in run.curves[entry.rule].items()} for run in runs]
        best, final = fmean(max(curve.values()) for curve in curves), fmean(curve[max(curve)] for curve in curves)
        reached = {
            str(goal): [_time_to(goal, run, curve) for run, curve in zip(runs, curves, strict=True)] for goal in goals
        }
        rows.append([group.short(entry), f"{best:.1f}", f"{final:.1f}", *map(_mean_time, reached.values())])
        data.append({"method": entry.method, "rule": entry.rule, "best": best, "final": final, "reached": reached})
    if not rows:
        raise RecipeError("none of these runs has a curve over epochs; --layout methods")
    several = any(run.keys.get("rounds", 1) > 1 for entry in group.entries for run in entry.runs)
    notes = [
        f"mean over partitions {_listed(group.seeds)}; best: of all snapshots, seen on test data; {'rounds' if several else 'local epochs'} to "
        "the first snapshot that reaches it, and seconds since the start, scoring included, on the machine it ran on",
        *group.remarks,
    ]
    return Sheet(f"{group.title}: epochs to an accuracy", heads, rows, notes, data)


def _time_to(goal: float, run: RunRecord, curve: Mapping[int, float]) -> tuple[float, float | None] | None:
    """Epochs (or rounds) and, if known, seconds until a run reaches an accuracy; None if it never does."""
    epoch = next((epoch for epoch in sorted(curve) if curve[epoch] >= goal), None)
    if epoch is None:
        return None
    seconds = run.measurements.elapsed.get(epoch)
    return (epoch / run.keys["training.epochs"] if run.keys.get("rounds", 1) > 1 else epoch), seconds


def _mean_time(times: Sequence[tuple[float, float | None] | None]) -> str:
    """`12 (95 s), 2 of 3`: the mean over the runs that reach an accuracy, and how many do where not all do."""
    reached = [each for each in times if each is not None]
    if not reached:
        return "never"
    seconds = [elapsed for _, elapsed in reached if elapsed is not None]
    text = f"{fmean(at for at, _ in reached):.4g}"
    text += f" ({fmean(seconds):.0f} s)" if len(seconds) == len(reached) else ""
    return text if len(reached) == len(times) else f"{text}, {len(reached)} of {len(times)}"


def gradients_sheet(group: Group) -> Sheet:
    """Cosines between the gradients of terms."""
    rows, data = [], []
    for method, runs in group.runs.items():
        cosines: dict[str, list[float]] = {}
        for run in runs:
            for (pair, tensor), by_client in run.cosines().items():
                values = [value for by_epoch in by_client.values() for value in by_epoch.values()]
                cosines.setdefault(f"{pair} at {tensor}", []).extend(values)
        for pair, values in sorted(cosines.items()):
            below, mean = fmean(value < 0 for value in values), fmean(values)
            rows.append([method, pair, f"{mean:+.3f}", f"{below:.0%}", str(len(values))])
            data.append({"method": method, "pair": pair, "mean": mean, "below": below, "traced": len(values)})
    if not rows:
        raise RecipeError("none of these runs traced gradients (trace.every); --layout methods or rounds")
    heads = ["method", "gradients of", "mean cosine", "below 0", "traced epochs"]
    note = f"over clients and traced epochs of partitions {_listed(group.seeds)}"
    return Sheet(f"{group.title}: angles between gradients", heads, rows, [note, *group.remarks], data)


def _every(interval: int, epochs: Iterable[int]) -> list[int]:
    """The epochs divisible by `interval`, the first and the last."""
    ordered = sorted(epochs)
    return [epoch for epoch in ordered if epoch % interval == 0 or epoch in (ordered[0], ordered[-1])]


def _lambda(raw: float | None, effective: float | None) -> str:
    """Raw and effective λ; empty where the log does not have it."""
    if raw is None:
        return ""
    return f"{raw:.4f}" if effective is None else f"{raw:.4g} → {effective:.4g}"


def _row_data(entry: Entry, tested: Comparison | None, interest: float) -> dict[str, Any]:
    """A row of the table as plain data."""
    row: dict[str, Any] = {"method": entry.method, "rule": entry.rule}
    row |= {"mean": entry.summary.mean, "margin": entry.summary.margin}
    row |= {"by_partition": dict(entry.accuracy), "runs": len(entry.runs)}
    if tested is not None:
        row |= {"difference": tested.difference.mean, "difference_margin": tested.difference.margin}
        row |= {"p": tested.p, "p_holm": tested.corrected, "effect": tested.effect, "verdict": tested.verdict(interest)}
    return row
