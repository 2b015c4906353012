"""Clients of one run on a Ray cluster: the numbers of a local run, also when a node is killed; without a cluster, one clear line."""

from __future__ import annotations

import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import oneround.simulate.ray_pool as ray_pool
from conftest import small_recipe
from fake_ray import ActorDied, FakeRay, RayTaskError
from oneround.config.load import change
from oneround.config.recipe import Local, Recipe
from oneround.data import Dataset
from oneround.errors import OutOfTime, RecipeError, RunError
from oneround.protocol import Upload
from oneround.runs.folder import RunFolder
from oneround.simulate import run
from oneround.simulate.ray_pool import Resources, connected, fault_of
from run_files import final, timeless

RECIPE = small_recipe(
    training__epochs=4, snapshots=2, partition__clients=3, partition__alpha=0.3, local__checkpoint_seconds=0
)


def contents(folder: Path) -> dict[str, str]:
    """Digest of every upload."""
    return {path.name: Upload.content_of(path) for path in sorted((folder / "uploads").iterdir())}


@pytest.fixture(scope="module")
def local(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "run"
    run(change(RECIPE, {"local.workers": 1}), folder, data=digits)
    return folder


def check_equal(folder: Path, local: Path) -> None:
    assert final(folder) == final(local) and contents(folder) == contents(local)
    assert timeless(folder) == timeless(local)


# --- what a worker reserves ------------------------------------------------------------------------------------------

CARDS, CORES = {"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0}
SMALL, LARGE = 1000, 10_000_000


@pytest.mark.parametrize(
    ("nodes", "options", "parameters", "gpus", "expected"),
    [
        ([CORES], {}, SMALL, None, (1, 0, 3, 1)),
        ([CORES, CORES], {"workers": 4}, SMALL, None, (1, 0, 4, 2)),
        ([CORES, CORES], {"threads": 2}, LARGE, None, (2, 0, 2, 2)),
        ([CORES, CARDS], {}, LARGE, None, (1, 1, 2, 1)),
        ([CARDS, CARDS], {}, LARGE, 0.25, (1, 0.25, 16, 2)),
        ([CARDS], {"device": "cpu"}, SMALL, None, (1, 0, 8, 1)),
        ([CARDS], {}, SMALL, 0.0, (1, 0, 8, 1)),
    ],
)
def test_a_worker_has_a_gpu_where_there_is_one_and_otherwise_its_threads(
    nodes: list[dict[str, float]],
    options: dict[str, Any],
    parameters: int,
    gpus: float | None,
    expected: tuple[int, float, int, int],
) -> None:
    local = Local(**options)
    resources = Resources.of(nodes, local, parameters, gpus)
    assert (resources.cpus, resources.gpus, resources.workers, resources.nodes) == expected
    on_node = resources.local(local)
    assert on_node.device == ("cuda" if expected[1] else "cpu") and on_node.threads == (
        local.threads if expected[1] else expected[0]
    )


@pytest.mark.parametrize(
    ("nodes", "options", "gpus", "message"),
    [
        ([CORES], {}, 1.0, "--ray-gpus 1: no node of the Ray cluster has so many, and a CPU; the most is 0"),
        ([CORES], {"threads": 4}, None, "local.threads = 4: no node of the Ray cluster has so many CPUs"),
        ([CORES], {"device": "cuda"}, None, "local.device = cuda: the Ray cluster has no GPU"),
        ([CARDS], {"device": "cuda:1"}, 1.0, "local.device = cuda:1: Ray chooses the GPU of a worker"),
    ],
)
def test_what_no_node_has_is_refused(
    nodes: list[dict[str, float]], options: dict[str, Any], gpus: float | None, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        Resources.of(nodes, Local(**options), SMALL, gpus)


def test_no_cluster_no_ray_or_another_kind_of_address_is_one_line(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(RecipeError, match=f"--ray {address}: no cluster answers"), connected(address):
            pass
        with pytest.raises(RecipeError, match="no cluster answers"):
            run(RECIPE, tmp_path / "run", data=digits, ray=address)
    assert not (tmp_path / "run" / "recipe.yaml").exists(), "nothing was begun"
    with pytest.raises(RecipeError, match=r"--ray-gpus 0.5: only with --ray"):
        run(RECIPE, tmp_path / "run", data=digits, ray_gpus=0.5)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RecipeError, match="Ray is not installed here; pip install ray"), connected("local"):
        pass


# --- workers that fail, with a Ray that has no processes -------------------------------------------------------------


@pytest.fixture()
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def on_fake(digits: Dataset, folder: Path, recipe: Recipe = RECIPE, **options: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    run(recipe, folder, data=digits, ray="fake", emit=events.append, **options)
    return events


def test_a_client_whose_worker_is_lost_trains_again_with_the_same_numbers(
    digits: Dataset, local: Path, fake: FakeRay, tmp_path: Path
) -> None:
    fake.fails = lambda method, number: ActorDied("gone") if method == "train" and number in (1, 2) else None
    events = on_fake(digits, tmp_path / "run", change(RECIPE, {"local.workers": 1}))
    check_equal(tmp_path / "run", local)
    assert sum(event["event"] == "trouble" for event in events) == 2
    epochs = [(event["client"], event["epoch"]) for event in events if event["event"] == "epoch"]
    assert len(epochs) == len(set(epochs)) == 12, "no epoch is reported twice"
    assert "is lost: ActorDied: gone" in (tmp_path / "run" / "run.log").read_text()


def test_workers_lost_between_two_clients_are_no_client_s_fault(
    digits: Dataset, local: Path, fake: FakeRay, tmp_path: Path
) -> None:
    """Each of the first five says hello, and is gone when it is to train."""
    fake.fails = lambda method, number: ActorDied("gone") if method == "hello" and number in range(1, 10, 2) else None
    events = on_fake(digits, tmp_path / "run", change(RECIPE, {"local.workers": 1}))
    check_equal(tmp_path / "run", local)
    assert not any(event["event"] == "trouble" for event in events)


def test_a_client_that_always_loses_its_worker_ends_the_run(digits: Dataset, fake: FakeRay, tmp_path: Path) -> None:
    fake.fails = lambda method, number: ActorDied("gone") if method == "train" else None
    with pytest.raises(RunError, match=r"client_00\d: its worker on node 10.0.0.7 .*, like 2 before it .* --resume"):
        on_fake(digits, tmp_path / "run")
    fake.fails = lambda method, number: None
    on_fake(digits, tmp_path / "run", resume=True)


def test_a_bug_on_a_node_names_the_client_and_the_node(digits: Dataset, fake: FakeRay, tmp_path: Path) -> None:
    fake.fails = lambda method, number: RayTaskError(ZeroDivisionError("a bug")) if method == "train" else None
    with pytest.raises(RunError, match=r"client_00\d, on node 10.0.0.7 of the Ray cluster: ZeroDivisionError: a bug"):
        on_fake(digits, tmp_path / "run")


def test_workers_that_never_start_end_the_run(digits: Dataset, fake: FakeRay, tmp_path: Path) -> None:
    fake.fails = lambda method, number: ActorDied("no memory") if method == "hello" else None
    with pytest.raises(RunError, match="the Ray cluster starts no worker: ActorDied: no memory"):
        on_fake(digits, tmp_path / "run")
    fake.fails = lambda method, number: RayTaskError(OSError("disk full")) if method == "begin" else None
    with pytest.raises(RunError, match=r"node 10.0.0.7 of the Ray cluster: OSError: disk full"):
        on_fake(digits, tmp_path / "run", resume=True)


def test_a_node_without_oneround_is_named(
    digits: Dataset, fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "oneround.simulate.ray_worker", None)
        with pytest.raises(
            RunError, match=r"node 10.0.0.7 .*: oneround cannot be imported .*; install oneround .* on every"
        ):
            on_fake(digits, tmp_path / "run")
    here = {"oneround": "2", "torch": "3"}
    assert (
        fault_of("node x", {"oneround": "1", "torch": "3"}, here)
        == "node x has oneround 1; install oneround 2 on every node"
    )
    assert fault_of("node x", {"oneround": "2", "torch": "4"}, here) is None


def test_a_node_that_cannot_use_its_gpu_is_named(
    digits: Dataset, fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fake.cards = 1.0
    with pytest.raises(RunError, match=r"^node 10.0.0.7 of the Ray cluster: local.device = cuda: not on this machine"):
        on_fake(digits, tmp_path / "run")
    on_fake(digits, tmp_path / "run", resume=True, ray_gpus=0.0)


def test_a_recipe_that_a_node_cannot_use_names_the_node(
    digits: Dataset, fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in that is here, but not there."""

    def missing(name: str) -> None:
        raise RecipeError(f"no module named '{name}' here")

    monkeypatch.setattr("oneround.simulate.workers.load_plugin", missing)
    with pytest.raises(RecipeError, match=r"^node 10.0.0.7 of the Ray cluster: no module named 'json' here"):
        on_fake(digits, tmp_path / "run", change(RECIPE, {"local.plugins": ["json"]}))


@pytest.mark.slow
def test_with_no_time_at_all_it_stops_after_an_epoch_and_goes_on(
    digits: Dataset, local: Path, fake: FakeRay, tmp_path: Path
) -> None:
    stops = 0
    while not (tmp_path / "run" / "result.json").exists():
        try:
            on_fake(digits, tmp_path / "run", resume=True, deadline=time.time())
        except OutOfTime:
            stops += 1
    assert 2 <= stops <= 20
    check_equal(tmp_path / "run", local)


def test_a_cluster_that_has_lost_all_workers_does_not_wait_longer_than_the_deadline(
    digits: Dataset, fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "PATIENCE", 0.0)

    def fails(method: str, number: int) -> Exception | None:
        if method != "train":
            return None
        fake.ready = False  # from now on no worker starts
        return ActorDied("gone")

    fake.fails = fails
    events = list[dict[str, Any]]()
    recipe = change(RECIPE, {"local.workers": 1})
    with pytest.raises(OutOfTime, match="the time is over"):
        run(recipe, tmp_path / "run", data=digits, ray="fake", emit=events.append, deadline=time.time() + 1.5)
    assert any("no room for a worker" in event.get("text", "") for event in events)


def test_interrupted_it_leaves_no_thread(digits: Dataset, fake: FakeRay, tmp_path: Path) -> None:
    before = threading.active_count()

    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "scoring":
            raise KeyboardInterrupt

    with pytest.raises(RunError, match="--resume"):
        run(RECIPE, tmp_path / "run", data=digits, ray="fake", emit=interrupt)
    assert threading.active_count() == before


def test_a_full_disk_here_is_the_error_of_the_run(
    digits: Dataset, fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ray_pool, "write_durably", full)
    with pytest.raises(OSError, match="No space left"):
        on_fake(digits, tmp_path / "run")


def test_data_and_broadcast_go_out_once(
    digits: Dataset, fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    put = fake.put
    monkeypatch.setattr(fake, "put", lambda value: (sizes.append(getattr(value, "nbytes", len(value))), put(value))[1])
    on_fake(digits, tmp_path / "run")
    broadcast = RunFolder(tmp_path / "run").broadcast.stat().st_size
    assert sizes == [digits.train.pixels.nbytes, digits.train.labels.nbytes, broadcast]


# --- a cluster of three nodes on this machine ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes that train, one client each, and one that the run is started on."""
    from ray.cluster_utils import Cluster

    node = {"object_store_memory": 80 << 20, "include_dashboard": False}
    quickly = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}  # a dead node is noticed soon
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0, "_system_config": quickly})
    cluster.add_node(**node, num_cpus=1)
    cluster.add_node(**node, num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_on_one_or_two_nodes_it_is_the_local_run(
    workers: int, cluster: Any, digits: Dataset, local: Path, tmp_path: Path
) -> None:
    recipe, handlers = change(RECIPE, {"local.workers": workers}), {signal.getsignal(signal.SIGTERM)}

    def emit(event: dict[str, Any]) -> None:
        handlers.add(signal.getsignal(signal.SIGTERM))

    run(recipe, tmp_path / "run", data=digits, ray=cluster.address, emit=emit)
    assert len(handlers) == 1, "Ray leaves the command's own handler in place"
    check_equal(tmp_path / "run", local)
    environment = RunFolder(tmp_path / "run").read_json("environment.json", "")
    assert environment["ray"] == f"{workers} worker(s) on {workers} node(s), 1 CPU(s) each"


@pytest.mark.processes
@pytest.mark.release
def test_a_node_is_killed_while_clients_train(cluster: Any, digits: Dataset, tmp_path: Path) -> None:
    """The last test of the cluster: it has one node less afterwards."""
    recipe = change(RECIPE, {"local.workers": 2, "training.epochs": 80, "snapshots": 80})
    run(recipe, tmp_path / "local", data=digits)
    events: list[dict[str, Any]] = []

    def emit(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "epoch" and len(cluster.worker_nodes) == 2:
            first = re.findall(r"a worker is ready on .* \((\w+)\):", (tmp_path / "run" / "run.log").read_text())[0]
            (node,) = (node for node in cluster.worker_nodes if node.node_id == first)
            cluster.remove_node(node, allow_graceful=False)

    run(recipe, tmp_path / "run", data=digits, ray=cluster.address, emit=emit)
    check_equal(tmp_path / "run", tmp_path / "local")
    lost = [event["text"] for event in events if "is lost; another trains it again" in event.get("text", "")]
    assert len(lost) == 1
