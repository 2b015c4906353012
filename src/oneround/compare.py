"""Runs side by side: which method is better, and is the difference real?

Runs are grouped by what they were run on (data, partition rule, model, epochs); within a group each method's repeats on one
partition are averaged first, because they are not independent, and methods are compared partition by partition.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneround.errors import RecipeError, did_you_mean
from oneround.observe.formats import VERDICT, Sheet
from oneround.observe.log import MetricsLog
from oneround.observe.statistics import Comparison, Summary, compared, paired
from oneround.observe.tables import difference_in_words
from oneround.reading import presets
from oneround.runs import Result, RunFolder

SETTING = ("data.", "partition.", "model.", "public", "training.epochs")
OF_NETWORK = ("model.", "training.epochs")  # without meaning where none is trained
ASIDE = ("seeds.", "fusion", "snapshots", "method", "trace.", "evaluation.", "rails.")


@dataclass(frozen=True)
class Run:
    """A finished run, as a comparison sees it."""

    folder: Path
    method: str
    keys: Mapping[str, Any]
    """The federated half of its recipe, flat: `training.epochs` → 50."""
    first_rule: str
    result: Result

    @property
    def partition_seed(self) -> int:
        return int(self.keys["seeds.partition"])

    @property
    def trains(self) -> bool:
        """Whether clients trained a network."""
        return self.keys.get("objective.terms") != "{}"

    def trace(self, key: str) -> dict[str, dict[int, float]]:
        """Something measured per client and epoch."""
        found: dict[str, dict[int, float]] = {}
        for event in MetricsLog(self.folder / "metrics.jsonl"):
            if event["event"] == "epoch" and event.get(key) is not None:
                found.setdefault(event["client"], {})[event["epoch"]] = event[key]
        return found


@dataclass(frozen=True)
class Entry:
    """One line of a comparison: a method fused by a rule."""

    method: str
    rule: str
    runs: tuple[Run, ...]
    accuracy: Mapping[str, float]
    """Percent, by partition digest; repeats averaged."""

    @property
    def summary(self) -> Summary:
        return Summary(tuple(self.accuracy.values()))

    @property
    def name(self) -> str:
        return f"{self.method} · {self.rule}"

    def curve(self) -> dict[int, float]:
        """Mean accuracy in percent after so many local epochs."""
        curves = [run.result.curves[self.rule] for run in self.runs]
        epochs = sorted(set.intersection(*(set(curve) for curve in curves)))
        return {epoch: 100 * sum(curve[epoch] for curve in curves) / len(curves) for epoch in epochs}


@dataclass(frozen=True)
class Group:
    """Methods on the same setting and the same partitions."""

    setting: str
    entries: tuple[Entry, ...]
    baseline: Entry
    comparisons: Mapping[str, Comparison]
    """By name of the entry; the baseline has none."""
    seeds: tuple[int, ...]
    """Partition seeds."""
    repeats: int
    """Runs per method and partition, at most."""
    remarks: tuple[str, ...]


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Every finished run in these folders, however deep."""
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.exists():
            raise RecipeError(f"{path}: no such folder")
        for result in sorted(path.rglob("result.json")):
            folder = result.parent
            if (folder / "recipe.yaml").is_file() and folder.resolve() not in found:
                recipe = RunFolder(folder).read_recipe()
                keys = dict(_flat(recipe.plain()))
                read = Result.read(folder)
                found[folder.resolve()] = Run(folder, recipe.method, keys, next(iter(read.rules)), read)
    if not found:
        raise RecipeError(f"no finished run in {', '.join(map(str, paths))} (a run folder has a result.json)")
    return list(found.values())


