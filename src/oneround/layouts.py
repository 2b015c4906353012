"""A comparison laid out: methods with verdicts, epochs × methods, λ per client, peaks and falls, how soon, angles between gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from oneround.compare import Entry, Group
from oneround.errors import RecipeError
from oneround.finished import COSINE, ELAPSED, Run
from oneround.observe.formats import VERDICT, Sheet
from oneround.observe.statistics import Comparison


def methods_sheet(group: Group, interest: float) -> Sheet:
    """Every method: mean and interval, each partition, the paired difference and whether it is real."""
    heads = [
        "rule" if len({entry.method for entry in group.entries}) == 1 < len(group.entries) else "method",
        "mean ± 95 %",
        "each partition",
        f"minus {group.short(group.baseline)}",
        "p",
        "effect",
        VERDICT,
    ]
    rows, data = [], []
    for entry in group.entries:
        summary, tested = entry.summary, group.comparisons.get(entry.name)
        margin = f" ± {summary.margin:.1f}" if summary.margin is not None else ""
        each = " ".join(f"{value:.1f}" for value in summary.values)
        cells = [group.short(entry), f"{summary.mean:.1f}{margin}", each]
        if tested is None:
            cells += ["", "", "", "baseline"]
        else:
            effect = "" if tested.effect is None else f"{tested.effect:+.2f}"
            p = "" if tested.corrected is None else f"{tested.corrected:.2g}"
            cells += [_difference(tested), p, effect, tested.verdict(interest)]
        rows.append(cells)
        data.append(_plain(entry, tested, interest))
    notes = [
        f"test accuracy in %, {len(group.seeds)} partition{'s' * (len(group.seeds) != 1)} (seeds {', '.join(map(str, group.seeds))})"
        + (f", up to {group.repeats} repeats each, averaged first" if group.repeats > 1 else ""),
        *_how_compared(len(group.comparisons)),
        *group.remarks,
    ]
    return Sheet(group.setting or "all runs", heads, rows, notes, data)


def _how_compared(number: int) -> list[str]:
    if not number:
        return []
    return [
        f"differences are paired on the same partition; p: two-sided paired t-test, Holm-corrected for {number} "
        f"comparison{'s' * (number != 1)}; effect: mean difference in standard deviations of the differences"
    ]


def _difference(tested: Comparison) -> str:
    """Mean and interval; whether it is real, after correction, is the verdict's to say."""
    margin = tested.difference.margin
    return f"{tested.difference.mean:+.1f}" + ("" if margin is None else f" ± {margin:.1f}")


def rounds_sheet(group: Group, every: int = 1) -> Sheet:
    """Local epochs × methods, with the difference of each to the baseline."""
    curves = {entry.name: entry.curve() for entry in group.entries}
    entries = [entry for entry in group.entries if curves[entry.name]]  # clients alone are scored at the end only
    if group.baseline not in entries:
        raise RecipeError(f"--baseline {group.short(group.baseline)}: has no curve over epochs; choose a rule")
    trained = [entry for entry in entries if entry.runs[0].trains] or entries
    epochs = _shown(set.intersection(*(set(curves[entry.name]) for entry in trained)), every)
    for entry in entries:
        if not entry.runs[0].trains:  # one pass, the same at any epoch of the others
            curves[entry.name] = dict.fromkeys(epochs, curves[entry.name][max(curves[entry.name])])
    others = [entry for entry in entries if entry is not group.baseline]
    base = curves[group.baseline.name]
    heads = ["epoch", *(group.short(entry) for entry in entries), *(f"Δ {group.short(entry)}" for entry in others)]
    rows = [
        [str(epoch), *(f"{curves[entry.name][epoch]:.2f}" for entry in entries), *(f"{curves[entry.name][epoch] - base[epoch]:+.2f}" for entry in others)]
        for epoch in epochs
    ]  # fmt: skip
    note = f"mean test accuracy in % over partitions {', '.join(map(str, group.seeds))}; Δ: minus {group.short(group.baseline)}"
    return Sheet(f"{group.setting or 'all runs'}: accuracy over local epochs", heads, rows, [note], curves)


def lambda_sheets(group: Group, every: int = 1) -> list[Sheet]:
    """λ per client and epoch, for each method that has one, on its first partition."""
    sheets = []
    for method, run in {entry.method: entry.runs[0] for entry in group.entries}.items():
        raw, effective = (run.traces.get(key, {}) for key in ("lambda_raw", "lambda_effective"))
        if not raw:
            continue
        epochs = _shown({epoch for of in raw.values() for epoch in of}, every)
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
    """Run by run: how far λ grew, and how far accuracy fell from its own peak."""
    heads = ["method", "partition", "λ first → last", "most growth", "peak %", "final %", "drop"]
    rows = []
    for entry in group.entries:
        for run in entry.runs:
            curve = {epoch: 100 * value for epoch, value in run.result.curves.get(entry.rule, {}).items()}
            if not curve:
                raise RecipeError(f"{entry.name}: has no curve over epochs; choose a rule")
            weights = [list(by.values()) for by in run.traces.get("lambda_raw", {}).values()]
            largest = max(weights, key=lambda values: values[-1], default=None)
            growth = max((values[-1] / values[0] for values in weights if values[0] > 0), default=None)
            peak, final = max(curve.values()), curve[max(curve)]
            rows.append([
                group.short(entry), str(run.partition_seed), "" if largest is None else f"{largest[0]:.3g} → {largest[-1]:.3g}",
                "" if growth is None else f"× {growth:.3g}", f"{peak:.1f}", f"{final:.1f}", f"{peak - final:.1f}",
            ])  # fmt: skip
    notes = [
        "λ raw, of the client whose λ is largest at the end; most growth: of any client, last epoch over first; peak: best snapshot, "
        "seen on test data; drop: points from there to the end",
        *group.remarks,
    ]
    return Sheet(f"{group.setting or 'all runs'}: growth of λ and fall of accuracy", heads, rows, notes)


