"""Joins what several machines measured: run folders into one folder, or runs and kept records into one record.

A run in two parts is taken once if both say the same. A finished run is taken rather than one that is not, and of two unfinished ones
the one that got further: the same recipe leads to the same result. Parts are only read. A merge that was stopped goes on when it is repeated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from oneround.errors import OneroundError, RecipeError, RunError
from oneround.protocol import blob
from oneround.runs.archive import find_runs, keep
from oneround.runs.folder import RunFolder
from oneround.runs.record import RunRecord, keys_of

LAST = ("recipe.yaml", "result.json")
"""A folder without them is no run; they are copied when all else is there."""


@dataclass
class Merged:
    """The outcome of a merge."""

    runs: int = 0
    """Number of runs in the output that the parts have too."""
    added: list[str] = field(default_factory=list)
    """Runs that were not in the output before, or not finished there."""
    unfinished: list[str] = field(default_factory=list)
    """Runs that no part has finished."""
    faults: list[str] = field(default_factory=list)
    """Damaged parts, and runs that two parts have measured differently; none of them is in the output."""


def merge_runs(parts: Sequence[str | PathLike[str]], folder: str | PathLike[str]) -> Merged:
    """Copy the run folders in `parts` into `folder`, each with the same path below it."""
    folder, merged = Path(folder), Merged()
    if (folder / "recipe.yaml").is_file():
        raise RecipeError(f"--out {folder}: is a run itself; name the folder that shall have the runs")
    names: dict[str, list[Path]] = {}
    for part in map(Path, parts):
        _check_part(part, folder, merged)
        for path in _run_folders(part, merged):
            name = path.relative_to(part).as_posix() if path != part else path.resolve().name
            names.setdefault(name, []).append(path)
    for name, copies in names.items():
        target = folder / name
        _finish_replacing(target)
        chosen = _choose(target, [path for path in copies if not _same(path, target)], merged)
        if chosen is None:
            continue
        merged.runs += 1
        if not chosen.finished:
            merged.unfinished.append(name)
        if chosen.path != target:
            try:
                _copy(chosen.path, target)
            except (shutil.Error, FileNotFoundError):
                merged.faults.append(f"{chosen.path}: changed while it was copied; repeat this when its run has ended")
            else:
                merged.added.append(name)
    return merged


def merge_records(parts: Sequence[str | PathLike[str]], file: str | PathLike[str]) -> Merged:
    """Write one record of all finished runs in `parts`, which are folders and kept records; those in `file` stay in it."""
    file, merged = Path(file), Merged()
    before = find_runs([file]) if file.exists() else []
    runs: dict[str, list[RunRecord]] = {}
    for run in before:
        runs.setdefault(_identity(run), []).append(run)
    added, unfinished = dict[str, RunRecord](), dict[str, RunRecord]()
    for run in (run for part in map(Path, parts) for run in _records(part, merged)):
        identity = _identity(run)
        if not run.finished:
            unfinished.setdefault(identity, run)
            continue
        others = runs.setdefault(identity, [])
        reasons = [difference(other, run) for other in others]
        if not others:
            others.append(run)
            added[identity] = run
        elif reason := all(reasons) and reasons[0]:
            merged.faults.append(_conflict(others[0], run, reason))
            added.pop(identity, None)
    merged.added = [_label(run) for run in added.values()]
    merged.unfinished = [str(run.path) for identity, run in unfinished.items() if identity not in runs]
    kept = [*before, *added.values()]
    merged.runs = len(kept)
    if added:
        keep(kept, file)
    return merged


def difference(run: RunRecord, other: RunRecord) -> str | None:
    """What two records of one run disagree on; None if they say the same."""
    for key in [*run.keys, *other.keys]:
        if run.keys.get(key) != other.keys.get(key):
            return f"{key} = {run.keys.get(key)} and {other.keys.get(key)}"
    if not (run.finished and other.finished):
        return None
    if run.partition_digest != other.partition_digest:
        return "who holds which sample"
    for mine, its in ((run.accuracy, other.accuracy), (run.local_accuracy, other.local_accuracy)):
        for name in [*mine, *its]:
            if mine.get(name) != its.get(name):
                return f"accuracy of {name} {_percent(mine.get(name))} and {_percent(its.get(name))}"
    uploads = [(each.result or {}).get("uploads") for each in (run, other)]
    return "the uploads" if all(uploads) and uploads[0] != uploads[1] else None


def _identity(run: RunRecord) -> str:
    """The same for repeats of a run."""
    return json.dumps(dict(run.keys), sort_keys=True)


def _percent(accuracy: float | None) -> str:
    return "not measured" if accuracy is None else f"{100 * accuracy:.2f} %"


def _label(run: RunRecord) -> str:
    return f"{run.method}, partition {run.partition_seed}"


def _conflict(run: RunRecord, other: RunRecord, reason: str) -> str:
    both = f"{run.path} and {other.path}" if run.path != other.path else f"twice in {run.path}"
    return f"{_label(run)}: {both} differ ({reason}); leave one of them out"


# --- reading parts ---------------------------------------------------------------------------------------------------


def _same(path: Path, other: Path) -> bool:
    """Whether both are one folder."""
    return other.exists() and path.samefile(other)


def _check_part(part: Path, folder: Path, merged: Merged) -> None:
    """Refuse a part that cannot be copied from."""
    if not part.exists():
        raise RecipeError(f"{part}: no such folder")
    if part.is_file():
        raise RecipeError(f"{part}: a file; its runs can be joined into a record only (--out FILE.json)")
    if part.resolve() in folder.resolve().parents:
        raise RecipeError(f"--out {folder}: lies in {part}; choose another")
    if not any(part.rglob("recipe.yaml")):
        merged.faults.append(f"{part}: no run in it (a run folder has a recipe.yaml)")


def _run_folders(part: Path, merged: Merged) -> Iterator[Path]:
    """Run folders, begun or finished; a result without its recipe is a fault."""
    for result in sorted(part.rglob("result.json")):
        if not (result.parent / "recipe.yaml").is_file() and not _is_temporary(result):
            merged.faults.append(f"{result}: there is no recipe.yaml beside it")
    for recipe in sorted(part.rglob("recipe.yaml")):
        if not _is_temporary(recipe):
            yield recipe.parent


def _is_temporary(path: Path) -> bool:
    """Whether a merge that was stopped has left it."""
    return path.parent.name.startswith(".") and path.parent.suffix in (".merging", ".replaced")


def _choose(target: Path, copies: Sequence[Path], merged: Merged) -> RunRecord | None:
    """The run to take: in the output already, or else the first of equals. None where none is whole, or they differ."""
    whole: list[RunRecord] = []
    present = target.is_dir() and any(target.iterdir())
    for path in [target, *copies] if present else copies:
        try:
            whole.append(_read(path))
        except OneroundError as error:
            merged.faults.append(str(error))
            if path == target:  # it is not overwritten, whatever it is
                return None
    first = next((run for run in whole if run.finished), whole[0] if whole else None)
    for other in whole:
        if first is not None and (reason := difference(first, other)):
            merged.faults.append(_conflict(first, other, reason))
            return None
    return max(whole, key=lambda run: (run.finished, run.reached), default=None)


def _read(path: Path) -> RunRecord:
    """A run whose files are whole; RunError or ProtocolError names the damaged one."""
    run, broadcast = RunRecord.read(path, strict=LAST), RunFolder(path).broadcast
    if broadcast.is_file() and run.keys != keys_of(blob.peek(broadcast, "broadcast")["recipe"]):
        raise RunError(f"{path}/recipe.yaml: damaged, the run was begun with another (broadcast.safetensors)")
    if run.finished:
        kinds = {
            "broadcast.safetensors": "broadcast",
            "uploads/*.safetensors": "upload",
            "model/*.safetensors": "shard",
        }
        for pattern, kind in kinds.items():
            for file in sorted(path.glob(pattern)):
                blob.read(file, kind)
    return run


def _records(part: Path, merged: Merged) -> Iterator[RunRecord]:
    """Finished runs of a part."""
    if not part.exists():
        raise RecipeError(f"{part}: no such file or folder")
    try:
        if part.is_file():
            yield from find_runs([part])
            return
    except OneroundError as error:
        merged.faults.append(str(error))
        return
    for path in _run_folders(part, merged):
        try:
            yield from find_runs([path]) if (path / "result.json").is_file() else [RunRecord.read(path)]
        except OneroundError as error:
            merged.faults.append(str(error))


# --- writing ---------------------------------------------------------------------------------------------------------


def _copy(source: Path, target: Path) -> None:
    """Copy a run folder; `target` is the old run or the whole new one, whenever this is stopped."""
    temporary, old = _beside(target, "merging"), _beside(target, "replaced")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(".lock", "*.tmp", *LAST))
    for name in LAST:
        if (source / name).is_file():
            shutil.copy2(source / name, temporary / name)
    if target.exists():
        with RunFolder(target).locked():
            target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _finish_replacing(target: Path) -> None:
    """Bring back a run that was moved out of the way by a merge that was stopped."""
    old = _beside(target, "replaced")
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _beside(target: Path, word: str) -> Path:
    return target.with_name(f".{target.name}.{word}")
