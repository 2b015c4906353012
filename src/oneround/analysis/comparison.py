"""Comparison of runs: which method is better, and is the difference significant?

Runs are grouped by setting (data, partition rule, model, epochs). Within a group, repeats of a method on one partition are averaged
first, because they are not independent, and methods are compared partition by partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import fmean
from typing import TypeVar

from oneround.analysis.statistics import Comparison, Summary, compare_paired, paired
from oneround.config.load import load, presets
from oneround.errors import RecipeError, did_you_mean
from oneround.runs.record import RunRecord, keys_of, local_accuracy_summary

SETTING = ("data.", "partition.", "model.", "public", "validation", "label_noise", "training.epochs")
NETWORK = ("model.", "training.epochs")  # these do not matter where no network is trained
IGNORED = ("seeds.", "fusion", "snapshots", "method", "trace.", "evaluation.batch_")


T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: a method with a fusion rule."""

    method: str
    rule: str
    runs: tuple[RunRecord, ...]
    accuracy: Mapping[str, float]
    """Percent, by partition digest; repeats averaged."""

    @property
    def summary(self) -> Summary:
        return Summary(tuple(self.accuracy.values()))

    @property
    def name(self) -> str:
        return f"{self.method} · {self.rule}"

    def curve(self) -> dict[int, float]:
        """Epoch → mean accuracy in percent over the runs."""
        curves = [run.curves.get(self.rule, {}) for run in self.runs]
        epochs = sorted(set.intersection(*(set(curve) for curve in curves)))
        return {epoch: 100 * fmean(curve[epoch] for curve in curves) for epoch in epochs}


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
    """The centralised bound, remarks on partitions, devices and commits."""

    @property
    def title(self) -> str:
        return self.setting or "all runs"

    @property
    def runs(self) -> dict[str, tuple[RunRecord, ...]]:
        """By method."""
        return {entry.method: entry.runs for entry in self.entries}

    def short(self, entry: Entry) -> str:
        """The name of an entry without the method or rule that all entries share."""
        if len({each.rule for each in self.entries}) == 1:
            return entry.method
        return entry.rule if len({each.method for each in self.entries}) == 1 else entry.name


