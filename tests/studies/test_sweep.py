"""Sweeps: every cell a run, killed and resumed with the same table, on time, on this machine or on Ray."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from commands import oneround
from oneround.analysis.comparison import compare
from oneround.analysis.tables import methods_sheet
from oneround.config.load import checked
from oneround.errors import RecipeError
from oneround.runs.archive import find_runs
from oneround.studies.merge import merge_runs
from oneround.studies.sweep import Grid, _record_outcome, cells, part_of, read_grid, sweep
from oneround.training import silent

SMALL: dict[str, Any] = {
    "model.encoder": {"kind": "cnn", "width": 4}, "training.batch_size": 64, "training.epochs": 4, "snapshots": 2, "partition.clients": 3,
    "partition.alpha": 0.3, "fusion": ["iffi", "average"],
}  # fmt: skip


def small(**raw: Any) -> Grid:
    return checked(Grid, {"methods": ["v4", "v9"], "partitions": "1-2", "set": SMALL, **raw})


def table(folder: Path) -> Any:
    (group,) = compare(find_runs([folder]))
    return json.loads(methods_sheet(group, 1.0).json())


def command(folder: Path, *words: str, partitions: str = "1-2") -> list[str]:
    sets = [f"--set={key}={json.dumps(value)}" for key, value in SMALL.items()]
    return [
        sys.executable,
        "-m",
        "oneround.cli",
        "sweep",
        "v4",
        "v9",
        "--partitions",
        partitions,
        *sets,
        "--out",
        str(folder),
        *words,
    ]


def test_the_grid_is_every_combination_methods_fastest() -> None:
    every = cells(small(alpha=[0.1, 0.5], seeds=[3, 4], grid={"training.learning_rate": [0.05, 0.1]}))
    assert len({cell.name for cell in every}) == len(every) == 2 * 2 * 2 * 2 * 2
    assert every[0].name == "v4_alpha=0.1_learning_rate=0.05/partition_1_seed_3"
    assert every[1].name == "v9_alpha=0.1_learning_rate=0.05/partition_1_seed_3"
    last = every[-1].recipe
    assert (last.seeds.partition, last.seeds.initialisation, last.seeds.training) == (2, 4, 4)
    assert last.training.learning_rate == 0.1 and last.partition.dump()["alpha"] == 0.5 and last.method == "etf-entropy"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"methods": []}, "methods = .*: must have at least 1 entries"),
        ({"partitions": "5"}, "partitions = \"5\": must be a list"),
        ({"alpha": [0.0]}, "alpha.0 = 0.0: must be > 0"),
        ({"seeds": [1, 1]}, "names 1 twice"),
        ({"metods": ["v4"]}, "unknown key; did you mean 'methods'"),
        ({"grid": [1, 2]}, r"grid = \[1, 2\]: must be a mapping"),
        ({"grid": {"training.momentum": []}}, r"grid.training.momentum = \[\]: must have at least 1"),
        ({"grid": {"training.momentum": [0.1, 0.2, 0.1]}}, r"grid.training.momentum = .*: names 0.1 twice"),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_be_is_refused(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        small(**raw)


def test_a_mistake_in_any_cell_is_reported_before_anything_runs() -> None:
    with pytest.raises(RecipeError, match="no preset or recipe file 'v99'"):
        cells(small(methods=["v4", "v99"]))
    with pytest.raises(RecipeError, match=r"training.learning_rate = -1.*must be > 0"):
        cells(small(grid={"training.learning_rate": [0.1, -1.0]}))


def test_a_mistake_names_its_file_or_method(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^v9: training.learning_rate = -1"):
        cells(small(methods=["v9"], grid={"training.learning_rate": [-1.0]}))
    for text, says in (("grid: [1, 2]", "grid = [1, 2]"), ("grid:", "grid = null"), ("set: 3", "set = 3")):
        (tmp_path / "mine.yaml").write_text(f"methods: [v4]\n{text}\n")
        with pytest.raises(RecipeError, match=re.escape(f"mine.yaml: {says}: must be a mapping")):
            read_grid(tmp_path / "mine.yaml")


def test_two_methods_cannot_share_a_folder(tmp_path: Path) -> None:
    files = [tmp_path / name / "m.yaml" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("extends: fafi\n")
    with pytest.raises(
        RecipeError, match=r"a/m.yaml and .*b/m.yaml: both would be kept in m/partition_1; give one file"
    ):
        cells(small(methods=[str(file) for file in files]))


def test_parts_are_the_whole_sweep_and_share_nothing() -> None:
    every = cells(small())
    parts = [part_of(every, f"{number}/3") for number in (1, 2, 3)]
    assert [cell.name for cell in parts[1]] == [every[1].name], "every third, from the second on"
    assert sorted(cell.name for part in parts for cell in part) == sorted(cell.name for cell in every)
    assert part_of(every, "1/1") == every and part_of(every, "9/9") == []
    for text in ("0/3", "4/3", "3", "1/0", "a/b", "-1/3"):
        with pytest.raises(RecipeError, match=f"--part {text}: must be"):
            part_of(every, text)


LOADING = """
import torch
def asked(*_): raise SystemExit("CUDA was asked for something")
for name in ("is_available", "device_count", "get_device_properties", "init", "_lazy_init"):
    setattr(torch.cuda, name, asked)