def _flat(tree: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(tree) if isinstance(tree, list | dict) else tree


def compare(
    runs: Sequence[Run], baseline: str | None = None, rule: str | None = None, *, common: bool = False
) -> list[Group]:
    """Groups of comparable runs. `rule`: one rule, `all`, or each method's first; `common`: only partitions all methods have."""
    entries = {setting: _entries(members, rule) for setting, members in _by_setting(runs).items()}
    if baseline is not None and not any(_find_baseline(each, baseline) for each in entries.values()):
        names = list(dict.fromkeys(entry.method for each in entries.values() for entry in each))
        raise RecipeError(
            f"--baseline {baseline}: not among what is compared{did_you_mean(baseline, names)} ({', '.join(names)})"
        )
    return [
        _group(setting, each, _find_baseline(each, baseline) or each[0], common) for setting, each in entries.items()
    ]


def _by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs on the same setting; one without a network is the same for every encoder and length and joins all it fits."""
    trained = [run for run in runs if run.trains]
    shared = [key for key in _varying(runs, lambda key: key.startswith(SETTING)) if not key.startswith(OF_NETWORK)]
    settings = shared + _varying(trained, lambda key: key.startswith(OF_NETWORK))
    grouped: dict[str, list[Run]] = {}
    for run in trained:
        grouped.setdefault(_words(run, settings), []).append(run)
    fitting = {name: _words(members[0], shared) for name, members in grouped.items()}
    for run in runs:
        if not run.trains:
            here = _words(run, shared)
            for name in [name for name, its in fitting.items() if its == here] or [here]:
                grouped.setdefault(name, []).append(run)
    return grouped


def _group(setting: str, entries: Sequence[Entry], base: Entry, common: bool) -> Group:
    theirs = set(base.accuracy)
    shared = set.intersection(*(set(entry.accuracy) for entry in entries))
    for entry in entries:
        if set(entry.accuracy) != theirs and not common:
            raise RecipeError(
                f"{entry.name} and {base.name} were not run on the same partitions ({len(set(entry.accuracy) & theirs)} in common, "
                f"{len(set(entry.accuracy) ^ theirs)} not): their difference would be the partitions'; run the missing ones, or --common"
            )
    if not shared:
        raise RecipeError(f"no partition is common to all of {', '.join(entry.name for entry in entries)}")
    kept = [
        Entry(entry.method, entry.rule, tuple(run for run in entry.runs if run.result.partition in shared),
              {digest: entry.accuracy[digest] for digest in base.accuracy if digest in shared})
        for entry in entries
    ]  # fmt: skip
    base = next(entry for entry in kept if entry.name == base.name)
    others = [entry for entry in kept if entry is not base]
    differences = [paired(list(entry.accuracy.values()), list(base.accuracy.values())) for entry in others]
    tested = {entry.name: each for entry, each in zip(others, compared(differences), strict=True)}
    used = [run for entry in kept for run in entry.runs]
    per_partition = max(
        sum(run.result.partition == digest for run in entry.runs) for entry in kept for digest in entry.accuracy
    )
    remarks = dict.fromkeys(
        f"partition {run.partition_seed}: {remark}" for run in used for remark in run.result.remarks
    )
    seeds = tuple(sorted({run.partition_seed for run in used}))
    return Group(setting, tuple(kept), base, tested, seeds, per_partition, tuple(remarks))


def _entries(runs: Sequence[Run], rule: str | None) -> list[Entry]:
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    entries = []
    for same in methods.values():
        variants = _varying(same, lambda key: not key.startswith((*SETTING, *ASIDE)))
        named: dict[str, list[Run]] = {}
        for run in same:
            named.setdefault(" ".join(filter(None, [run.method, _words(run, variants)])), []).append(run)
        for name, mine in named.items():
            known = list(mine[0].result.rules)
            chosen = known if rule == "all" else [rule or mine[0].first_rule]
            for each in chosen:
                if any(each not in run.result.rules for run in mine):
                    raise RecipeError(
                        f"{name}: no rule '{each}' in its runs{did_you_mean(each, known)} (there are {', '.join(known)})"
                    )
                entries.append(Entry(name, each, tuple(mine), _by_partition(mine, each)))
    return entries


def _by_partition(runs: Sequence[Run], rule: str) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.partition_seed):
        found.setdefault(run.result.partition, []).append(100 * run.result.rules[rule])
    return {digest: sum(values) / len(values) for digest, values in found.items()}


def _find_baseline(entries: Sequence[Entry], wanted: str | None) -> Entry | None:
    """The entry a name means: a method (or its alias), a rule, or `method · rule`; the first without one."""
    if wanted is None:
        return entries[0]
    alias = {raw.get("about", {}).get("alias"): name for name, raw in presets().items()}
    meant = {wanted, alias.get(wanted)}
    return next((entry for entry in entries if {entry.name, entry.method, entry.rule} & meant), None)


def _varying(runs: Sequence[Run], wanted: Any) -> list[str]:
    """Keys of which not all runs have the same value."""
    keys = sorted({key for run in runs for key in run.keys if wanted(key)})
    return [key for key in keys if len({str(run.keys.get(key)) for run in runs}) > 1]


def _words(run: Run, keys: Sequence[str]) -> str:
    """`alpha=0.05 epochs=50`"""
    return " ".join(f"{key.removesuffix('.kind').split('.')[-1]}={run.keys[key]}" for key in keys if key in run.keys)


# --- tables ----------------------------------------------------------------------------------------------------------


def methods_sheet(group: Group, interest: float) -> Sheet:
    """Every method: mean and interval, each partition, the paired difference and whether it is real."""
    rules = {entry.rule for entry in group.entries}
    heads = [
        "method",
        "mean ± 95 %",
        "each partition",
        f"minus {_short(group.baseline, rules)}",
        "p",
        "effect",
        VERDICT,
    ]
    rows, data = [], []
    for entry in group.entries:
        summary, tested = entry.summary, group.comparisons.get(entry.name)
        margin = f" ± {summary.margin:.1f}" if summary.margin is not None else ""
        each = " ".join(f"{value:.1f}" for value in summary.values)
        cells = [_short(entry, rules), f"{summary.mean:.1f}{margin}", each]
        if tested is None:
            cells += ["", "", "", "baseline"]
        else:
            effect = "" if tested.effect is None else f"{tested.effect:+.2f}"
            p = "" if tested.corrected is None else f"{tested.corrected:.2g}"
            cells += [difference_in_words(tested.difference), p, effect, tested.verdict(interest)]
        rows.append(cells)
        data.append(_plain(entry, tested, interest))
    notes = [
        f"test accuracy in %, {len(group.seeds)} partition{'s' * (len(group.seeds) != 1)} (seeds {', '.join(map(str, group.seeds))})"
        + (f", up to {group.repeats} repeats each, averaged first" if group.repeats > 1 else ""),
        "differences are paired on the same partition; p: two-sided paired t-test, Holm-corrected for "
        f"{len(group.comparisons)} comparison{'s' * (len(group.comparisons) != 1)}; effect: mean difference in standard deviations of the differences",
        *group.remarks,
    ]
    return Sheet(group.setting or "all runs", heads, rows, notes, data)


def rounds_sheet(group: Group) -> Sheet:
    """Local epochs × methods, with the difference of each to the baseline."""
    curves = {entry.name: entry.curve() for entry in group.entries}
    rules = {entry.rule for entry in group.entries}
    trained = [curves[entry.name] for entry in group.entries if entry.runs[0].trains] or list(curves.values())
    epochs = sorted(set.intersection(*(set(curve) for curve in trained)))
    for entry in group.entries:
        if not entry.runs[0].trains:  # one pass, the same at any epoch of the others
            (only,) = curves[entry.name].values()
            curves[entry.name] = dict.fromkeys(epochs, only)
    others = [entry for entry in group.entries if entry is not group.baseline]
    base = curves[group.baseline.name]
    heads = [
        "epoch",
        *(_short(entry, rules) for entry in group.entries),
        *(f"Δ {_short(entry, rules)}" for entry in others),
    ]
    rows = [
        [str(epoch), *(f"{curve[epoch]:.2f}" for curve in curves.values()), *(f"{curves[entry.name][epoch] - base[epoch]:+.2f}" for entry in others)]
        for epoch in epochs
    ]  # fmt: skip
    note = f"mean test accuracy in % over partitions {', '.join(map(str, group.seeds))}; Δ: minus {_short(group.baseline, rules)}"
    return Sheet(f"{group.setting or 'all runs'}: accuracy over local epochs", heads, rows, [note], curves)


def lambda_sheets(group: Group) -> list[Sheet]:
    """λ per client and epoch, for each method that has one, on its first partition."""
    sheets = []
    for method, run in {entry.method: entry.runs[0] for entry in group.entries}.items():
        raw, effective = run.trace("lambda_raw"), run.trace("lambda_effective")
        if not raw:
            continue
        epochs = sorted(next(iter(raw.values())))
        same = raw == effective
        rows = [
            [str(epoch), *(_lambda(raw[client][epoch], None if same else effective[client][epoch]) for client in raw)]
            for epoch in epochs
        ]
        note = f"partition {run.partition_seed}" + ("" if same else "; raw λ → truly effective λ")
        sheets.append(Sheet(f"λ of {method}", ["epoch", *raw], rows, [note], {"raw": raw, "effective": effective}))
    if not sheets:
        raise RecipeError("none of these runs has a λ (alignment); --layout methods or rounds")
    return sheets


def _lambda(raw: float, effective: float | None) -> str:
    return f"{raw:.4f}" if effective is None else f"{raw:.4g} → {effective:.4g}"


def _short(entry: Entry, rules: set[str]) -> str:
    return entry.method if len(rules) == 1 else entry.name


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
