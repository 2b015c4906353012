"""Parts of a sweep are joined: each run once, nothing lost, the same result when it is repeated."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

import oneround.studies.merge as merging
from grids import SMALL, made
from oneround.analysis.comparison import compare
from oneround.analysis.tables import methods_sheet
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import OutOfTime, RecipeError, RunError
from oneround.runs.archive import find_runs, keep
from oneround.runs.folder import RunFolder
from oneround.simulate import run
from oneround.studies.merge import Merged, merge_records, merge_runs


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def swept(folder: Path, grid: Path, *numbers: int) -> Path:
    """A part of a sweep: these runs of the grid."""
    runs = sorted(grid.iterdir())
    for number in numbers:
        shutil.copytree(runs[number], folder / "cells" / runs[number].name)
    return folder


@pytest.fixture()
def parts(grid: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two parts of a sweep of six runs, with one run in both."""
    return swept(tmp_path / "a", grid, 0, 1, 2), swept(tmp_path / "b", grid, 2, 3, 4, 5)


@pytest.fixture(scope="session")
def begun(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first run of the grid, stopped after its first epoch."""
    folder = tmp_path_factory.mktemp("begun") / "fafi-1-1-0"
    seeds = {f"seeds.{name}": 1 for name in ("partition", "initialisation", "training")}
    with pytest.raises(OutOfTime):
        run(load("fafi", [*SMALL.items(), *seeds.items()]), folder, data=digits, deadline=time.time())
    return folder


def test_runs_of_all_parts_end_in_one_folder(grid: Path, parts: tuple[Path, Path], tmp_path: Path) -> None:
    before = [contents(part) for part in parts]
    merged = merge_runs(parts, tmp_path / "all")
    assert (merged.runs, len(merged.added), merged.unfinished, merged.faults) == (6, 6, [], [])
    assert [contents(part) for part in parts] == before, "parts are only read"
    lost = [name for part in before for name in part if not (tmp_path / "all" / name).is_file()]
    assert all(name.endswith(".lock") for name in lost)
    then, now = (methods_sheet(compare(find_runs([folder]))[0], 1.0) for folder in (grid, tmp_path / "all"))
    assert then.rows == now.rows
    written = contents(tmp_path / "all")
    assert merge_runs(parts, tmp_path / "all") == Merged(runs=6)
    assert contents(tmp_path / "all") == written


def test_a_part_can_be_the_output_and_a_run_of_its_own(parts: tuple[Path, Path], grid: Path, tmp_path: Path) -> None:
    assert merge_runs(parts, parts[0]).runs == 6
    assert len(find_runs([parts[0]])) == 6
    single = sorted(grid.iterdir())[0]
    assert merge_runs([single], tmp_path / "one").added == [single.name]


def test_runs_that_differ_are_named_and_the_others_are_joined(parts: tuple[Path, Path], tmp_path: Path) -> None:
    (other,) = {path.name for path in (parts[0] / "cells").iterdir()} & {
        path.name for path in (parts[1] / "cells").iterdir()
    }
    result = parts[1] / "cells" / other / "result.json"
    changed = json.loads(result.read_text())
    changed["rules"]["iffi"]["accuracy"] = 0.125
    result.write_text(json.dumps(changed))
    merged = merge_runs(parts, tmp_path / "all")
    assert merged.runs == 5 and len(merged.faults) == 1 and not (tmp_path / "all" / "cells" / other).exists()
    assert all(str(part / "cells" / other) in merged.faults[0] for part in parts)
    assert "accuracy of iffi" in merged.faults[0] and "12.50 %" in merged.faults[0]
    before = contents(parts[0])
    assert len(merge_runs(parts[1:], parts[0]).faults) == 1
    assert before.items() <= contents(parts[0]).items(), "what the output has stays"


def test_another_recipe_is_a_difference(parts: tuple[Path, Path], digits: Dataset, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    made(tmp_path / "c", digits, "fafi", 1, training__epochs=1)
    (new,) = (tmp_path / "c").iterdir()
    old = sorted((parts[0] / "cells").iterdir())[0]
    shutil.copytree(new, tmp_path / "d" / "cells" / old.name)
    (fault,) = merge_runs([parts[0], tmp_path / "d"], tmp_path / "all").faults
    assert "training.epochs = 2 and 1" in fault


def test_a_finished_run_is_taken_and_of_two_begun_the_one_that_got_further(
    grid: Path, begun: Path, digits: Dataset, tmp_path: Path
) -> None:
    done = sorted(grid.iterdir())[0]
    assert done.name == begun.name
    shutil.copytree(begun, tmp_path / "a" / begun.name)
    shutil.copytree(begun, tmp_path / "b" / begun.name)
    shutil.rmtree(tmp_path / "a" / begun.name / "clients")
    shutil.rmtree(tmp_path / "a" / begun.name / "uploads", ignore_errors=True)
    merged = merge_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert merged.unfinished == [begun.name] and list((tmp_path / "all" / begun.name / "clients").iterdir())
    assert merge_runs([tmp_path / "a"], tmp_path / "all").added == [], "what got further stays"
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "all" / begun.name, resumed)
    run(RunFolder(resumed).read_recipe(), resumed, data=digits, resume=True)
    assert json.loads((resumed / "result.json").read_text()) == json.loads((done / "result.json").read_text())
    merged = merge_runs([tmp_path / "a", grid], tmp_path / "all")
    assert merged.unfinished == [] and merged.runs == 6 and not merged.faults
    assert (tmp_path / "all" / begun.name / "result.json").read_bytes() == (done / "result.json").read_bytes()


@pytest.mark.parametrize(
    "file", ["result.json", "recipe.yaml", "uploads/client_000.safetensors", "broadcast.safetensors"]
)
def test_a_damaged_run_is_named_and_a_whole_one_taken(file: str, parts: tuple[Path, Path], tmp_path: Path) -> None:
    alone, twice = sorted((parts[0] / "cells").iterdir())[0].name, sorted((parts[1] / "cells").iterdir())[0].name
    for name in (alone, twice):
        path = parts[0] / "cells" / name / file
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) // 2])
    merged = merge_runs(parts, tmp_path / "all")
    assert [
        str(parts[0] / "cells" / name / file) in fault
        for name, fault in zip((alone, twice), merged.faults, strict=True)
    ]
    assert merged.runs == 5 and (tmp_path / "all" / "cells" / twice / "result.json").is_file()
    assert not (tmp_path / "all" / "cells" / alone).exists()


def test_what_is_no_run_is_named_or_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    name = sorted((parts[0] / "cells").iterdir())[0].name
    (tmp_path / "all" / "cells" / name).mkdir(parents=True)
    (tmp_path / "all" / "cells" / name / "mine.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    (parts[1] / "cells" / "stray").mkdir()
    (parts[1] / "cells" / "stray" / "result.json").write_text("{}")
    merged = merge_runs([*parts, tmp_path / "empty"], tmp_path / "all")
    assert merged.runs == 5 and contents(tmp_path / "all" / "cells" / name) == {"mine.txt": b"mine"}
    text = "\n".join(merged.faults)
    assert f"{name}: not a run folder" in text and "no run in it" in text and "no recipe.yaml beside it" in text
    with pytest.raises(RecipeError, match="nowhere: no such folder"):
        merge_runs([tmp_path / "nowhere"], tmp_path / "all")
    with pytest.raises(RecipeError, match=r"--out .*: lies in"):
        merge_runs([parts[0]], parts[0] / "all")
    for part in (parts[0] / "cells" / name, tmp_path / "all"):
        with pytest.raises(RecipeError, match=rf"--out .*{name}: is a run itself"):
            merge_runs([part], parts[0] / "cells" / name)
    (tmp_path / "kept.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"kept.json: a file; .* \(--out FILE.json\)"):
        merge_runs([tmp_path / "kept.json"], tmp_path / "all")


@pytest.mark.parametrize("moment", ["copytree", "copy2", "first rename", "second rename", "rmtree"])
def test_stopped_at_any_moment_it_goes_on(
    moment: str, grid: Path, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished run in the output gives way to a finished one."""
    shutil.copytree(begun, tmp_path / "all" / begun.name)
    renames = 0

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    rename = Path.rename

    def counted(path: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames == (1 if moment.startswith("first") else 2):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if moment.endswith("rename"):
            patch.setattr(Path, "rename", counted)
        elif moment == "rmtree":
            patch.setattr(
                merging.shutil,
                "rmtree",
                lambda path, **_: stop() if path.suffix == ".replaced" and path.exists() else None,
            )
        else:
            patch.setattr(merging.shutil, moment, stop)
        merge_runs([grid], tmp_path / "all")
    assert all((path.parent / "recipe.yaml").is_file() for path in (tmp_path / "all").rglob("result.json"))
    merged = merge_runs([grid], tmp_path / "all")
    assert merged.runs == 6 and not merged.faults and not merged.unfinished
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == sorted(path.name for path in grid.iterdir())


def test_a_run_that_is_at_work_in_the_output_is_left_alone(grid: Path, begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "all" / begun.name)
    with RunFolder(tmp_path / "all" / begun.name).locked(), pytest.raises(RunError, match="another process is running"):
        merge_runs([grid], tmp_path / "all")


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_and_folders_become_one_record(grid: Path, parts: tuple[Path, Path], tmp_path: Path) -> None:
    one, kept = tmp_path / "one.json", tmp_path / "kept.json"
    keep(find_runs([parts[0]]), kept)
    merged = merge_records([kept, parts[1]], one)
    assert (merged.runs, len(merged.added), merged.faults) == (6, 6, [])
    then, now = (methods_sheet(compare(find_runs([path]))[0], 1.0) for path in (grid, one))
    assert then.rows == now.rows
    written = one.read_bytes()
    assert merge_records([kept, parts[1]], one) == Merged(runs=6) and one.read_bytes() == written
    keep(find_runs([parts[0]])[:1], one)
    assert merge_records([parts[1]], one).runs == 5, "what is in it stays"


def test_a_record_names_what_differs_is_damaged_or_unfinished(
    parts: tuple[Path, Path], begun: Path, grid: Path, tmp_path: Path
) -> None:
    kept, other, bad = (tmp_path / name for name in ("kept.json", "other.json", "bad.json"))
    keep(find_runs([parts[0]]), kept)
    content = json.loads(kept.read_text())
    content["runs"][0]["clients"]["client_000"] = 0.125
    other.write_text(json.dumps(content))
    bad.write_text("{")
    shutil.copytree(begun, tmp_path / "begun" / "run")
    merged = merge_records([kept, other, bad, tmp_path / "begun"], tmp_path / "one.json")
    assert merged.runs == 2 and len(merged.faults) == 2
    assert str(kept) in merged.faults[0] and str(other) in merged.faults[0] and "client_000" in merged.faults[0]
    assert "bad.json: not a record of runs" in merged.faults[1]
    assert merged.unfinished == [] and merge_records([tmp_path / "begun", parts[1]], tmp_path / "two.json").unfinished
    keep(find_runs([kept]), tmp_path / "one.json")
    assert merge_records([other], tmp_path / "one.json").runs == 3, "the output's own stays"
    assert find_runs([tmp_path / "one.json"])[0].local_accuracy == find_runs([kept])[0].local_accuracy
    with pytest.raises(RecipeError, match="no such file or folder"):
        merge_records([tmp_path / "nowhere"], tmp_path / "one.json")
