"""The side of a Ray worker, without Ray: what it yields is all that a run's folder needs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from conftest import small_recipe
from oneround.data import Dataset
from oneround.errors import OneroundError, OutOfTime, ProtocolError
from oneround.files import write_durably
from oneround.protocol import Upload
from oneround.runs.folder import RunFolder
from oneround.server.plan import DealtPlan
from oneround.simulate.ray_worker import PREFIX, NodeWorker, versions
from oneround.simulate.workers import TrainJob, Worker
from oneround.training import silent


@pytest.fixture()
def job(digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    """A client with three epochs; whatever a worker keeps is in a folder of the test's."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    recipe = small_recipe(training__epochs=3, partition__clients=2, local__checkpoint_seconds=0)
    plan, folder = DealtPlan.of(recipe, digits), RunFolder(tmp_path / "run")
    plan.prepare().write(folder.broadcast)
    return TrainJob("client_000", plan.split.clients[0], folder, 3, plan.recipe.local)


@pytest.fixture()
def worker(job: TrainJob, digits: Dataset) -> NodeWorker:
    pixels, labels = digits.train.pixels.numpy().copy(), digits.train.labels.numpy().copy()
    pixels.flags.writeable = labels.flags.writeable = False
    worker = NodeWorker(pixels, labels)
    worker.set_broadcast(job.folder.broadcast.read_bytes())
    return worker


def kinds(messages: list[Any]) -> list[str]:
    return [kind for kind, content in messages if kind != "event" or content["event"] == "epoch"]


def test_the_upload_is_that_of_a_worker_on_this_machine(job: TrainJob, worker: NodeWorker, digits: Dataset) -> None:
    Worker(digits.train, silent, None).train(job)()
    messages = list(worker.train(job, {}, None))
    received = job.folder.path / "received.safetensors"
    write_durably(received, messages[-1][1])
    assert Upload.content_of(received) == Upload.content_of(job.folder.upload(job.client))
    assert kinds(messages).count("event") == 3 and messages[-1][0] == "upload"
    left = [path for path in worker.folder.path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert left == [worker.folder.broadcast], "nothing of a client stays on its node"


def test_stopped_after_an_epoch_it_goes_on_from_the_state_it_sent(job: TrainJob, worker: NodeWorker) -> None:
    whole = list(worker.train(job, {}, None))
    first = list(worker.train(job, {}, 0.0))
    assert kinds(first) == ["event", "state", "error"] and isinstance(first[-1][1], OutOfTime)
    second = list(worker.train(job, first[-2][1], None))
    assert [content["epoch"] for kind, content in second if kind == "event" and content["event"] == "epoch"] == [2, 3]
    digests = []
    for number, messages in enumerate((whole, second)):
        path = job.folder.path / f"{number}.safetensors"
        write_durably(path, messages[-1][1])
        digests.append(Upload.content_of(path))
    assert digests[0] == digests[1]


def test_errors_a_user_can_fix_are_sent_and_others_raised(
    job: TrainJob, worker: NodeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.set_broadcast(b"damaged")
    kind, error = list(worker.train(job, {}, None))[-1]
    assert kind == "error" and isinstance(error, ProtocolError) and isinstance(error, OneroundError)

    def fail(_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(worker.worker, "train", fail)
    with pytest.raises(ZeroDivisionError):
        list(worker.train(job, {}, None))


def test_folders_of_killed_workers_are_removed_and_those_of_others_are_not(
    job: TrainJob, worker: NodeWorker, digits: Dataset
) -> None:
    orphan = Path(tempfile.gettempdir()) / f"{PREFIX}killed"
    (orphan / "clients").mkdir(parents=True)
    new = Path(tempfile.gettempdir()) / f"{PREFIX}new"
    new.mkdir()
    for path in (orphan, worker.folder.path):
        os.utime(path, (0, 0))
    other = NodeWorker(digits.train.pixels.numpy(), digits.train.labels.numpy())
    assert not orphan.exists() and new.is_dir() and worker.folder.broadcast.is_file() and other.folder.path.is_dir()
    other.close()
    assert not other.folder.path.exists() and worker.folder.path.is_dir()


def test_it_says_what_it_runs_on(worker: NodeWorker) -> None:
    assert "cores" in worker.device("cpu")
    assert set(versions()) == {"oneround", "torch"}