def goals_sheet(group: Group, goals: Sequence[float]) -> Sheet:
    """How soon every method is how good: local epochs (rounds, where there are several) and seconds to each accuracy in %."""
    heads = ["method", "best", "final", *(f"to {goal:g} %" for goal in goals)]
    rows, data = [], []
    for entry in group.entries:
        runs = [run for run in entry.runs if run.result.curves.get(entry.rule)]
        if not runs:
            continue  # clients alone are scored at the end only
        curves = [{epoch: 100 * value for epoch, value in run.result.curves[entry.rule].items()} for run in runs]
        best, final = _mean(max(curve.values()) for curve in curves), _mean(curve[max(curve)] for curve in curves)
        reached = [[_first(run, curve, goal) for run, curve in zip(runs, curves, strict=True)] for goal in goals]
        rows.append([group.short(entry), f"{best:.1f}", f"{final:.1f}", *map(_soon, reached)])
        data.append({"method": entry.method, "rule": entry.rule, "best": best, "final": final, "reached": dict(zip(map(str, goals), reached, strict=True))})  # fmt: skip
    if not rows:
        raise RecipeError("none of these runs has a curve over epochs; --layout methods")
    several = any(run.keys.get("rounds", 1) > 1 for entry in group.entries for run in entry.runs)
    notes = [
        f"mean over partitions {', '.join(map(str, group.seeds))}; best: of all snapshots, seen on test data; {'rounds' if several else 'local epochs'} to "
        "the first snapshot that is so good, and seconds since the start, scoring included, on the machine it ran on",
        *group.remarks,
    ]
    return Sheet(f"{group.setting or 'all runs'}: how soon", heads, rows, notes, data)


def _first(run: Run, curve: Mapping[int, float], goal: float) -> tuple[float, float | None] | None:
    """When a run first was that good: rounds or epochs, and seconds if they are known."""
    epoch = next((epoch for epoch in sorted(curve) if curve[epoch] >= goal), None)
    if epoch is None:
        return None
    seconds = run.traces.get(ELAPSED, {}).get("run", {}).get(epoch)
    return (epoch / run.keys["training.epochs"] if run.keys.get("rounds", 1) > 1 else epoch), seconds


def _soon(reached: Sequence[tuple[float, float | None] | None]) -> str:
    there = [each for each in reached if each is not None]
    if not there:
        return "never"
    seconds = [told for _, told in there if told is not None]
    words = f"{_mean(at for at, _ in there):.4g}" + (f" ({_mean(seconds):.0f} s)" if len(seconds) == len(there) else "")
    return words if len(there) == len(reached) else f"{words}, {len(there)} of {len(reached)}"


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def gradients_sheet(group: Group) -> Sheet:
    """Cosines between the gradients of terms: how they act together."""
    rows, data = [], []
    for method, runs in {entry.method: entry.runs for entry in group.entries}.items():
        for pair in sorted({what for run in runs for what in run.traces if what.startswith(COSINE)}):
            values = [value for run in runs for by in run.traces.get(pair, {}).values() for value in by.values()]
            below, mean = sum(value < 0 for value in values) / len(values), sum(values) / len(values)
            rows.append([method, pair.removeprefix(COSINE), f"{mean:+.3f}", f"{below:.0%}", str(len(values))])
            data.append({"method": method, "pair": pair.removeprefix(COSINE), "mean": mean, "below": below, "traced": len(values)})  # fmt: skip
    if not rows:
        raise RecipeError("none of these runs traced gradients (trace.every); --layout methods or rounds")
    heads = ["method", "gradients of", "mean cosine", "below 0", "traced epochs"]
    note = f"over clients and traced epochs of partitions {', '.join(map(str, group.seeds))}"
    return Sheet(f"{group.setting or 'all runs'}: angles between gradients", heads, rows, [note, *group.remarks], data)


def _shown(epochs: Iterable[int], every: int) -> list[int]:
    """The first, every so many, and the last."""
    known = sorted(epochs)
    return [epoch for epoch in known if epoch % every == 0 or epoch in (known[0], known[-1])]


def _lambda(raw: float | None, effective: float | None) -> str:
    """Empty where the log has lost it."""
    if raw is None:
        return ""
    return f"{raw:.4f}" if effective is None else f"{raw:.4g} → {effective:.4g}"


def _plain(entry: Entry, tested: Comparison | None, interest: float) -> dict[str, Any]:
    told: dict[str, Any] = {
        "method": entry.method, "rule": entry.rule, "mean": entry.summary.mean, "margin": entry.summary.margin,
        "by_partition": dict(entry.accuracy), "runs": len(entry.runs),
    }  # fmt: skip
    if tested is not None:
        told |= {
            "difference": tested.difference.mean, "difference_margin": tested.difference.margin, "p": tested.p,
            "p_holm": tested.corrected, "effect": tested.effect, "verdict": tested.verdict(interest),
        }  # fmt: skip
    return told
