"""The long studies in benchmarks/, made small: every method they name can be built with their defaults, runs, and is not run twice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import mergenet
import ridge
import routed
import scaling
from bank_pairs import EPOCHS, METHODS, Pairs, noted
from oneround.studies.named_study import cells as study_cells
from oneround.studies.named_study import read_study
from oneround.studies.reproduce import reproduce
from study import measured_on, merge_environments

ROOT = Path(__file__).parents[1]

SMALL = [
    "--student",
    '{"kind": "cnn", "width": 4}',
    "--teacher",
    '{"kind": "cnn", "width": 8}',
    "--teacher-epochs",
    "1",
]


def study(name: str, *words: str) -> list[str]:
    """Run it as its help says; what it printed."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_pages_leave_out_a_commit_that_is_not_known() -> None:
    environment = {"device": "a cpu", "packages": {"torch": "2.0"}, "commit": None}
    assert measured_on(environment, [None, None]) == "device: a cpu; torch 2.0"
    assert measured_on(environment, ["b", None, "a"]) == "device: a cpu; torch 2.0; commits a, b"
    assert merge_environments([environment, {**environment, "commit": "a"}])["commit"] == "a"


@pytest.mark.parametrize("method", mergenet.METHODS)
def test_every_method_of_the_mergenet_study_is_a_recipe(method: str) -> None:
    recipe = mergenet.recipe_of((method, 0.5, 1), mergenet.options_of([]))
    assert recipe.model.encoder is not None and recipe.model.encoder.kind == "mobilenet-v2"
    assert recipe.rounds * recipe.training.epochs == 15


@pytest.mark.release
def test_the_mergenet_study_measures_every_method_once_and_goes_on(tmp_path: Path) -> None:
    where = ["--data", "digits", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "alpha_0.5"), *SMALL]
    words = [*where, "--alphas", "0.5", "--seeds", "1", "--rounds", "3", "--clients", "2"]
    first = study("mergenet", *words, "--methods", "fused", "fedavg", "taught", "alone")
    assert first[-1].startswith("4 of 4 runs")
    again = study("mergenet", *words)
    assert [line.split(",")[0] for line in again[:-1]] == ["method pooled", "method single", "method fused"]
    made = str(tmp_path / "alpha_0.5.json")
    study("mergenet", "--join", made, made, "--out", str(tmp_path / "joined"))
    assert (tmp_path / "joined.json").read_text() == Path(made).read_text()
    record = json.loads(Path(made).read_text())
    assert sorted(cell["method"] for cell in record["cells"]) == sorted(mergenet.METHODS)
    assert len(record["arguments"]) == 2
    (tmp_path / "older.json").write_text(json.dumps({**record, "arguments": "--seeds 1"}))
    other = {**record, "rounds": 9, "environment": {**record["environment"], "device": "another"}}
    (tmp_path / "other.json").write_text(json.dumps(other))
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "mergenet.py"), "--join", made, str(tmp_path / "other.json")], capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 1 and "rounds = 9" in done.stderr and "it is 3" in done.stderr
    (tmp_path / "other.json").write_text(json.dumps({**other, "rounds": 3}))
    study("mergenet", "--join", str(tmp_path / "older.json"), str(tmp_path / "other.json"), "--out", str(tmp_path / "both"))  # fmt: skip
    both = json.loads((tmp_path / "both.json").read_text())
    assert both["arguments"] == ["--seeds 1", *record["arguments"]] and "another" in both["environment"]["device"]
    page = (tmp_path / "alpha_0.5.md").read_text()
    assert "not measured" not in page and all(f"\n- {number}. " in page for number in range(1, 5))


