"""A run on a Ray cluster whose own command is killed, and one whose time is over: resumed, on the cluster or without it, it ends bit-equal."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import small_recipe
from oneround.config.load import change
from oneround.errors import OutOfTime
from oneround.simulate import run
from run_files import final

pytestmark = [pytest.mark.release, pytest.mark.processes]
RECIPE = small_recipe(
    training__epochs=30,
    snapshots=10,
    partition__clients=3,
    partition__alpha=0.3,
    local__checkpoint_seconds=0,
    local__workers=2,
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
    for _ in range(2):
        cluster.add_node(**node, num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "run"
    run(RECIPE, folder)
    return folder


@pytest.mark.parametrize("resumed_on", ["ray", "this machine"])
def test_a_command_that_is_killed_is_resumed(resumed_on: str, address: str, local: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.to_yaml())
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "oneround.cli", "run", str(tmp_path / "recipe.yaml"), "--out", str(folder)]
    process = subprocess.Popen([*command, "--ray", address], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while not list(folder.glob("clients/*/state.safetensors")) and time.monotonic() < limit:
        time.sleep(0.02)
    moment = random.uniform(0, 2)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "result.json").exists(), "faster than the kill"
    run(RECIPE, folder, resume=True, ray=address if resumed_on == "ray" else None)
    assert final(folder) == final(local), f"killed {moment:.2f} s after the first state had arrived"


def test_interrupted_it_says_how_to_go_on(address: str, local: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.to_yaml())
    folder = tmp_path / "stopped"
    command = [sys.executable, "-m", "oneround.cli", "run", str(tmp_path / "recipe.yaml"), "--out", str(folder)]
    process = subprocess.Popen(
        [*command, "--ray", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list(folder.glob("clients/*/state.safetensors")):
        time.sleep(0.02)
    os.kill(process.pid, random.choice([signal.SIGINT, signal.SIGTERM]))
    _, errors = process.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if line.startswith("error:")]
    assert process.returncode == 130 and len(lines) == 1 and "--resume" in lines[0] and "Traceback" not in errors
    run(RECIPE, folder, resume=True, ray=address)
    assert final(folder) == final(local)


def test_with_no_time_at_all_it_is_resumed_epoch_by_epoch(address: str, tmp_path: Path) -> None:
    recipe = change(RECIPE, {"training.epochs": 2, "snapshots": 0})
    run(recipe, tmp_path / "local")
    stops = 0
    while not (tmp_path / "run" / "result.json").exists():
        try:
            run(recipe, tmp_path / "run", resume=True, ray=address, deadline=time.time())
        except OutOfTime:
            stops += 1
        assert stops < 20
    assert stops and final(tmp_path / "run") == final(tmp_path / "local")
