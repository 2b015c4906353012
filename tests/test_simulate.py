"""Whole runs: in one process and several, stopped and killed and resumed, with clients that have nothing."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
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

from conftest import labelled, small_recipe
from oneround import simulate
from oneround.crew import Listener, crew_size
from oneround.data import Dataset, dataset_from_arrays
from oneround.diagnose import diagnose
from oneround.errors import OutOfTime, RecipeError, RunError
from oneround.folder import RunFolder
from oneround.learning.schedules import spread
from oneround.observe.log import MetricsLog
from oneround.protocol import Broadcast, GlobalModel, Upload
from oneround.reading import change, load
from oneround.recipe import Local, Recipe
from oneround.runs import Plan
from oneround.simulate import run


def final(folder: Path) -> dict[str, object]:
    """Everything a finished run says it found: scores, confusion, hashes of what was learned."""
    return json.loads((folder / "result.json").read_text())


def timeless(folder: Path) -> list[dict[str, object]]:
    events = [
        {key: value for key, value in event.items() if key not in ("seconds", "elapsed")}
        for event in MetricsLog(folder / "metrics.jsonl")
    ]
    return sorted(events, key=lambda event: json.dumps(event, sort_keys=True))


def test_a_run_leaves_everything_behind(digits: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = small_recipe(training__epochs=3, snapshots=2, local__workers=1)
    result = run(recipe, folder, data=digits)
    names = {path.name for path in folder.iterdir()}
    assert {
        "recipe.yaml", "environment.json", "partition.json", "partition.png", "accuracy.png", "metrics.jsonl", "run.log",
        "broadcast.safetensors", "uploads", "model", "result.json",
    } <= names  # fmt: skip
    assert "clients" not in names
    assert result.rules.keys() == {part.kind for part in recipe.fusion}
    assert all(curve.keys() == {2, 3} for curve in result.curves.values())
    epochs = [event for event in MetricsLog(folder / "metrics.jsonl") if event["event"] == "epoch"]
    assert len(epochs) == 5 * 3 and {"loss", "cross-entropy", "gradient_norm", "learning_rate"} <= epochs[0].keys()
    model = GlobalModel.load(folder / "model")
    score = (model.predict(digits.test.pixels).argmax(1) == digits.test.labels).float().mean()
    assert abs(float(score) - result.rules["iffi"]) < 1e-6
    assert (folder / "partition.png").stat().st_size > 5000


@pytest.mark.parametrize("public", [0.0, 0.2])
def test_the_snapshot_is_chosen_on_data_held_back(public: float, digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(training__epochs=3, snapshots=1, local__workers=1, validation=0.3, public=public)
    result = run(recipe, tmp_path, data=digits)
    plan = Plan.of(recipe, digits)
    held = digits.train.take(plan.split.validation)
    answered = GlobalModel.load(tmp_path / "model").predict(held.pixels).argmax(1)
    assert result.validation["iffi"][3] == pytest.approx(float((answered == held.labels).float().mean()))
    assert diagnose(tmp_path).run.validation == result.validation
    curve = result.validation["iffi"]
    assert result.chosen["iffi"] == min(epoch for epoch, value in curve.items() if value == max(curve.values()))
    told = json.loads((tmp_path / "partition.json").read_text())
    assert told["validation_samples"] == len(held) > 0
    assert sum(told["sizes"]) + told["public_samples"] + len(held) == len(digits.train)
    assert any("an exchange more" in remark for remark in result.remarks) == (public == 0)


def test_the_saved_recipe_runs_again_with_the_same_result(digits: Dataset, tmp_path: Path) -> None:
    run(small_recipe(local__workers=1), tmp_path / "a", data=digits)
    run(load(tmp_path / "a" / "recipe.yaml"), tmp_path / "b")
    assert final(tmp_path / "a") == final(tmp_path / "b")
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")


def test_how_many_clients_run_at_once_does_not_matter(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(training__epochs=2, snapshots=1)
    for workers in (1, 2):
        run(change(recipe, {"local.workers": workers}), tmp_path / str(workers), data=digits)
    assert final(tmp_path / "1") == final(tmp_path / "2")
    assert timeless(tmp_path / "1") == timeless(tmp_path / "2")


def test_a_snapshot_is_what_a_shorter_run_would_have_uploaded(digits: Dataset, tmp_path: Path) -> None:
    long = run(small_recipe(training__epochs=4, snapshots=2, local__workers=1), tmp_path / "long", data=digits)
    short = run(small_recipe(training__epochs=2, local__workers=1), tmp_path / "short", data=digits)
    assert {name: curve[2] for name, curve in long.curves.items()} == short.rules


def test_an_empty_client_is_left_out_and_said(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(partition__alpha=1e-6, partition__clients=12, local__workers=1)
    result = run(recipe, tmp_path / "run", data=digits)
    told = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert told["empty"] and len(result.clients) == 12 - len(told["empty"])
    assert "no samples" in result.remarks[0]
    assert "no samples" in (tmp_path / "run" / "run.log").read_text()


def test_shared_data_is_said(digits: Dataset, tmp_path: Path) -> None:
    result = run(small_recipe(partition={"kind": "dirichlet-overlap"}, local__workers=1), tmp_path / "run", data=digits)
    assert "SHARE" in result.remarks[0]
    assert "SHARE" in (tmp_path / "run" / "run.log").read_text()


def test_arrays_from_python(tmp_path: Path) -> None:
    random_state = np.random.RandomState(0)
    x, y = random_state.randint(0, 256, (60, 12, 12, 3)).astype(np.uint8), random_state.randint(0, 3, 60)
    data = dataset_from_arrays("mine", x[:50], y[:50], x[50:], y[50:], class_names=("a", "b", "c"))
    result = run(small_recipe(data="arrays", partition__clients=2, local__workers=2), tmp_path / "run", data=data)
    assert len(result.clients) == 2


def test_defaults_follow_the_data(digits: Dataset, tmp_path: Path) -> None:
    x, y = np.zeros((20, 32, 32, 3), np.uint8), np.arange(20) % 2
    colour = dataset_from_arrays("mine", x, y, x, y)
    plans = [Plan.of(load("fafi"), data) for data in (digits, colour)]
    assert [plan.recipe.model.encoder.kind for plan in plans] == ["cnn", "resnet18"]
    assert [plan.recipe.training.augment.flip for plan in plans] == [0.0, 0.5]


def test_the_size_of_a_run_is_known_before_it_starts(digits: Dataset) -> None:
    plan = Plan.of(small_recipe(training__epochs=3), digits)
    text = "\n".join(plan.lines())
    for word in (
        "1,442 training",
        "355 test",
        "5 clients",
        "437",
        "parameters",
        f"{plan.steps:,} steps",
        "down",
        "up",
        "alpha=0.05",
    ):
        assert word in text, text
    assert plan.steps == 3 * (7 + 7 + 3 + 5 + 4)
    sent = plan.prepare()
    assert plan.traffic.down == sent.size < plan.traffic.up
    assert plan.traffic.parameters == sum(tensor.numel() for tensor in sent.weights.values())


# --- one folder, one run ---------------------------------------------------------------------------------------------


def test_a_folder_is_not_overwritten_and_not_mixed(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(local__workers=1)
    run(recipe, tmp_path / "run", data=digits)
    before = final(tmp_path / "run")
    with pytest.raises(RecipeError, match="there is a run here already; go on with --resume"):
        run(recipe, tmp_path / "run", data=digits)
    with pytest.raises(RecipeError, match="was begun with another recipe"):
        run(change(recipe, {"training.epochs": 2}), tmp_path / "run", data=digits, resume=True)
    assert run(recipe, tmp_path / "run", data=digits, resume=True).rules == {
        k: v["accuracy"] for k, v in before["rules"].items()
    }
    mixed = digits.train.take(torch.arange(len(digits.train)).flip(0))
    other = replace(digits, train=mixed)
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(RecipeError, match="other data or another partition"):
        run(recipe, tmp_path / "run", data=other, resume=True)


def test_two_processes_do_not_share_a_folder(digits: Dataset, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").locked(), pytest.raises(RunError, match="another process is running here"):
        run(small_recipe(), tmp_path / "run", data=digits)


# --- killed at any moment --------------------------------------------------------------------------------------------

FUSION = ["iffi", {"kind": "split", "chosen": "each"}, "dynamic-prototypes", "aligned-iffi", "feature-vote"]
COMMAND = [
    sys.executable, "-m", "oneround.cli", "run", "fafi+queue", "--model", "cnn", "--epochs", "10", "--seed", "3",
    "--set", "model.encoder.width=8", "--set", "training.batch_size=64", "--set", "snapshots=3", "--set", "local.checkpoint_seconds=0",
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


def test_killed_three_times_and_resumed_it_ends_with_the_same_numbers(tmp_path: Path) -> None:
    calm = start(tmp_path / "calm")
    output, _ = calm.communicate(timeout=240)
    assert calm.returncode == 0, output

    seed = random.randrange(10**6)
    moments = random.Random(seed)
    folder, kills = tmp_path / "killed", 0
    while kills < 3:
        begun = time.time()
        process = start(folder, *(["--resume"] if (folder / "recipe.yaml").exists() else []))
        # Wait until it is at work, then kill it at a random moment of the work that is left.
        deadline = time.monotonic() + 60
        while not at_work(folder, begun) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.5))
        workers = [*children(process.pid), *workers_of(process.pid)]
        if process.poll() is not None:  # it was faster than the kill: begin again
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            kills = 0
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        patience = time.monotonic() + 20
        while any(alive(pid) for pid in workers) and time.monotonic() < patience:
            time.sleep(0.05)
        assert not any(alive(pid) for pid in workers), "workers outlived their parent"
        assert not (folder / "result.json").exists()
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


def test_a_worker_that_dies_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
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


def speak(events: Any, torn: bool) -> None:
    """In a process of its own: say three things, and perhaps die in the middle of the next."""
    for number in range(3):
        events.put({"event": "steps", "done": number})
    if torn:
        events._wlock.acquire()
        os.write(events._writer.fileno(), b"\0\0\1\0 half a message")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("torn", [False, True])
def test_a_worker_that_dies_while_it_speaks_holds_nobody_up(torn: bool) -> None:
    """What it leaves behind is a locked queue and half a message."""
    heard: list[dict[str, Any]] = []
    processes = multiprocessing.get_context("fork")
    listener = Listener(processes, heard.append)
    worker = processes.Process(target=speak, args=(listener.events, torn))
    worker.start()
    worker.join()
    ending = threading.Thread(target=listener.close, daemon=True)
    ending.start()
    ending.join(timeout=60)
    assert not ending.is_alive() and not listener._thread.is_alive()
    assert [event["done"] for event in heard] == [0, 1, 2]


def test_a_failing_client_names_itself(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(training__learning_rate=1e30, training__clip_norm=0.0, training__epochs=6, local__workers=2)
    with pytest.raises(RunError, match=r"client_00\d, epoch 1: the loss or its gradient is not finite"):
        run(recipe, tmp_path / "run", data=digits)


@pytest.mark.parametrize("lost", ["model", "uploads"])
def test_what_went_missing_of_a_finished_run_is_made_again(digits: Dataset, tmp_path: Path, lost: str) -> None:
    recipe = small_recipe(training__epochs=2, snapshots=1, local__workers=1)
    run(recipe, tmp_path, data=digits)
    before = {name: (tmp_path / name).read_bytes() for name in ("result.json", "metrics.jsonl")}
    shutil.rmtree(tmp_path / lost)
    run(recipe, tmp_path, data=digits, resume=True)
    assert (tmp_path / "model" / "manifest.json").is_file() and list((tmp_path / "uploads").iterdir())
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert "finished, but" in (tmp_path / "run.log").read_text()


def test_a_torn_log_is_mended(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(training__epochs=2, snapshots=1, local__workers=1)
    run(recipe, tmp_path / "whole", data=digits)
    run(recipe, tmp_path / "torn", data=digits)
    log = tmp_path / "torn" / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-1]) + lines[-1][:20])
    (tmp_path / "torn" / "result.json").unlink()
    run(recipe, tmp_path / "torn", data=digits, resume=True)
    assert timeless(tmp_path / "torn") == timeless(tmp_path / "whole")
    assert final(tmp_path / "torn") == final(tmp_path / "whole")


# --- damaged on disk -------------------------------------------------------------------------------------------------


def spoil(path: Path) -> None:
    """Change the last byte, as a disk would: the size and the header stay as they were."""
    raw = path.read_bytes()
    path.write_bytes(bytes([*raw[:-1], raw[-1] ^ 1]))


class Stopped(Exception):
    pass


def stop_after(recipe: Recipe, folder: Path, data: Dataset, epoch: int) -> None:
    """Run until the snapshot of an epoch, then stop as if killed."""

    def emit(event: dict[str, object]) -> None:
        if event["event"] == "snapshot" and event["epoch"] == epoch:
            raise Stopped

    with pytest.raises(Stopped):
        run(recipe, folder, data=data, emit=emit)


CONSENSUS = {"schedule": "consensus", "weight": {"kind": "fixed", "value": 50.0}}


def agreeing(patch: pytest.MonkeyPatch) -> None:
    """The spread of the clients falls, as if they came to agree."""
    patch.setattr(simulate, "spread", lambda prototypes: 1 / spread(prototypes))


@pytest.fixture(scope="module", params=[None, CONSENSUS], ids=["alone", "consensus"])
def calm(
    request: pytest.FixtureRequest, digits: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recipe, Path]:
    """A recipe and its run from beginning to end."""
    small = {"training__epochs": 4, "snapshots": 2, "partition__clients": 3, "local__workers": 1}
    recipe, folder = small_recipe(**small, alignment=request.param), tmp_path_factory.mktemp("calm") / "run"
    with pytest.MonkeyPatch.context() as patch:
        agreeing(patch)
        run(recipe, folder, data=digits)
    return recipe, folder


@pytest.mark.parametrize("what", [["uploads"], ["clients"], ["uploads", "clients"], ["broadcast"]], ids="+".join)
def test_what_is_damaged_is_made_again(
    calm: tuple[Recipe, Path], digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: list[str]
) -> None:
    """With a schedule that looks at the others, too: a client that begins anew hears what it heard the first time."""
    agreeing(monkeypatch)
    recipe, undisturbed = calm
    folder = tmp_path / "run"
    stop_after(recipe, folder, digits, 2)
    sent = (folder / "broadcast.safetensors").read_bytes()
    for name in what:
        damaged = sorted((folder / name).rglob("*.safetensors"))[:1] or [folder / "broadcast.safetensors"]
        spoil(damaged[0])
    run(recipe, folder, data=digits, resume=True)
    assert (folder / "broadcast.safetensors").read_bytes() == sent
    assert final(folder) == final(undisturbed)
    assert timeless(folder) == timeless(undisturbed)
    told = (folder / "run.log").read_text()
    assert ("prepared again" if what == ["broadcast"] else "damaged; discarded, client_000 trains again") in told


@pytest.mark.parametrize("alignment", [None, CONSENSUS], ids=["alone", "consensus"])
def test_out_of_time_it_stops_between_any_two_epochs_and_goes_on_to_the_same_end(
    digits: Dataset, tmp_path: Path, alignment: dict[str, object] | None
) -> None:
    """With a snapshot after every epoch no client is ever in the middle of its work."""
    recipe = small_recipe(training__epochs=2, snapshots=1, partition__clients=2, local__workers=1, alignment=alignment)
    run(recipe, tmp_path / "calm", data=digits)
    trained: list[int] = []
    while not (tmp_path / "run" / "result.json").exists():
        told: list[dict[str, object]] = []
        with contextlib.suppress(OutOfTime):
            run(recipe, tmp_path / "run", data=digits, resume=True, emit=told.append, deadline=time.time())
        trained.append(sum(event["event"] == "epoch" for event in told))
    assert trained == [1] * 4
    assert final(tmp_path / "run") == final(tmp_path / "calm")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "calm")


def test_a_damaged_upload_at_the_end_is_trained_again(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(training__epochs=2, partition__clients=3, local__workers=1)
    run(recipe, tmp_path / "run", data=digits)
    before = final(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    spoil(tmp_path / "run" / "uploads" / "client_001.safetensors")
    run(recipe, tmp_path / "run", data=digits, resume=True)
    assert final(tmp_path / "run") == before


def test_a_broadcast_that_comes_out_otherwise_ends_the_run(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(training__epochs=2, snapshots=1, local__workers=1)
    stop_after(recipe, tmp_path / "run", digits, 1)
    path = tmp_path / "run" / "broadcast.safetensors"
    spoil(path)
    damaged, prepare = path.read_bytes(), Plan.prepare

    def otherwise(self: Plan, *given: object) -> Broadcast:
        made = prepare(self)
        return replace(made, weights={name: value + 1 for name, value in made.weights.items()})

    monkeypatch.setattr(Plan, "prepare", otherwise)
    with pytest.raises(
        RunError, match=r"broadcast\.safetensors: damaged, and prepared again it differs .* another --out"
    ):
        run(recipe, tmp_path / "run", data=digits, resume=True)
    assert path.read_bytes() == damaged


def test_damaged_json_is_named_with_what_to_do_and_that_helps(digits: Dataset, tmp_path: Path) -> None:
    recipe, folder = small_recipe(partition__clients=3, local__workers=1), tmp_path / "run"
    run(recipe, folder, data=digits)
    before = final(folder)
    for text in ('{"rules": ', "[]", "{}"):
        (folder / "result.json").write_text(text)
        with pytest.raises(RunError, match=r"result\.json: damaged \(.*\); remove it and .* --resume$"):
            run(recipe, folder, data=digits, resume=True)
    (folder / "result.json").unlink()
    for text in ("", '{"data": 1}'):
        (folder / "partition.json").write_text(text)
        with pytest.raises(RunError, match=r"partition\.json: damaged \(.*\); remove it and .* --resume$"):
            run(recipe, folder, data=digits, resume=True)
    (folder / "partition.json").unlink()
    run(recipe, folder, data=digits, resume=True)
    assert final(folder) == before
    (folder / "consensus.json").write_text("{")
    with pytest.raises(RunError, match=r"consensus\.json: damaged \(.*\); begin anew"):
        RunFolder(folder).read_spreads()


def test_a_run_in_which_nobody_has_data_is_refused_before_it_begins(tmp_path: Path) -> None:
    """This partition deals shares of ten times class 0, of which there is nothing."""
    data = labelled([1] * 20, classes=2)
    recipe = small_recipe(data="arrays", partition={"kind": "dirichlet-overlap"})
    with pytest.raises(RecipeError, match=r"partition = dirichlet-overlap.*: every client is left with no samples"):
        run(recipe, tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


# --- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from pathlib import Path
from typing import Any
from oneround.data import load_dataset
from oneround.reading import load
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


def test_memory_does_not_grow_with_the_number_of_clients(tmp_path: Path) -> None:
    """Twelve more clients may cost less than a tenth of twelve networks (the full size is in benchmarks/memory.py)."""
    peaks = {}
    for clients in (3, 15):
        told = subprocess.run(
            [sys.executable, "-c", MEASURE, str(clients), str(tmp_path / str(clients))],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks[clients] = int(told.stdout.split()[-1])
    network = sum(
        t.numel() * t.element_size() for t in Broadcast.read(tmp_path / "3" / "broadcast.safetensors").weights.values()
    )
    assert network > 44e6
    assert len(list((tmp_path / "15" / "uploads").iterdir())) == 15
    assert peaks[15] - peaks[3] < 0.1 * 12 * network, {k: f"{v / 1e6:.0f} MB" for k, v in peaks.items()}


def test_how_many_at_once() -> None:
    cores = os.cpu_count() or 1
    assert crew_size(Local(device="cpu"), parameters=100_000, clients=50) == min(50, cores)
    assert crew_size(Local(device="cpu"), parameters=11_000_000, clients=50) == 1
    assert crew_size(Local(device="cpu", workers=3), parameters=100_000, clients=50) == 3
    assert crew_size(Local(device="cpu", workers=3), parameters=100_000, clients=2) == 2


def test_uploads_of_a_run_can_be_read_one_by_one(digits: Dataset, tmp_path: Path) -> None:
    run(small_recipe(local__workers=1), tmp_path / "run", data=digits)
    uploads = RunFolder(tmp_path / "run").uploads()
    assert [type(upload) for upload in uploads] == [Upload] * 5
    assert final(tmp_path / "run")["uploads"] == {upload.client: upload.content for upload in uploads}
    assert torch.isfinite(uploads[0].weights["prototypes"]).all()