@pytest.mark.parametrize(
    "name", ["cifar10_mergenet", "cifar10_ridge", "cifar10_ridge_cpu", "cifar10_routed", "scaling_cpu"]
)
def test_pages_that_are_kept_say_what_their_records_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, page = (ROOT / "results" / f"{name}.{ending}" for ending in ("json", "md"))
    (tmp_path / record.name).write_text(record.read_text())
    studies = {"mergenet": mergenet, "ridge": ridge, "routed": routed, "scaling": scaling}
    (made_by,) = (study for word, study in studies.items() if word in name.split("_"))
    monkeypatch.setattr(sys, "argv", [f"{made_by.__name__}.py", "--render", str(tmp_path / record.name)])
    made_by.main()
    assert (tmp_path / page.name).read_text() == page.read_text()


def test_experts_are_compared_on_the_partitions_they_share() -> None:
    def cell(experts: str, partition: int, accuracy: float) -> dict[str, object]:
        curves = {rule: {"10": accuracy / 2, "20": accuracy} for rule in routed.COMPARED}
        rules = dict.fromkeys(routed.COMPARED, accuracy)
        return {"alpha": 0.1, "experts": experts, "partition": partition, "rules": rules, "curves": curves}

    cells = [cell("fafi", 1, 0.5), cell("fafi", 2, 0.6), cell("fafi", 3, 0.9)]
    cells += [cell("cross-entropy", 1, 0.52), cell("cross-entropy", 2, 0.64), cell("cross-entropy", 7, 0.1)]
    assert routed._ways(cells)[2:] == [
        "| 0.1 | cross-entropy | 1, 2 |" + " +3.0 ± 12.7 (n.d.) |" * len(routed.COMPARED)
    ]
    lengths = routed._lengths(cells)
    assert "| 10 | 20 |" in lengths[0] and lengths[2] == "| 0.1 | cross-entropy | routed | 21.0 | 42.0 |"


@pytest.mark.release
def test_routed_experts_are_measured_and_their_uploads_scored_in_every_encoding(tmp_path: Path) -> None:
    small = ["--set", "model.encoder={kind: cnn, width: 4}", "--set", "sums.features.size=64"]
    where = ["--data", "digits", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "routed")]
    lines = study("routed", *where, *small, "--epochs", "1", "--experts", "fafi", "--alphas", "0.5", "--partitions", "1", "2")  # fmt: skip
    assert lines[-1].startswith("2 of 2 runs")
    assert "partitions 1, 2" in (tmp_path / "routed.md").read_text()
    parts = []
    for run in sorted((tmp_path / "runs").iterdir()):
        study("encodings", "--runs", str(run), "--out", str(tmp_path / run.name))
        parts.append(str(tmp_path / f"{run.name}.json"))
    study("encodings", "--join", *parts, parts[0], "--out", str(tmp_path / "joined"))
    joined = json.loads((tmp_path / "joined.json").read_text())
    assert joined["settings"]["partitions"] == "2" and joined["share_of_fp32"]["int8"] < 0.4
    assert all(len(costs) == 2 for costs in joined["cost_in_points"]["int8"].values())


def test_pairs_of_source_note_000_are_those_of_the_study_s_record(tmp_path: Path) -> None:
    small = {
        "data": "digits",
        "model.encoder": {"kind": "cnn", "width": 4},
        "training.batch_size": 128,
        "local.workers": 1,
    }
    cells = study_cells(read_study("note-000"), small, settings=["shared, α = 0.5"], partitions=[1])
    v4, v5 = reproduce(cells, tmp_path / "note-000.json", tmp_path / "runs").runs.values()
    pairs = Pairs(tmp_path / "note-000.json")
    assert pairs.alphas("dirichlet-overlap") == [0.5] and pairs.alphas("dirichlet") == []
    for epoch in EPOCHS:
        for mode, rule in (("evaluation", "iffi"), ("transductive", "iffi, transductive")):
            difference = pairs.difference("dirichlet-overlap", 0.5, epoch, mode)
            assert difference is not None
            assert difference.mean == pytest.approx(100 * (v5.curves[rule][epoch] - v4.curves[rule][epoch]))
    traced = {key[3:]: len(entry["cosine"]) for key, entry in pairs.entries.items()}
    assert traced == {(method, epoch): 5 * (epoch in (1, 36)) for method in METHODS for epoch in EPOCHS}
    assert v4.seconds and pairs.seconds("V4") == pytest.approx(v4.seconds, abs=0.06)
    assert noted(0.05, 36) == (83.67, 49.92)