import oneround.studies.sweep
"""


def test_what_workers_are_forked_from_leaves_cuda_alone() -> None:
    """It cannot be used in a process forked from one that has used it."""
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "undisturbed"
    standing = sweep(cells(small()), folder, workers=2)
    assert len(standing.done) == 4 and not standing.failed and not standing.left
    return folder


def test_killed_at_a_random_moment_it_resumes_and_ends_with_the_same_table(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    when = random.Random().uniform(0.0, 3.0)
    process = subprocess.Popen(
        command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    limit = time.monotonic() + 120
    while (
        not list(folder.rglob("metrics.jsonl"))
        and not list(folder.rglob("broadcast.safetensors"))
        and time.monotonic() < limit
    ):
        time.sleep(0.05)
    time.sleep(when)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert table(folder) == table(undisturbed), f"killed {when:.2f} s after the first cell began"


def test_the_time_budget_ends_between_epochs_and_the_rest_follows_later(undisturbed: Path, tmp_path: Path) -> None:
    every = cells(small(), [("local.checkpoint_seconds", 1000.0)])
    first = sweep(every, tmp_path / "timed", minutes=0.001, workers=1)  # over before the first epoch is
    assert first.done == () and len(first.left) == 4
    (state,) = (tmp_path / "timed").rglob("state.safetensors")
    assert state.stat().st_size > 0, "the epoch it was in is saved"
    rest = sweep(every, tmp_path / "timed", workers=2)
    assert len(rest.done) == 4 and table(tmp_path / "timed") == table(undisturbed)


def test_the_time_budget_is_kept(tmp_path: Path) -> None:
    """Within a tenth or one epoch, whichever is longer, not counting the start of processes."""
    long = small(
        methods=["v4"], partitions=[1], set={**SMALL, "training.epochs": 2000, "snapshots": 0, "trace.every": 0}
    )
    events: list[tuple[float, dict[str, Any]]] = []
    begun = time.time()
    standing = sweep(
        cells(long), tmp_path / "long", minutes=0.1, workers=1, emit=lambda event: events.append((time.time(), event))
    )
    epochs = [(at, event["seconds"]) for at, event in events if event["event"] == "epoch"]
    assert standing.left and epochs
    allowed = max(1.5, max(seconds for _, seconds in epochs)) + 1.0
    assert 6 - 0.1 <= epochs[-1][0] - begun <= 6 + allowed


def test_parts_that_two_machines_measured_give_the_same_table(undisturbed: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        assert len(sweep(part_of(cells(small()), f"{number}/2"), tmp_path / f"machine-{number}", workers=1).done) == 2
    merged = merge_runs([tmp_path / "machine-1", tmp_path / "machine-2"], tmp_path / "all")
    assert merged.runs == 4 and not merged.faults and table(tmp_path / "all") == table(undisturbed)


def test_a_cell_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    bad = small(
        grid={"training.learning_rate": [0.05, 1e30]},
        partitions=[1],
        methods=["v4"],
        set={**SMALL, "training.clip_norm": 0.0},
    )
    events: list[dict[str, Any]] = []
    standing = sweep(cells(bad), tmp_path, workers=1, emit=events.append)
    assert len(standing.done) == 1 and len(standing.failed) == 1
    assert "not finite" in next(iter(standing.failed.values()))
    assert {event["state"] for event in events if event["event"] == "cell"} == {"done", "failed"}


def test_what_is_done_is_not_done_again(undisturbed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("result.json")}
    events: list[dict[str, Any]] = []
    sweep(cells(small()), undisturbed, workers=1, emit=events.append)
    assert before == {path: path.stat().st_mtime_ns for path in undisturbed.rglob("result.json")}
    assert events == [{"event": "sweep", "cells": 4, "done": 4}]


@pytest.mark.parametrize("key, value", [("training.epochs", 5), ("model.encoder.width", 8), ("model.encoder", None)])
def test_what_was_done_with_other_settings_is_refused(undisturbed: Path, key: str, value: Any) -> None:
    first = "model.encoder.width" if value is None else key
    with pytest.raises(
        RecipeError, match=rf"v4/partition_1: holds a run with {first} = 4, not \d+; choose another --out"
    ):
        sweep(cells(small(set={**SMALL, key: value})), undisturbed, workers=1)


def test_a_sweep_described_in_a_file(tmp_path: Path) -> None:
    described = {
        "methods": ["v7", "v4"],
        "partitions": [1],
        "set": {**SMALL, "training.epochs": 1},
        "grid": {"training.momentum": [0.5]},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(described))
    words = ["sweep", "mine.yaml", "--out", "swept"]
    done = oneround(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[2/2]" in done.stdout and "fafi: " in done.stdout and "minus etf" in done.stdout
    assert "show this again with oneround compare swept --baseline etf\n" in done.stdout
    assert len(list((tmp_path / "swept").rglob("result.json"))) == 2


@pytest.mark.release
def test_on_a_ray_cluster(undisturbed: Path, tmp_path: Path) -> None:
    words = command(tmp_path / "ray", "--ray", "local", partitions="2")
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {path.relative_to(tmp_path / "ray"): json.loads(path.read_text()) for path in tmp_path.rglob("result.json")}
    assert len(found) == 2
    assert all(result == json.loads((undisturbed / path).read_text()) for path, result in found.items())


def test_a_cell_that_fails_on_ray_is_reported_in_one_line() -> None:
    """Ray raises an error that is also of the cause's type, with the whole traceback as its message."""
    from ray.exceptions import RayTaskError

    task, failed = Future[dict[str, float]](), dict[str, str]()
    raised = RayTaskError("run_cell", "Traceback: …\n  line 1\n  line 2", RecipeError("x = 3: must be ≤ 2"))
    task.set_exception(raised.as_instanceof_cause())
    _record_outcome(task, "a/partition_1", failed, silent)
    assert failed == {"a/partition_1": "x = 3: must be ≤ 2"}
