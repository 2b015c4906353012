"""Two clients at a time in one process: the same numbers as one after another, killed at any moment and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import small_recipe
from oneround.config.load import change
from oneround.config.recipe import Local
from oneround.data import Dataset
from oneround.errors import Interrupted
from oneround.protocol import UploadFolder, blob
from oneround.runs.writer import Snapshot
from oneround.server.loop import ServerLoop
from oneround.simulate import lanes, run, workers
from oneround.simulate.lanes import Closing, Lanes
from oneround.simulate.workers import WorkerPool
from oneround.training.idle import IdleStates
from run_files import final, timeless

CPU = torch.device("cpu")


def train_in_lanes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """From now on, a pool of one trains in so many lanes, as on a GPU, and keeps the states of idle clients."""
    begin = WorkerPool._begin
    monkeypatch.setattr(WorkerPool, "_begin", lambda pool, device, lanes: begin(pool, device, count))
    monkeypatch.setattr(IdleStates, "on", lambda device: IdleStates(10**9))


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("fafi", {"snapshots": 1}),
        ("etf-progressive", {"rounds": 2, "fusion": ["average"]}),
        ("etf-annealed", {"alignment__schedule": "consensus"}),
    ],
    ids=["one round", "two rounds", "clients that know each other's spread"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_how_many_clients_train_at_a_time_does_not_matter(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, changes: dict[str, Any], count: int
) -> None:
    recipe = small_recipe(preset, training__epochs=3, partition__clients=4, local__workers=1, **changes)
    run(recipe, tmp_path / "one", data=digits)
    train_in_lanes(monkeypatch, count)
    seen: list[tuple[str, str]] = []

    def emit(event: dict[str, Any]) -> None:
        if event["event"] == "epoch":
            seen.append((threading.current_thread().name, event["client"]))

    run(recipe, tmp_path / "lanes", data=digits, emit=emit)
    assert final(tmp_path / "one") == final(tmp_path / "lanes")
    assert timeless(tmp_path / "one") == timeless(tmp_path / "lanes")
    assert {name for name, _ in seen} == {f"lane_{number}" for number in range(count)}


@pytest.mark.parametrize(("device", "count", "asked"), [("cuda", None, 2), ("cuda", 1, 1), ("cuda", 5, 2), ("cpu", 5, 0)])  # fmt: skip
def test_two_at_a_time_is_for_a_gpu_where_one_is_not_asked_for(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch, device: str, count: int | None, asked: int
) -> None:
    wanted = []

    def begin(pool: WorkerPool, device: torch.device, lanes: int) -> None:
        wanted.append(lanes)
        raise Closing

    monkeypatch.setattr(workers, "choose_device", torch.device)
    monkeypatch.setattr(WorkerPool, "_begin", begin)
    job = SimpleNamespace(local=Local(device=device, workers=count))
    with WorkerPool(digits.train, 1) as pool, pytest.raises(Closing):
        pool.submit(job)  # type: ignore[arg-type]
    assert wanted == [asked]


class Crowd:
    """Workers that note how many of them work at once."""

    def __init__(self) -> None:
        self.now, self.most, self.lock = 0, 0, threading.Lock()

    def work(self, seconds: float = 0.05) -> Any:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(seconds)
        with self.lock:
            self.now -= 1
        return lambda: threading.current_thread().name


@pytest.mark.parametrize(("room", "most"), [(True, 2), (False, 1)])
def test_the_first_client_is_alone_and_a_second_lane_needs_room(
    monkeypatch: pytest.MonkeyPatch, room: bool, most: int
) -> None:
    crowd, asked = Crowd(), []
    monkeypatch.setattr(lanes, "has_room", lambda device: asked.append(crowd.most) or room)  # type: ignore[func-returns-value]
    pool: Lanes[Crowd] = Lanes(lambda emit: crowd, lambda event: None, CPU, 2)
    written_by = [pool.submit(lambda worker: worker.work()) for _ in range(6)]
    assert {each.result(60)[:6] for each in written_by} == {"upload"}
    pool.close(at_once=False)
    assert (asked, crowd.most) == ([1], most)


def test_a_lane_does_not_run_ahead_of_the_disk() -> None:
    disk, trained = threading.Event(), []
    pool: Lanes[None] = Lanes(lambda emit: None, lambda event: None, CPU, 2)
    done = [pool.submit(lambda _, n=number: trained.append(n) or disk.wait) for number in range(12)]  # type: ignore[misc,func-returns-value]
    time.sleep(0.5)
    ahead = len(trained)
    disk.set()  # first, so that a failure leaves no thread waiting
    assert ahead <= 3 * lanes.MOST
    assert all(each.result(60) for each in done) and sorted(trained) == list(range(12))
    pool.close(at_once=False)


def test_errors_of_training_and_of_writing_reach_the_caller_and_the_others_go_on() -> None:
    def fail(*_: object) -> Any:
        raise OSError("full")

    pool: Lanes[None] = Lanes(lambda emit: None, lambda event: None, CPU, 2)
    training, writing, fine = pool.submit(fail), pool.submit(lambda _: fail), pool.submit(lambda _: lambda: 3)
    for each in (training, writing):
        with pytest.raises(OSError, match="full"):
            each.result(60)
    assert fine.result(60) == 3
    pool.close(at_once=False)


def test_a_pool_that_is_left_stops_its_clients_at_their_next_event() -> None:
    stopped, events = threading.Event(), []

    def train(emit: Any) -> Any:
        try:
            while True:
                emit({"event": "steps"})
                time.sleep(0.01)
        except Closing:
            stopped.set()
            raise

    pool: Lanes[Any] = Lanes(lambda emit: emit, events.append, CPU, 2)
    futures = [pool.submit(train) for _ in range(3)]
    while not events:
        time.sleep(0.01)
    pool.close(at_once=True)
    assert stopped.is_set()
    assert isinstance(futures[0].exception(1), Closing) and not futures[2].done()


@pytest.mark.parametrize("count", [1, 2])
def test_interrupted_it_is_resumed(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    train_in_lanes(monkeypatch, count)
    recipe = small_recipe("fafi", training__epochs=4, partition__clients=4, local__workers=1, snapshots=2)

    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "epoch" and event["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(recipe, tmp_path / "stopped", data=digits, emit=interrupt)
    run(recipe, tmp_path / "stopped", data=digits, resume=True)
    run(change(recipe, {"local.workers": 2}), tmp_path / "whole", data=digits)
    assert final(tmp_path / "stopped") == final(tmp_path / "whole")


def when_training_is_ahead(monkeypatch: pytest.MonkeyPatch, then: Callable[[UploadFolder], None]) -> None:
    """Score the first snapshot only when a client has uploaded for the second; `then` sees the uploads that are scored."""
    score = ServerLoop._score

    def late(loop: ServerLoop, uploads: UploadFolder, epoch: int) -> Snapshot:
        if epoch == loop.epochs[0]:
            until = time.monotonic() + 60
            while not list((loop.folder.path / "ahead").glob("*.safetensors")):
                assert time.monotonic() < until, "nobody trains on"
                time.sleep(0.01)
            then(uploads)
        return score(loop, uploads, epoch)

    monkeypatch.setattr(ServerLoop, "_score", late)


def test_clients_train_on_while_their_uploads_are_scored(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe("fafi", training__epochs=3, partition__clients=4, local__workers=1, snapshots=1)
    run(recipe, tmp_path / "whole", data=digits)
    train_in_lanes(monkeypatch, 2)
    scored: list[int] = []
    when_training_is_ahead(monkeypatch, lambda uploads: scored.extend(upload.epoch for upload in uploads))
    inside: list[str] = []

    def emit(event: dict[str, Any]) -> None:
        assert not inside, "a callback need not be made for several threads"
        inside.append(event["event"])
        time.sleep(0.002)
        inside.clear()

    run(recipe, tmp_path / "run", data=digits, emit=emit)
    assert scored == [1, 1, 1, 1]
    assert final(tmp_path / "run") == final(tmp_path / "whole")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
    assert not (tmp_path / "run" / "ahead").exists()


@pytest.mark.parametrize("damaged", [False, True])
def test_stopped_while_clients_train_on_it_is_resumed(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Also where an upload that was not scored yet is lost, and its client's state is of a later epoch."""
    recipe = small_recipe("fafi", training__epochs=3, partition__clients=4, local__workers=1, snapshots=1)
    run(recipe, tmp_path / "whole", data=digits)
    train_in_lanes(monkeypatch, 2)

    def stop(uploads: UploadFolder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        when_training_is_ahead(patch, stop)
        run(recipe, tmp_path / "run", data=digits)
    states = {
        path.parent.name: int(blob.peek(path, "state")["epoch"])
        for path in (tmp_path / "run").glob("clients/*/*.safetensors")
    }
    client = next(name for name, epoch in states.items() if epoch > 1)
    if damaged:
        path = tmp_path / "run" / "uploads" / f"{client}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    run(recipe, tmp_path / "run", data=digits, resume=True)
    assert final(tmp_path / "run") == final(tmp_path / "whole")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


SCRIPT = """
import sys
sys.path[:0] = sys.argv[2:]
from conftest import small_recipe
from oneround.data import load_dataset
from oneround.simulate import run, simulation
from oneround.simulate.workers import WorkerPool
from oneround.training.idle import IdleStates
simulation.consensus = lambda spreads, epochs: 1 / (1 + len([epoch for epoch in spreads if epoch <= epochs]))  # it falls
begin = WorkerPool._begin
WorkerPool._begin = lambda pool, device, lanes: begin(pool, device, 2)
IdleStates.on = lambda device: IdleStates(10**9)
recipe = small_recipe("etf-annealed", alignment__schedule="consensus", training__epochs=24, partition__clients=3, snapshots=[8, 16],
                      local__workers=1, local__checkpoint_seconds=0.3)
run(recipe, sys.argv[1], data=load_dataset(recipe.data, None), resume=True,
    emit=lambda event: print(event["event"], event.get("epoch", ""), flush=True))
"""


@pytest.mark.processes
def test_killed_at_any_moment_it_is_resumed_with_the_same_numbers(tmp_path: Path) -> None:
    """Of a method whose clients know each other's spread after every epoch: a state may not be behind it."""

    def start(folder: Path) -> subprocess.Popen[str]:
        tests = str(Path(__file__).parents[1])
        return subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), tests], stdout=subprocess.PIPE, text=True)

    whole = start(tmp_path / "whole")
    assert whole.communicate(timeout=300)[0] and whole.returncode == 0
    folder = tmp_path / "killed"
    for after in (13, 25, 20):
        process = start(folder)
        assert process.stdout is not None
        epochs = 0
        for line in process.stdout:
            epochs += line.startswith("epoch")
            if epochs == after:
                break
        time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (folder / "result.json").exists()
    last = start(folder)
    last.communicate(timeout=300)
    assert last.returncode == 0
    assert final(folder) == final(tmp_path / "whole")
    assert timeless(folder) == timeless(tmp_path / "whole")


def test_a_gpu_has_room_where_half_as_much_again_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4)
    for free, room in ((7, True), (6, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 100))
        assert lanes.has_room(cuda) is room
    assert workers.Lanes is Lanes and lanes.has_room(CPU)
