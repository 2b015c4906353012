"""reproduce as a command: what it lists, what it says, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

from commands import bad, good, oneround
from named_studies import study_file


def test_studies_and_their_cells_are_listed(tmp_path: Path) -> None:
    listed = good("reproduce", cwd=tmp_path)
    assert listed == good("reproduce", "--list", cwd=tmp_path)
    assert "anchors 25 " in listed and "note-000 36 " in listed and "?" in listed
    named = good("reproduce", "anchors", "--list", "--variant", "V5", "--part", "2/2", cwd=tmp_path)
    assert named == "α = 0.05: V5, partition 2 α = 0.05: V5, partition 4"
    assert not list(tmp_path.iterdir())


def test_a_study_is_measured_in_parts_that_merge_joins(tmp_path: Path) -> None:
    words = [
        "reproduce",
        str(study_file(tmp_path)),
        "--setting",
        "plain",
        "--variant",
        "V4",
        "--set",
        "training.epochs=2",
    ]
    for part in ("1/2", "2/2"):
        output = good(*words, "--part", part, "--out", f"{part[0]}.json", cwd=tmp_path)
        assert "1 of 1 cells are in" in output and "[1/1] plain: V4, partition" in output and "Does it run?" in output
    assert "2 run(s) in results/tiny.json" in good(
        "merge", "1.json", "2.json", "--out", "results/tiny.json", cwd=tmp_path
    )
    output = good(*words, "--table", cwd=tmp_path)
    assert "2 of 2 cells are in results/tiny.json" in output and "undecidable, n = 2" in output
    assert "2 cells, 2 done already" in good(*words, cwd=tmp_path)
    assert "fafi" in good("compare", "results/tiny.json", cwd=tmp_path)


def test_what_is_over_time_is_left_and_counted(tmp_path: Path) -> None:
    words = ["reproduce", str(study_file(tmp_path)), "--minutes", "0.01", "--set", "training.epochs=200"]
    assert "7 cells are left; the same command goes on" in good(*words, cwd=tmp_path)


def test_a_cell_that_fails_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    words = ["reproduce", str(study_file(tmp_path)), "--setting", "plain", "--variant", "V7", "--partitions", "1"]
    done = oneround(*words, "--set", "training.learning_rate=1e30", "--set", "training.clip_norm=0", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: plain: V7, partition 1: "), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "not finite" in done.stderr


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    path = str(study_file(tmp_path))
    for words, says in (
        (["anchor"], "no study 'anchor'; did you mean 'anchors'?"),
        ([path, "--variant", "V9"], "--variant V9: not in this study"),
        ([path, "--part", "3/2"], "--part 3/2: must be"),
        ([path, "--partitions", "x"], '--partitions.0 = "x": must be a whole number'),
        ([path, "--data-dir", "nowhere", "--data", "cifar10"], "no folder or file at local.data_path = nowhere"),
        ([path, "--known", "nowhere.json"], "nowhere.json: no such"),
    ):
        assert says in bad("reproduce", *words, cwd=tmp_path)
    (tmp_path / "damaged.json").write_text(json.dumps({"runs": []}))
    assert "damaged.json: not a record of runs" in bad("reproduce", path, "--out", "damaged.json", cwd=tmp_path)
