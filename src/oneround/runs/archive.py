"""Finds runs in folders and in records; a record is one file with all that comparisons need, also when the folders are gone."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from oneround.errors import RecipeError, RunError
from oneround.files import write_durably
from oneround.runs.log import Curves, Event, Measurements
from oneround.runs.record import RunRecord, keys_of

log = logging.getLogger("oneround")

FORMAT = "oneround runs 1"
TRACED = (
    "base", "align", "lambda_raw", "s", "lambda_effective", "lambda_applied", "sigma_base", "sigma_align", "entropy",
    "anchor_cosine", "prototype_norm",
)  # fmt: skip
COSINE, ELAPSED = "cosine of ", "seconds elapsed"  # quantities of a record, beside those of TRACED


def find_runs(paths: Iterable[str | PathLike[str]]) -> list[RunRecord]:
    """Every finished run in these folders, at any depth, and in these records; the same run counts once.

    Raises RecipeError where there is none, RunError where a file that a comparison needs is damaged.
    """
    folders, runs = [Path(path) for path in paths], list[RunRecord]()
    for path in folders:
        if path.is_file():
            runs += _read_record(path)
            continue
        if not path.exists():
            raise RecipeError(f"{path}: no such folder")
        for result in sorted(path.rglob("result.json")):
            if not (result.parent / "recipe.yaml").is_file():
                log.warning("%s: left out, there is no recipe.yaml beside it", result)
                continue
            run = RunRecord.read(result.parent, strict=["result.json", "environment.json", "study.json"])
            if run.accuracy:
                runs.append(run)
            else:
                log.warning("%s: left out, nothing was scored (no test images)", result)
    if not runs:
        raise RecipeError(f"no finished run in {', '.join(map(str, folders))} (a run folder has a result.json)")
    return distinct(runs)


def find_folders(paths: Sequence[Path]) -> list[Path]:
    """Every run folder in these folders, finished or not, at any depth; RunError where there is none."""
    folders: dict[Path, Path] = {}
    for path in paths:
        if path.is_file():
            raise RunError(
                f"{path}: a file; a report needs run folders (a record can be compared: oneround compare {path})"
            )
        if not path.exists():
            raise RunError(f"{path}: no such folder")
        for recipe in sorted(path.rglob("recipe.yaml")):
            folders.setdefault(recipe.parent.resolve(), recipe.parent)
    if not folders:
        raise RunError(f"no run in {', '.join(map(str, paths))} (a run folder has a recipe.yaml)")
    return list(folders.values())


def distinct(runs: Iterable[RunRecord]) -> list[RunRecord]:
    """Each run once, whether read from its folder, from a copy or from a record."""
    once: dict[str, RunRecord] = {}
    for run in runs:
        content = [dict(run.keys), run.partition_digest, run.accuracy, run.local_accuracy]
        once.setdefault(json.dumps(content, sort_keys=True), run)
    return list(once.values())


# --- records ---------------------------------------------------------------------------------------------------------


def keep(runs: Sequence[RunRecord], path: str | PathLike[str]) -> None:
    """Write a record of these runs; `find_runs` reads it like their folders."""
    content = {"format": FORMAT, "runs": [_pack(run) for run in runs]}
    write_durably(Path(path), (json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n").encode())


def _read_record(path: Path) -> list[RunRecord]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"its format is not '{FORMAT}'")
        return [_unpack(run, path) for run in content["runs"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "no JSON" if isinstance(error, UnicodeDecodeError | json.JSONDecodeError) else str(error)
        raise RecipeError(
            f"{path}: not a record of runs ({reason}); make one with oneround compare RUNS --keep FILE.json"
        ) from None


def _pack(run: RunRecord) -> dict[str, Any]:
    """A run as plain data: its keys, scores and traces."""
    traces = {quantity: trace for quantity in TRACED if (trace := run.trace(quantity))}
    traces |= {f"{COSINE}{pair} at {tensor}": trace for (pair, tensor), trace in run.cosines().items()}
    traces |= {ELAPSED: {"run": run.measurements.elapsed}} if run.measurements.elapsed else {}
    return {
        "method": run.method,
        "keys": dict(run.keys),
        "rules": run.accuracy,
        "clients": run.local_accuracy,
        "costs": {name: value for name, value in run.costs.items() if name != "seconds"},
        "curves": run.curves,
        "validation": run.validation,
        **({"personalised": personalised} if (personalised := run.personalised) else {}),
        "partition": run.partition_digest,
        "remarks": list(run.remarks),
        "where": dict(run.measured_on),
        "bound": run.bound,
        **({} if run.seconds is None else {"seconds": round(run.seconds, 1)}),
        "traces": {quantity: _shorten(by_client) for quantity, by_client in traces.items()},
    }


def _unpack(plain: Mapping[str, Any], path: Path) -> RunRecord:
    """A run from its plain data in the file `path`."""
    result = {key: plain[key] for key in ("partition", "remarks")} | {
        key: {name: {"accuracy": value} for name, value in plain[key].items()} for key in ("rules", "clients")
    }
    result["personalised"] = plain.get("personalised", {})  # records of before have none, nor costs
    costs = plain.get("costs", {})
    for score in list(result["rules"].values())[:1]:
        score |= {name: costs[name] for name in ("top5", "loss") if name in costs}
    result |= {name: costs[name] for name in ("bytes_down", "bytes_up") if name in costs}
    where = plain["where"]
    return RunRecord(
        path,
        keys=keys_of({**plain["keys"], "method": plain["method"]}),
        measurements=_measurements(plain),
        result=result,
        environment={**where, "packages": {"torch": where["torch"]}} if where else {},
        seconds=plain.get("seconds"),
        bound=plain["bound"],
    )


def _measurements(plain: Mapping[str, Any]) -> Measurements:
    """The curves and traces of a run."""
    measured = Measurements(curves=_by_epoch(plain["curves"]), validation=_by_epoch(plain["validation"]))
    traces = {quantity: _by_epoch(by) for quantity, by in plain["traces"].items()}
    measured.elapsed = traces.pop(ELAPSED, {}).get("run", {})
    entries: dict[str, dict[int, Event]] = {}
    for quantity, by_client in traces.items():
        pair, _, tensor = quantity.removeprefix(COSINE).rpartition(" at ")
        for client, by_epoch in by_client.items():
            for epoch, value in by_epoch.items():
                entry = entries.setdefault(client, {}).setdefault(epoch, {"epoch": epoch})
                if quantity.startswith(COSINE):
                    at = entry.setdefault("gradients", {}).setdefault(tensor, {"norm": {}, "cosine": {}})
                    at["cosine"][pair] = value
                else:
                    entry[quantity] = value
    measured.epochs = {client: dict(sorted(by_epoch.items())) for client, by_epoch in entries.items()}
    return measured


def _by_epoch(curves: Mapping[str, Mapping[str, float]]) -> Curves:
    """Curves with whole numbers as keys, which JSON does not have."""
    return {name: {int(epoch): float(value) for epoch, value in curve.items()} for name, curve in curves.items()}


def _shorten(curves: Curves) -> dict[str, dict[int, float | str]]:
    """Traces with five digits; JSON has no infinity, so that is text."""
    return {
        name: {epoch: float(f"{value:.5g}") if math.isfinite(value) else str(value) for epoch, value in curve.items()}
        for name, curve in curves.items()
    }
