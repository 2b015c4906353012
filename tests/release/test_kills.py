"""Ten killed and resumed runs of every kind end bit-equal: `run`, `sweep` and `federate local`, with SIGKILL to the whole group."""

from __future__ import annotations

import hashlib
import json
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

pytestmark = [pytest.mark.release, pytest.mark.processes]
SMALL = [
    "--set", "model.encoder={kind: cnn, width: 8}", "--set", "training.batch_size=64", "--set", "snapshots=2",
    "--set", "local.checkpoint_seconds=0", "--set", "partition.clients=3", "--set", "validation=0.1", "--set", "training.epochs=6",
]  # fmt: skip
KINDS = {
    "run": (["run", "v10", *SMALL], ["--resume"], 3.0),
    "sweep": (["sweep", "fafi", "v9", "--partitions", "1-2", *SMALL], [], 6.0),
    "federate": (["federate", "local", "fafi", *SMALL], [], 15.0),
}
"""Command, what resumes it, and seconds within which it is killed after it has begun to write."""
TIMES = ("seconds", "elapsed", "bytes_down", "bytes_up", "traffic")


def command(kind: str, folder: Path, resume: bool = False) -> list[str]:
    words, again, _ = KINDS[kind]
    return [sys.executable, "-m", "oneround.cli", *words, "--out", str(folder), *(again if resume else [])]


def outcome(folder: Path) -> dict[str, Any]:
    """Everything a run or sweep found, without times: results and the digests of models."""
    results = {}
    for path in sorted(folder.rglob("result.json")):
        result = json.loads(path.read_text())
        name = str(path.parent.relative_to(folder))
        results[name] = {key: value for key, value in result.items() if key not in TIMES}
        for shard in sorted((path.parent / "model").glob("*.safetensors")):
            results[f"{name}/{shard.name}"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    assert results
    return results


@pytest.fixture(scope="module", params=KINDS)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp(request.param) / "undisturbed"
    subprocess.run(command(request.param, folder), check=True, capture_output=True, timeout=600)
    yield request.param, folder


@pytest.mark.parametrize("number", range(10))
def test_killed_and_resumed_it_ends_bit_equal(undisturbed: tuple[str, Path], number: int, tmp_path: Path) -> None:
    kind, calm = undisturbed
    moment = random.Random().uniform(0, KINDS[kind][2])
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        command(kind, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    limit = time.monotonic() + 240
    while not list(folder.rglob("broadcast.safetensors")) and time.monotonic() < limit:
        time.sleep(0.05)
    time.sleep(moment)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    begun = bool(list(folder.rglob("recipe.yaml")))
    done = subprocess.run(command(kind, folder, resume=begun), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert outcome(folder) == outcome(calm), f"killed {moment:.2f} s after it began to write"
