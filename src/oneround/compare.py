"""Runs side by side: which method is better, and is the difference real?

Runs are grouped by what they were run on (data, partition rule, model, epochs); within a group each method's repeats on one
partition are averaged first, because they are not independent, and methods are compared partition by partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from oneround.errors import RecipeError, did_you_mean
from oneround.finished import Run, keys_of
from oneround.observe.statistics import Comparison, Summary, compared, paired
from oneround.reading import load, presets

SETTING = ("data.", "partition.", "model.", "public", "validation", "label_noise", "training.epochs")
OF_NETWORK = ("model.", "training.epochs")  # without meaning where none is trained
ASIDE = ("seeds.", "fusion", "snapshots", "method", "trace.")


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
        curves = [run.result.curves.get(self.rule, {}) for run in self.runs]
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
    """What a reader has to know: bounds, remarks on partitions, devices and commits."""

    def short(self, entry: Entry) -> str:
        """An entry's name as short as it can be: what all have in common is left out."""
        if len({each.rule for each in self.entries}) == 1:
            return entry.method
        return entry.rule if len({each.method for each in self.entries}) == 1 else entry.name


def compare(
    runs: Sequence[Run],
    baseline: str | None = None,
    rule: str | None = None,
    *,
    common: bool = False,
    only: Sequence[str] = (),
) -> list[Group]:
    """Groups of comparable runs.

    `rule`: one rule, `all`, or each method's first; `common`: use only partitions that all methods have; `only`: these methods.
    """
    entries = {setting: _entries(members, rule) for setting, members in _by_setting(runs).items()}
    if only:
        entries = _chosen(entries, only)
    if baseline is not None and not any(_find_baseline(each, baseline) for each in entries.values()):
        names = list(dict.fromkeys(entry.method for each in entries.values() for entry in each))
        raise RecipeError(
            f"--baseline {baseline}: not among what is compared{did_you_mean(baseline, names)} ({', '.join(names)})"
        )
    return [
        _group(setting, each, _find_baseline(each, baseline) or each[0], common) for setting, each in entries.items()
    ]


def _chosen(entries: Mapping[str, list[Entry]], only: Sequence[str]) -> dict[str, list[Entry]]:
    """Entries of these methods, named with or without what varies among them."""
    for name in only:
        if not any(_is(entry, name) for each in entries.values() for entry in each):
            names = list(dict.fromkeys(entry.method for each in entries.values() for entry in each))
            raise RecipeError(
                f"--method {name}: not among what is compared{did_you_mean(name, names)} ({', '.join(names)})"
            )
    kept = {
        setting: [entry for entry in each if any(_is(entry, name) for name in only)]
        for setting, each in entries.items()
    }
    return {setting: each for setting, each in kept.items() if each}


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
    told = [*_bounds(used), *_confounders(used), *remarks, *_places(used)]
    return Group(setting, tuple(kept), base, tested, seeds, per_partition, tuple(told))


def _bounds(runs: Sequence[Run]) -> list[str]:
    found = sorted({run.bound for run in runs if run.bound is not None})
    shown = ", ".join(f"{100 * bound:.1f}" for bound in found)
    return [f"the same network trained as long on all data in one place: {shown} %"] if found else []


def _confounders(runs: Sequence[Run]) -> list[str]:
    """What somebody changed for one method and not for another, so that a difference may come from it."""
    methods = list(dict.fromkeys(run.method for run in runs))
    own = {name: keys_of(load(name).plain()) for name in methods if name in presets()}
    shared = set.intersection(*(set(run.keys) for run in runs))
    told = []
    for key in (key for key in runs[0].keys if key in shared and _own(key)):
        values = {name: sorted({str(run.keys[key]) for run in runs if run.method == name}) for name in methods}
        changed = [
            name for name in methods
            if (values[name] != [str(own[name].get(key))] if name in own else key.startswith("training."))
        ]  # fmt: skip
        if changed and len({tuple(each) for each in values.values()}) > 1:
            shown = ", ".join(f"{name} {' and '.join(each)}" for name, each in values.items())
            told.append(f"methods differ in {key}: {shown}")
    return told


def _places(runs: Sequence[Run]) -> list[str]:
    """What they ran on."""
    found: dict[tuple[Any, Any], set[str]] = {}
    for run in runs:
        if run.where:
            found.setdefault((run.where["device"], run.where["torch"]), set()).add(str(run.where["commit"]))
    return [
        f"measured on {device}, torch {torch}, commit {', '.join(sorted(commits))}"
        for (device, torch), commits in found.items()
    ]


def _entries(runs: Sequence[Run], rule: str | None) -> list[Entry]:
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.method, []).append(run)
    entries = []
    for same in methods.values():
        again = any(run.keys.get("rounds", 1) > 1 for run in same)  # then the first rule is part of the training
        variants = _varying(same, partial(_own, again=again))
        named: dict[str, list[Run]] = {}
        for run in same:
            named.setdefault(" ".join(filter(None, [run.method, _words(run, variants)])), []).append(run)
        for name, mine in named.items():
            known = list(mine[0].scores)
            chosen = known if rule == "all" else [rule or mine[0].first_rule]
            for each in chosen:
                if any(each not in run.scores for run in mine):
                    raise RecipeError(
                        f"{name}: no rule '{each}' in its runs{did_you_mean(each, known)} (there are {', '.join(known)})"
                    )
                entries.append(Entry(name, each, tuple(mine), _by_partition(mine, each)))
    return entries


def _own(key: str, again: bool = False) -> bool:
    """Whether a key says what a method is, and not what it was run on or how it was looked at.

    `again`: what the first rule makes goes out again, so that rule belongs to the method.
    """
    return not key.startswith((*SETTING, *ASIDE)) or (again and key.startswith("fusion.0."))


def _by_partition(runs: Sequence[Run], rule: str) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.partition_seed):
        found.setdefault(run.result.partition, []).append(100 * run.scores[rule])
    return {digest: sum(values) / len(values) for digest, values in found.items()}


def _find_baseline(entries: Sequence[Entry], wanted: str | None) -> Entry | None:
    """The entry a name means: a method (or its alias), a rule, or `method · rule`; the first without one."""
    if wanted is None:
        return entries[0]
    return next((entry for entry in entries if _is(entry, wanted) or wanted in (entry.name, entry.rule)), None)


def _is(entry: Entry, wanted: str) -> bool:
    """Whether a name means this entry's method: its preset or alias, alone or with what varies (`two-stage share=0.1`)."""
    first, space, rest = wanted.partition(" ")
    aliases = {raw.get("about", {}).get("alias"): name for name, raw in presets().items()}
    meant = aliases.get(first, first) + space + rest
    return entry.method == meant or entry.method.split(" ")[0] == meant


def _varying(runs: Sequence[Run], wanted: Any) -> list[str]:
    """Keys of which not all runs have the same value."""
    keys = sorted({key for run in runs for key in run.keys if wanted(key)})
    return [key for key in keys if len({str(run.keys.get(key)) for run in runs}) > 1]


def _words(run: Run, keys: Sequence[str]) -> str:
    """`alpha=0.05 epochs=50`"""
    return " ".join(f"{key.removesuffix('.kind').split('.')[-1]}={run.keys[key]}" for key in keys if key in run.keys)
