"""The examples do what they say, and the claims they check can fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from oneround.runs.log import Measurements
from oneround.runs.record import RunRecord

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "explosion.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("explosion_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(*arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
    """As a user would, with the package of this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=where, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.release
def test_v12_explodes_and_its_cures_do_not(tmp_path: Path) -> None:
    """Here on one seed; the three of the documentation are in results/, held to the same claims by the next test."""
    done = run_script("--seeds", "2", "--out", "out", where=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "explosion.png").stat().st_size > 10_000
    check(tmp_path / "out" / "explosion.json", [2])


def test_the_recorded_three_seeds_bear_the_claims_out() -> None:
    check(ROOT / "results" / "digits_explosion.json", [1, 2, 3])


def check(record: Path, seeds: list[int]) -> None:
    runs = json.loads(record.read_text(encoding="utf-8"))["runs"]
    methods = ("etf-attenuated", "etf-guarded", "etf-hinge", "etf-decaying", "etf-equilibrium")
    seen = {(run["method"], run["keys"]["seeds.partition"]) for run in runs}
    assert seen == {(method, seed) for method in methods for seed in seeds} and len(runs) == len(seen)
    for run in runs:
        curve = {int(epoch): 100 * value for epoch, value in run["curves"]["iffi"].items()}
        fall = max(curve.values()) - curve[max(curve)]
        if run["method"] == "etf-attenuated":
            assert max(by["20"] / by["1"] for by in run["traces"]["lambda_raw"].values()) >= 100
            assert fall >= 10
        else:
            assert fall <= 3, run["method"]
        assert run["where"]["torch"]


def finished(method: str, weights: list[float], accuracy: list[float]) -> RunRecord:
    curve = {10 * (number + 1): value / 100 for number, value in enumerate(accuracy)}
    traced = {"client_000": [2.0] * len(weights), "client_001": weights}
    epochs = {name: {epoch: {"lambda_raw": value} for epoch, value in enumerate(by)} for name, by in traced.items()}
    keys = {"method": method, "seeds.partition": 1}
    return RunRecord(Path(), keys, measurements=Measurements(dict(epochs), {"iffi": curve}))


def test_the_claims_can_fail(example: ModuleType) -> None:
    v12, cure = ([2.0, 30.0, 200.0], [60.0, 80.0, 70.0]), ([2.0, 30.0, 50.0], [60.0, 80.0, 77.0])

    def judged(v12: tuple[list[float], list[float]], cure: tuple[list[float], list[float]]) -> list[bool]:
        runs = [finished("etf-attenuated", *v12), finished("etf-guarded", *cure)]
        assert sum(len(example.broken(run)) for run in runs) <= 1
        return [holds for _, holds in example.verdicts(runs)]

    assert judged(v12, cure) == [True, True]
    doctored = {
        "λ grew × 99": ([2.0, 198.0], v12[1]),
        "V12 fell by 9.9": (v12[0], [80.0, 70.1]),
        "V12 rose at the end": (v12[0], [60.0, 70.0, 81.0]),
        "λ is not a number": ([2.0, float("nan")], v12[1]),
    }
    for what, changed in doctored.items():
        assert judged(changed, cure) == [False, True], what
    assert judged(v12, (cure[0], [80.0, 76.9])) == [True, False], "a cure fell by 3.1"


def test_a_folder_of_somebody_else_is_left_alone(example: ModuleType, tmp_path: Path) -> None:
    mine, others = tmp_path / "mine", tmp_path / "others"
    others.mkdir()
    (others / "thesis.txt").write_text("years of work")
    done = run_script("--out", str(others), where=tmp_path)
    assert done.returncode == 2 and "did not make" in done.stderr and "Traceback" not in done.stderr
    assert (others / "thesis.txt").read_text() == "years of work"
    example.make_room(mine)
    (mine / "old").touch()
    example.make_room(mine)
    assert [path.name for path in mine.iterdir()] == [example.MARK]
