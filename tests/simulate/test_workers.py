"""Clients in several processes: the same numbers as in one, killed at any moment and resumed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients import prepared
from conftest import small_recipe
from oneround.config.load import change
from oneround.data import Dataset, dataset_from_arrays
from oneround.errors import Interrupted, RunError
from oneround.protocol import Broadcast
from oneround.simulate import run
from oneround.simulate.workers import Worker
from oneround.training import silent
from run_files import final, timeless


@pytest.mark.parametrize(
    ("preset", "changes"),
    [("fafi", {"snapshots": 1}), ("etf-progressive", {"rounds": 2, "fusion": ["average"], "partition__clients": 3})],
    ids=["one round", "two rounds"],
)
def test_how_many_clients_run_at_once_does_not_matter(
    digits: Dataset, tmp_path: Path, preset: str, changes: dict[str, Any]
) -> None:
    recipe = small_recipe(preset, training__epochs=2, **changes)
    for workers in (1, 2):
        run(change(recipe, {"local.workers": workers}), tmp_path / str(workers), data=digits)
    assert final(tmp_path / "1") == final(tmp_path / "2")
    assert timeless(tmp_path / "1") == timeless(tmp_path / "2")


def test_a_worker_reads_a_new_broadcast_though_it_is_of_the_same_second(digits: Dataset, tmp_path: Path) -> None:
    first = prepared(digits)
    second = replace(first, weights={name: value + 1 for name, value in first.weights.items()})
    worker, path = Worker(digits.train, silent, None), tmp_path / "broadcast.safetensors"
    for broadcast in (first, second):
        broadcast.write(path)
        os.utime(path, (1e9, 1e9))
        assert worker._read(path) is worker._read(path)
        assert torch.equal(worker._read(path).weights["prototypes"], broadcast.weights["prototypes"])


def test_arrays_from_python(tmp_path: Path) -> None:
    random_state = np.random.RandomState(0)
    x, y = random_state.randint(0, 256, (60, 12, 12, 3)).astype(np.uint8), random_state.randint(0, 3, 60)
    data = dataset_from_arrays("mine", x[:50], y[:50], x[50:], y[50:], class_names=("a", "b", "c"))
    result = run(small_recipe(data="arrays", partition__clients=2, local__workers=2), tmp_path / "run", data=data)
    assert len(result.clients) == 2


FUSION = ["iffi", {"kind": "split", "chosen": "each"}, "dynamic-prototypes", "aligned-iffi", "feature-vote"]


COMMAND = [
    sys.executable, "-m", "oneround.cli", "run", "fafi+queue", "--model", "cnn", "--epochs", "8", "--seed", "3",
    "--set", "model.encoder.width=4", "--set", "training.batch_size=64", "--set", "snapshots=3", "--set", "local.checkpoint_seconds=0",
    "--set", "queue.size=200", "--set", "reference.source=sphere", "--set", "objective.terms.reference.match=moments",
    "--set", "validation=0.1", "--set", f"fusion={json.dumps(FUSION)}",
]  # fmt: skip


def start(folder: Path, *more: str, apart: bool = False) -> subprocess.Popen[str]:
    """`apart`: in a group of processes of its own, as a terminal would have it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*COMMAND, "--out", str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=apart,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a test run in the background hands down "ignored"
    )


