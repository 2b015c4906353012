"""merge as a command: what it says, and its exit code."""

from __future__ import annotations

import shutil
from pathlib import Path

from commands import bad, good, oneround


def test_parts_are_joined_into_a_folder_and_into_a_record(grid: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(grid.iterdir())):
        shutil.copytree(path, tmp_path / "ab"[number % 2] / path.name)
    assert "6 run(s) in all: 6 added, 0 there already" in good("merge", "a", "b", "--out", "all", cwd=tmp_path)
    assert "6 run(s) in all: 0 added, 6 there already" in good("merge", "a", "b", "--out", "all", cwd=tmp_path)
    assert "oneround compare all.json" in good("merge", "a", "all", "--out", "all.json", cwd=tmp_path)
    assert good("compare", "all", cwd=tmp_path) == good("compare", "all.json", cwd=tmp_path)


def test_a_damaged_part_is_named_and_the_rest_is_joined(grid: Path, tmp_path: Path) -> None:
    shutil.copytree(grid, tmp_path / "a")
    damaged = sorted((tmp_path / "a").iterdir())[0] / "result.json"
    damaged.write_text("{")
    done = oneround("merge", "a", "--out", "all", cwd=tmp_path)
    assert done.returncode == 1 and "5 run(s) in all: 5 added" in done.stdout
    assert done.stderr.startswith(f"error: a/{damaged.parent.name}/result.json: damaged")
    assert "no such folder" in bad("merge", "nowhere", "--out", "all", cwd=tmp_path)