def test_a_phase_within_another_counts_for_itself_only() -> None:
    clock = scaling.Clock()
    part = SimpleNamespace(upload=lambda: time.sleep(0.2))

    def train() -> str:
        time.sleep(0.05)
        part.upload()
        return "client"

    part.train = train
    clock.count(part, "train", "training")
    clock.count(part, "upload", "uploads")
    beside = threading.Thread(target=part.upload)
    beside.start()
    assert part.train() == "client"
    beside.join()
    spent = clock.stop()
    seconds = spent["seconds"]
    assert 0.05 <= seconds["training"] < 0.2 <= seconds["uploads"] < 0.39 and seconds["rest"] < 0.1
    assert spent["seconds_beside"]["uploads"] >= 0.2, "a thread beside delays nobody, and its time is not lost"
    assert sum(spent["cpu_seconds"].values()) < 0.2, "sleeping costs the processor nothing"


def test_growth_is_the_line_through_all_counts() -> None:
    assert scaling.line_through([5, 20, 100], [4.0, 7.0, 23.0]) == pytest.approx((3.0, 0.2, 1.0))
    seconds = {count: dict.fromkeys(scaling.PHASES, 0.5) | {"training": 3 + 0.2 * count} for count in (5, 20, 100)}
    cells = [
        {
            "clients": count,
            "way": scaling.ALONE,
            "seconds": each,
            "cpu_seconds": {name: value / 2 for name, value in each.items()},
            "host_peak": 1_000_000 * (1000 + 2 * count),
            "device_peak": 1_000_000_000,
            "network": 10_000_000,
            "bytes": {"uploads": 10_000_000 * count},
        }
        for count, each in seconds.items()
    ]
    lines = scaling.growth(cells, scaling.ALONE)
    assert "| training, s | 3.00 | 200.00 | 1.000 |" in lines and "| total, s | 6.00 | 200.00 | 1.000 |" in lines
    assert (
        "| disk, MB | 0.00 | 10000.00 | 1.000 |" in lines and "| device memory, MB | 1000.00 | 0.00 | 1.000 |" in lines
    )
    assert lines[-2].endswith("1010 MB with 5 clients, 1200 MB with 100: 0.200 networks of 10.00 MB per client added")
    on_a_cpu = scaling.growth([{**cell, "device_peak": None} for cell in cells], scaling.ALONE)
    assert "| training, s | 1.50 | 100.00 | 1.000 |" in on_a_cpu and "device" not in "".join(on_a_cpu)
    assert not scaling.growth(cells[:2], scaling.ALONE), "a line through two points explains nothing"


@pytest.mark.processes
@pytest.mark.slow
def test_scaling_does_the_same_work_with_every_count_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    words = ["--data", "digits", "--samples", "160", "--test-images", "32", "--batch-size", "20", "--device", "cpu"]
    words += ["--set", "model.encoder={kind: cnn, width: 4}", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "scaling")]  # fmt: skip
    first = study("scaling", *words, "--clients", "2", "4")
    assert [line.split(":")[0] for line in first[:2]] == ["clients 2, way one by one", "clients 4, way one by one"]
    lines = study("scaling", *words, "--clients", "2", "4", "8", "--batched", "8")
    assert [line.split(":")[0] for line in lines[:2]] == ["clients 8, way one by one", "clients 8, way together"]
    assert lines[2].startswith("4 of 4 runs") and lines[-1].startswith("- 8 clients trained together: ")
    cells = json.loads((tmp_path / "scaling.json").read_text())["cells"]
    assert {cell["steps"] for cell in cells} == {8}
    assert all(cell["seconds"][name] > 0 and cell["cpu_seconds"][name] > 0 for cell in cells for name in scaling.PHASES)
    assert all(cell["bytes"]["uploads"] >= cell["clients"] * cell["network"] for cell in cells)
    assert not list((tmp_path / "runs").iterdir())
