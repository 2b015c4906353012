"""Finished runs as comparisons see them: read from their folders, or from a record kept of them when the folders are gone."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from oneround.errors import RecipeError
from oneround.folder import RunFolder
from oneround.observe.log import Event, MetricsLog
from oneround.observe.sound import is_number
from oneround.parts import Strict
from oneround.protocol import blob
from oneround.recipe import Federated
from oneround.runs import Result

log = logging.getLogger("oneround")

FORMAT = "oneround runs 1"
TRACED = (
    "base",
    "align",
    "lambda_raw",
    "s",
    "lambda_effective",
    "lambda_applied",
    "sigma_base",
    "sigma_align",
    "entropy",
)
COSINE = "cosine of "
ELAPSED = "seconds elapsed"
Traces = dict[str, dict[str, dict[int, float]]]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    method: str
    keys: Mapping[str, Any]
    """The federated half of its recipe, flat: `training.epochs` → 50."""
    result: Result
    where: Mapping[str, Any]
    """What it ran on: `device`, `torch`, `commit`."""
    traces: Mapping[str, Mapping[str, Mapping[int, float]]]
    """What clients measured: quantity → client → epoch → value; `cosine of A · B at PLACE` among the quantities."""
    bound: float | None = None
    """Accuracy of the same network trained on all data in one place, where a study measured it."""

    @property
    def partition_seed(self) -> int:
        return int(self.keys["seeds.partition"])

    @property
    def trains(self) -> bool:
        """Whether clients trained a network."""
        return self.keys.get("objective.terms") != "{}"

    @property
    def first_rule(self) -> str:
        """The rule that makes the model."""
        return next(iter(self.result.rules))

    @property
    def fingerprint(self) -> str:
        """The same for the same run, in its folder or in a record of it."""
        result = self.result
        content = [self.method, dict(self.keys), result.partition, dict(result.rules), dict(result.clients)]
        return json.dumps(content, sort_keys=True)

    @property
    def scores(self) -> dict[str, float]:
        """Accuracy of every rule, and of the clients alone."""
        alone = list(self.result.clients.values())
        more = {"best client alone": max(alone), "mean client alone": sum(alone) / len(alone)} if alone else {}
        return {**self.result.rules, **more}

    def plain(self) -> dict[str, Any]:
        result = self.result
        return {
            "method": self.method, "keys": dict(self.keys), "rules": dict(result.rules), "clients": dict(result.clients),
            "curves": result.curves, "validation": result.validation, "partition": result.partition,
            "remarks": list(result.remarks), "where": dict(self.where), "bound": self.bound,
            "traces": {what: {who: {epoch: _short(value) for epoch, value in of.items()} for who, of in by.items()}
                       for what, by in self.traces.items()},
        }  # fmt: skip


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Every finished run in these folders, however deep, and in these records; one that is there twice counts once."""
    found: dict[Any, Run] = {}
    for path in paths:
        if path.is_file():
            found |= {(path.resolve(), number): run for number, run in enumerate(_read_record(path))}
            continue
        if not path.exists():
            raise RecipeError(f"{path}: no such folder")
        for result in sorted(path.rglob("result.json")):
            folder = result.parent
            if not (folder / "recipe.yaml").is_file():
                log.warning("%s: left out, there is no recipe.yaml beside it", result)
            elif folder.resolve() not in found:
                run = _read_folder(folder)
                if run.result.rules:
                    found[folder.resolve()] = run
                else:
                    log.warning("%s: left out, nothing was scored (no test images)", result)
    if not found:
        raise RecipeError(f"no finished run in {', '.join(map(str, paths))} (a run folder has a result.json)")
    once: dict[str, Run] = {}
    for run in found.values():
        once.setdefault(run.fingerprint, run)
    return list(once.values())


def keep(runs: Sequence[Run], path: Path) -> None:
    """Write down all that comparisons need of these runs; `find_runs` reads it like their folders."""
    told = {"format": FORMAT, "runs": [run.plain() for run in runs]}
    blob.write_durably(path, (json.dumps(told, ensure_ascii=False, separators=(",", ":")) + "\n").encode())


def flat(tree: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """A recipe's keys with dots: `training.epochs` → 50, `objective.stages.0.share` → 0.2."""
    inner = dict(enumerate(tree)) if isinstance(tree, list) and any(isinstance(each, dict) for each in tree) else tree
    if isinstance(inner, dict) and inner:
        for key, value in inner.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(tree) if isinstance(tree, list | dict) else tree


def keys_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's keys with dots; those that came into recipes after it was written have the value that changes nothing."""
    return {**_usual(), **dict(flat(tree))}


@lru_cache
def _usual() -> dict[str, Any]:
    """Defaults of what every recipe has."""
    found: dict[str, Any] = {}
    for name, field in Federated.model_fields.items():
        if isinstance(field.default, Strict):
            found |= dict(flat(field.default.model_dump(mode="json"), name))
        elif isinstance(field.default, int | float):
            found[name] = field.default
    return found


def traces_of(events: Iterable[Event]) -> Traces:
    """What clients measured, from a metrics log."""
    traces: Traces = {}
    for event in events:
        if event["event"] == "snapshot" and is_number(event.get("elapsed")):
            traces.setdefault(ELAPSED, {}).setdefault("run", {})[event["epoch"]] = event["elapsed"]
        if event["event"] != "epoch":
            continue
        told = {key: event[key] for key in TRACED if is_number(event.get(key))}
        for place, there in event.get("gradients", {}).items():
            told |= {
                f"{COSINE}{pair} at {place}": value for pair, value in there["cosine"].items() if value is not None
            }
        for what, value in told.items():
            traces.setdefault(what, {}).setdefault(event["client"], {})[event["epoch"]] = value
    return traces


def _read_folder(folder: Path) -> Run:
    recipe = RunFolder(folder).read_recipe()
    told = RunFolder(folder).read_environment()
    where = {"device": told["device"], "torch": told["packages"].get("torch"), "commit": told["commit"]} if told else {}
    study = folder.parent / "study.json"
    bound = (
        RunFolder(folder.parent).read_json("study.json", [], "remove it").get("centralised")
        if study.is_file()
        else None
    )
    traces = traces_of(MetricsLog(folder / "metrics.jsonl"))
    return Run(recipe.method, keys_of(recipe.plain()), Result.read(folder), where, traces, bound)


def _read_record(path: Path) -> list[Run]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']!r}")
        return [_from_plain(each, path) for each in told["runs"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"{path}: not a record of runs ({error}); make one with oneround compare RUNS --keep FILE.json"
        ) from None


def _from_plain(told: Mapping[str, Any], path: Path) -> Run:
    curves, validation = (_by_epoch(told[name]) for name in ("curves", "validation"))
    result = Result(path, told["rules"], told["clients"], curves, validation, told["partition"], tuple(told["remarks"]))
    traces = {what: _by_epoch(by) for what, by in told["traces"].items()}
    return Run(told["method"], {**_usual(), **told["keys"]}, result, told["where"], traces, told["bound"])


def _by_epoch(curves: Mapping[str, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """JSON has no whole-number keys."""
    return {name: {int(epoch): float(value) for epoch, value in curve.items()} for name, curve in curves.items()}


def _short(value: float) -> float | str:
    """Five digits are enough of a trace; JSON has no infinity."""
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