def compare(
    runs: Sequence[RunRecord],
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
        chosen = [entry for name in only for entry in _matches("--method", name, entries, rules=False)]
        entries = {setting: [entry for entry in members if entry in chosen] for setting, members in entries.items()}
    bases = [] if baseline is None else _matches("--baseline", baseline, entries, rules=True)
    return [
        _group(setting, members, next((entry for entry in members if entry in bases), members[0]), common)
        for setting, members in entries.items()
        if members
    ]


def _matches(option: str, name: str, entries: Mapping[str, Sequence[Entry]], *, rules: bool) -> list[Entry]:
    """The entries that the value of an option refers to: by method or, with `rules`, also by rule or by `method · rule`.

    A method is a preset or its alias, alone or with its varying keys (`two-stage share=0.1`). Raises RecipeError where there is none.
    """
    first, space, rest = name.partition(" ")
    aliases = {raw.get("about", {}).get("alias"): preset for preset, raw in presets().items()}
    method, every = aliases.get(first, first) + space + rest, list(chain.from_iterable(entries.values()))
    matches = [
        entry
        for entry in every
        if method in (entry.method, entry.method.split(" ")[0]) or (rules and name in (entry.name, entry.rule))
    ]
    if not matches:
        methods = list(dict.fromkeys(entry.method for entry in every))
        hint = did_you_mean(name, methods)
        raise RecipeError(f"{option} {name}: not among what is compared{hint} ({', '.join(methods)})")
    return matches


def of_methods(runs: Sequence[RunRecord], names: Sequence[str]) -> list[RunRecord]:
    """The runs of these methods, presets or aliases, in whatever setting; all runs for no name. RecipeError where there is none."""
    aliases = {raw.get("about", {}).get("alias"): preset for preset, raw in presets().items()}
    methods = list(dict.fromkeys(run.method for run in runs))
    for name in names:
        if aliases.get(name, name) not in methods:
            raise RecipeError(
                f"--method {name}: not among what is compared{did_you_mean(name, methods)} ({', '.join(methods)})"
            )
    chosen = {aliases.get(name, name) for name in names} or set(methods)
    return [run for run in runs if run.method in chosen]


def grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Items by their key, in their original order."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _by_setting(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs by setting; a run without a network joins every group that differs from its setting in encoder or epochs only."""
    trained = [run for run in runs if run.trains]
    shared = [key for key in _varying(runs, lambda key: key.startswith(SETTING)) if not key.startswith(NETWORK)]
    settings = shared + _varying(trained, lambda key: key.startswith(NETWORK))
    groups = grouped(trained, partial(_setting_label, keys=settings))
    fitting = {name: _setting_label(members[0], shared) for name, members in groups.items()}
    for run in runs:
        if not run.trains:
            setting = _setting_label(run, shared)
            for name in [name for name, label in fitting.items() if label == setting] or [setting]:
                groups.setdefault(name, []).append(run)
    return groups


def _group(setting: str, entries: Sequence[Entry], base: Entry, common: bool) -> Group:
    partitions = set(base.accuracy)
    shared = set.intersection(*(set(entry.accuracy) for entry in entries))
    for entry in entries:
        if set(entry.accuracy) != partitions and not common:
            raise RecipeError(
                f"{entry.name} and {base.name} were not run on the same partitions ({len(set(entry.accuracy) & partitions)} in common, "
                f"{len(set(entry.accuracy) ^ partitions)} not): their difference would be the partitions'; run the missing ones, or --common"
            )
    if not shared:
        raise RecipeError(f"no partition is common to all of {', '.join(entry.name for entry in entries)}")
    restricted = [
        replace(
            entry,
            runs=tuple(run for run in entry.runs if run.partition_digest in shared),
            accuracy={digest: entry.accuracy[digest] for digest in base.accuracy if digest in shared},
        )
        for entry in entries
    ]
    base = next(entry for entry in restricted if entry.name == base.name)
    others = [entry for entry in restricted if entry is not base]
    differences = [paired(list(entry.accuracy.values()), list(base.accuracy.values())) for entry in others]
    comparisons = {entry.name: each for entry, each in zip(others, compare_paired(differences), strict=True)}
    used = [run for entry in restricted for run in entry.runs]
    per_partition = max(
        sum(run.partition_digest == digest for run in entry.runs) for entry in restricted for digest in entry.accuracy
    )
    remarks = dict.fromkeys(f"partition {run.partition_seed}: {remark}" for run in used for remark in run.remarks)
    seeds = tuple(sorted({run.partition_seed for run in used}))
    notes = (*_bounds(used), *_confounders(used), *remarks, *measured_on(used))
    return Group(setting, tuple(restricted), base, comparisons, seeds, per_partition, notes)


def _bounds(runs: Sequence[RunRecord]) -> list[str]:
    bounds = sorted({run.bound for run in runs if run.bound is not None})
    listed = ", ".join(f"{100 * bound:.1f}" for bound in bounds)
    return [f"the same network trained as long on all data in one place: {listed} %"] if bounds else []


def _confounders(runs: Sequence[RunRecord]) -> list[str]:
    """Recipe keys that differ between methods because somebody changed them, so that a difference may come from them."""
    by_method = grouped(runs, lambda run: run.method)
    presets_keys = {name: keys_of(load(name).plain()) for name in by_method if name in presets()}
    shared = set.intersection(*(set(run.keys) for run in runs))

    def is_changed(method: str, key: str, values: list[str]) -> bool:
        keys = presets_keys.get(method)
        return key.startswith("training.") if keys is None else values != [str(keys.get(key))]

    remarks = []
    for key in (key for key in runs[0].keys if key in shared and _of_method(key)):
        values = {name: sorted({str(run.keys[key]) for run in same}) for name, same in by_method.items()}
        if (
            any(is_changed(name, key, each) for name, each in values.items())
            and len(set(map(tuple, values.values()))) > 1
        ):
            listed = ", ".join(f"{name} {' and '.join(each)}" for name, each in values.items())
            remarks.append(f"methods differ in {key}: {listed}")
    return remarks


def measured_on(runs: Sequence[RunRecord]) -> list[str]:
    """Devices, versions of torch and commits of the runs."""
    machines = [run.measured_on for run in runs if run.measured_on]
    lines = []
    for where, same in grouped(machines, lambda machine: f"{machine['device']}, torch {machine['torch']}").items():
        commits = sorted({str(machine["commit"]) for machine in same if machine["commit"]})
        lines.append(f"measured on {where}" + (f", commit {', '.join(commits)}" if commits else ""))
    return lines


def _entries(runs: Sequence[RunRecord], rule: str | None) -> list[Entry]:
    """An entry for each method, combination of its varying keys, and rule."""
    entries = []
    for method, same in grouped(runs, lambda run: run.method).items():
        in_training = any(run.keys.get("rounds", 1) > 1 for run in same)
        variants = _varying(same, partial(_of_method, rule_in_training=in_training))
        for label, repeats in grouped(same, partial(_setting_label, keys=variants)).items():
            name, rules = f"{method} {label}".rstrip(), list(_scores(repeats[0]))
            for chosen in rules if rule == "all" else [rule or rules[0]]:
                if any(chosen not in _scores(run) for run in repeats):
                    raise RecipeError(
                        f"{name}: no rule '{chosen}' in its runs{did_you_mean(chosen, rules)} (there are {', '.join(rules)})"
                    )
                entries.append(Entry(name, chosen, tuple(repeats), _by_partition(repeats, chosen)))
    return entries


def _of_method(key: str, rule_in_training: bool = False) -> bool:
    """Whether a key belongs to the method, and not to the setting or to the evaluation.

    `rule_in_training`: with several rounds, training continues from the first rule's model, so that rule belongs to the method.
    """
    return not key.startswith((*SETTING, *IGNORED)) or (rule_in_training and key.startswith("fusion.0."))


def _scores(run: RunRecord) -> dict[str, float]:
    """Accuracy of every rule, and of the clients' own models."""
    return {**run.accuracy, **local_accuracy_summary(run.local_accuracy)}


def _by_partition(runs: Sequence[RunRecord], rule: str) -> dict[str, float]:
    """Percent by partition digest; repeats averaged."""
    by_digest = grouped(sorted(runs, key=lambda run: run.partition_seed), lambda run: run.partition_digest)
    return {digest: fmean(100 * _scores(run)[rule] for run in same) for digest, same in by_digest.items()}


def _varying(runs: Sequence[RunRecord], among: Callable[[str], bool]) -> list[str]:
    """Keys whose value is not the same in all runs; `among`: which keys to consider."""
    keys = sorted({key for run in runs for key in run.keys if among(key)})
    return [key for key in keys if len({str(run.keys.get(key)) for run in runs}) > 1]


def _setting_label(run: RunRecord, keys: Sequence[str]) -> str:
    """`alpha=0.05 epochs=50`"""
    return " ".join(f"{key.removesuffix('.kind').split('.')[-1]}={run.keys[key]}" for key in keys if key in run.keys)