def workers_of(pid: int) -> list[int]:
    """They are forked from a process of the run's own, which has loaded PyTorch."""
    return [worker for child in children(pid) for worker in children(child)]


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def at_work(folder: Path, since: float) -> bool:
    """Whether a client has saved an epoch since then."""
    with contextlib.suppress(FileNotFoundError):  # replaced at this moment
        return any(state.stat().st_mtime > since for state in folder.glob("clients/*/state.safetensors"))
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_killed_and_resumed_it_ends_with_the_same_numbers(tmp_path: Path) -> None:
    calm = start(tmp_path / "calm")
    output, _ = calm.communicate(timeout=240)
    assert calm.returncode == 0, output

    seed = random.randrange(10**6)
    moments = random.Random(seed)
    folder = tmp_path / "killed"
    begun = time.time()
    process = start(folder)
    # Once it is at work, kill it at a random moment of the work that is left.
    deadline = time.monotonic() + 60
    while not at_work(folder, begun) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(moments.uniform(0, 0.3))
    workers = [*children(process.pid), *workers_of(process.pid)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    patience = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers), "workers outlived their parent"
    assert not (folder / "result.json").exists(), "faster than the kill"
    last = start(folder, "--resume")
    output, _ = last.communicate(timeout=240)
    assert last.returncode == 0, output
    assert final(folder) == final(tmp_path / "calm"), f"moments drawn with seed {seed}"
    assert timeless(folder) == timeless(tmp_path / "calm")


def test_interrupted_it_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path / "run")
    while not (tmp_path / "run" / "clients").exists():
        time.sleep(0.02)
    workers = [*children(process.pid), *workers_of(process.pid)]
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "--resume" in output and "Traceback" not in output
    time.sleep(0.5)
    assert not any(alive(pid) for pid in workers)


def test_interrupted_while_workers_load_it_ends_quietly(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal, also the one that is loading PyTorch for the workers."""
    process = start(tmp_path / "run", apart=True)
    while not (tmp_path / "run" / "run.log").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130 and "Traceback" not in output, output
    assert output.strip().splitlines()[-1].startswith("error: interrupted; ")


def test_interrupted_while_the_pool_starts_its_thread_it_is_an_interruption(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.process._ExecutorManagerThread.start", interrupt)
    with pytest.raises(Interrupted, match="--resume"):
        run(small_recipe(local__workers=2), tmp_path / "run", data=digits)
    for worker in multiprocessing.active_children():
        worker.join(20)
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_is_reported_and_nothing_is_lost(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "--epochs", "4")
    while not (tmp_path / "run" / "clients").exists():
        time.sleep(0.02)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "a training process died" in output and "--resume" in output and "Traceback" not in output
    again = start(tmp_path / "run", "--epochs", "4", "--resume")
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0, output


def test_a_failing_client_names_itself(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(training__learning_rate=1e30, training__clip_norm=0.0, training__epochs=6, local__workers=2)
    with pytest.raises(RunError, match=r"client_00\d, epoch 1: the loss or its gradient is not finite"):
        run(recipe, tmp_path / "run", data=digits)


MEASURE = """
import resource, sys
from pathlib import Path
from typing import Any
from oneround.data import load_dataset
from oneround.config.load import load
from oneround.simulate import run
clients = int(sys.argv[1])
recipe = load("fafi", [("model.encoder", "resnet18"), ("training.epochs", 1), ("partition.kind", "iid"),
    ("partition.clients", clients), ("training.batch_size", 4), ("training.last_batch", "drop"), ("local.threads", 1),
    ("local.workers", 1), ("fusion", ["iffi"])])
data = load_dataset(recipe.data)
import torch
data = type(data)(data.name, data.train.take(torch.arange(4 * clients)), data.test.take(torch.arange(8)), data.class_names)
run(recipe, Path(sys.argv[2]), data=data)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.release
def test_memory_does_not_grow_with_the_number_of_clients(tmp_path: Path) -> None:
    """Twelve more clients may cost less than a tenth of twelve networks (the full size is in benchmarks/memory.py)."""
    peaks = {}
    for clients in (3, 15):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(clients), str(tmp_path / str(clients))],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks[clients] = int(done.stdout.split()[-1])
    network = sum(
        t.numel() * t.element_size() for t in Broadcast.read(tmp_path / "3" / "broadcast.safetensors").weights.values()
    )
    assert network > 44e6
    assert len(list((tmp_path / "15" / "uploads").iterdir())) == 15
    assert peaks[15] - peaks[3] < 0.1 * 12 * network, {k: f"{v / 1e6:.0f} MB" for k, v in peaks.items()}
