"""Whole runs in one process: what they leave behind, stopped, damaged and resumed, with clients that have nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oneround
from conftest import labelled, small_recipe
from federation import NOW
from inprocess import InProcess
from oneround.analysis.diagnosis.diagnose import diagnose
from oneround.config.load import change, load
from oneround.config.recipe import Recipe
from oneround.data import Dataset, dataset_from_arrays
from oneround.errors import OutOfTime, ProtocolError, RecipeError, RunError
from oneround.federate.server_app import serve
from oneround.fusion import ridge
from oneround.global_model import GlobalModel
from oneround.protocol import Broadcast, Upload, messages
from oneround.protocol.encoding import bytes_of, layout_of
from oneround.runs.folder import RunFolder
from oneround.runs.log import MetricsLog
from oneround.server.plan import DealtPlan
from oneround.simulate import run, simulation
from oneround.training.alignment.schedules import spread
from run_files import final, timeless


@pytest.mark.slow
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


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files and folders that were flushed, in order."""
    paths, fsync = list[Path](), os.fsync

    def noted(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", noted)
    return paths


def test_an_upload_whose_callback_comes_late_is_on_disk_too(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: list[Path]
) -> None:
    """A future is done, and waited for no longer, before its callbacks are called."""
    monkeypatch.setattr(Future, "add_done_callback", lambda self, callback: None)
    run(small_recipe(training__epochs=1, partition__kind="iid", local__workers=1), tmp_path, data=digits)
    uploads = sorted((tmp_path / "uploads").iterdir())
    assert len(uploads) == 5 and sorted(path for path in flushed if path.parent.name == "uploads") == uploads


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_uploads_are_on_disk_before_the_run_says_that_it_is_finished(
    workers: int, batched: bool, digits: Dataset, tmp_path: Path, flushed: list[Path]
) -> None:
    """Those of earlier snapshots are not flushed: training makes them again."""
    changes = {"local__workers": workers, "local__batched": batched}
    recipe = small_recipe(training__epochs=2, snapshots=1, partition__kind="iid", **changes)
    run(recipe, tmp_path, data=digits)
    uploads = sorted((tmp_path / "uploads").iterdir())
    assert len(uploads) == 5 and sorted(path for path in flushed if path.parent.name == "uploads") == uploads
    assert flushed.index(tmp_path / "uploads") < max(
        at for at, path in enumerate(flushed) if "result.json" in path.name
    )


@pytest.mark.slow
def test_an_upload_is_read_once_to_score_it_and_once_to_fuse_it(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = Upload.read

    def noted(path: Path, *rest: Any) -> Upload:
        reads.append(Path(path).stem)
        return read(path, *rest)

    monkeypatch.setattr(Upload, "read", staticmethod(noted))
    result = run(small_recipe(fusion=["average"], local__workers=1), tmp_path, data=digits)
    assert result.personalised and sorted(reads) == sorted(2 * list(result.clients))


@pytest.mark.slow
@pytest.mark.parametrize("public", [0.0, 0.2])
def test_the_snapshot_is_chosen_on_data_held_back(public: float, digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(training__epochs=3, snapshots=1, local__workers=1, validation=0.3, public=public)
    result = run(recipe, tmp_path, data=digits)
    plan = DealtPlan.of(recipe, digits)
    validation = digits.train.take(plan.split.validation)
    curve = result.validation["iffi"]
    best = min(epoch for epoch, value in curve.items() if value == max(curve.values()))
    assert result.chosen["iffi"] == best != 3, "the model that is best on validation images is not the last one"
    answered = GlobalModel.load(tmp_path / "model").predict(validation.pixels).argmax(1)
    assert curve[best] == pytest.approx(float((answered == validation.labels).float().mean()))
    assert curve[best] > curve[3] and json.loads((tmp_path / "result.json").read_text())["model"]["epoch"] == best
    assert diagnose(tmp_path).run.validation == result.validation
    partition = json.loads((tmp_path / "partition.json").read_text())
    assert partition["validation_samples"] == len(validation) > 0
    assert sum(partition["sizes"]) + partition["public_samples"] + len(validation) == len(digits.train)
    assert any("an exchange more" in remark for remark in result.remarks) == (public == 0)


@pytest.mark.slow
def test_the_saved_recipe_runs_again_with_the_same_result(digits: Dataset, tmp_path: Path) -> None:
    run(small_recipe(local__workers=1), tmp_path / "a", data=digits)
    run(load(tmp_path / "a" / "recipe.yaml"), tmp_path / "b")
    assert final(tmp_path / "a") == final(tmp_path / "b")
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")


@pytest.mark.slow
def test_a_snapshot_is_what_a_shorter_run_would_have_uploaded(digits: Dataset, tmp_path: Path) -> None:
    long = run(small_recipe(training__epochs=4, snapshots=2, local__workers=1), tmp_path / "long", data=digits)
    short = run(small_recipe(training__epochs=2, local__workers=1), tmp_path / "short", data=digits)
    assert {name: curve[2] for name, curve in long.curves.items()} == short.rules


@pytest.mark.slow
def test_an_empty_client_is_left_out_and_said(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(partition__alpha=1e-6, partition__clients=12, local__workers=1)
    result = run(recipe, tmp_path / "run", data=digits)
    partition = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert partition["empty"] and len(result.clients) == 12 - len(partition["empty"])
    assert "no samples" in result.remarks[0]
    assert "no samples" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.slow
def test_shared_data_is_reported(digits: Dataset, tmp_path: Path) -> None:
    result = run(small_recipe(partition={"kind": "dirichlet-overlap"}, local__workers=1), tmp_path / "run", data=digits)
    assert "SHARE" in result.remarks[0]
    assert "SHARE" in (tmp_path / "run" / "run.log").read_text()


def test_defaults_follow_the_data(digits: Dataset, tmp_path: Path) -> None:
    x, y = np.zeros((20, 32, 32, 3), np.uint8), np.arange(20) % 2
    colour = dataset_from_arrays("mine", x, y, x, y)
    plans = [DealtPlan.of(load("fafi"), data) for data in (digits, colour)]
    assert [plan.recipe.model.encoder.kind for plan in plans] == ["cnn", "resnet18"]
    assert [plan.recipe.training.augment.flip for plan in plans] == [0.0, 0.5]


def test_the_size_of_a_run_is_known_before_it_starts(digits: Dataset) -> None:
    plan = DealtPlan.of(small_recipe(training__epochs=3), digits)
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
    assert plan.traffic.down == bytes_of(layout_of(sent.weights | sent.extras)) < plan.traffic.up
    assert plan.traffic.parameters == sum(tensor.numel() for tensor in sent.weights.values())


@pytest.mark.slow
def test_a_folder_is_not_overwritten_and_not_mixed(digits: Dataset, tmp_path: Path) -> None:
    recipe = small_recipe(local__workers=1)
    run(recipe, tmp_path / "run", data=digits)
    before = final(tmp_path / "run")
    with pytest.raises(RecipeError, match="there is a run here already; continue with --resume"):
        run(recipe, tmp_path / "run", data=digits)
    with pytest.raises(RecipeError, match="was started with another recipe"):
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    patch.setattr(simulation, "spread", lambda prototypes: 1 / spread(prototypes))


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


@pytest.mark.slow
@pytest.mark.parametrize("what", [["uploads"], ["clients"], ["uploads", "clients"], ["broadcast"]], ids="+".join)
def test_what_is_damaged_is_made_again(
    calm: tuple[Recipe, Path], digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: list[str]
) -> None:
    """With a schedule that looks at the others, too: a client that starts over hears what it heard the first time."""
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
    log = (folder / "run.log").read_text()
    assert ("prepared again" if what == ["broadcast"] else "damaged; discarded, client_000 trains again") in log


@pytest.mark.slow
@pytest.mark.parametrize("alignment", [None, CONSENSUS], ids=["alone", "consensus"])
def test_out_of_time_it_stops_between_any_two_epochs_and_goes_on_to_the_same_end(
    digits: Dataset, tmp_path: Path, alignment: dict[str, object] | None
) -> None:
    """With a snapshot after every epoch no client is ever in the middle of its work."""
    recipe = small_recipe(training__epochs=2, snapshots=1, partition__clients=2, local__workers=1, alignment=alignment)
    run(recipe, tmp_path / "calm", data=digits)
    trained: list[int] = []
    while not (tmp_path / "run" / "result.json").exists():
        events: list[dict[str, object]] = []
        with contextlib.suppress(OutOfTime):
            run(recipe, tmp_path / "run", data=digits, resume=True, emit=events.append, deadline=time.time())
        trained.append(sum(event["event"] == "epoch" for event in events))
    assert trained == [1] * 4
    assert final(tmp_path / "run") == final(tmp_path / "calm")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "calm")


@pytest.mark.slow
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
    damaged, prepare = path.read_bytes(), DealtPlan.prepare

    def otherwise(self: DealtPlan, *given: object) -> Broadcast:
        made = prepare(self)
        return replace(made, weights={name: value + 1 for name, value in made.weights.items()})

    monkeypatch.setattr(DealtPlan, "prepare", otherwise)
    with pytest.raises(RunError, match=r"broadcast\.safetensors: damaged, and a new one differs .* another --out"):
        run(recipe, tmp_path / "run", data=digits, resume=True)
    assert path.read_bytes() == damaged


@pytest.mark.slow
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
    with pytest.raises(RunError, match=r"consensus\.json: damaged \(.*\); start over"):
        RunFolder(folder).read_spreads()


def test_a_run_in_which_nobody_has_data_is_refused_before_it_begins(tmp_path: Path) -> None:
    """This partition deals shares of ten times class 0, of which there is nothing."""
    data = labelled([1] * 20, classes=2)
    recipe = small_recipe(data="arrays", partition={"kind": "dirichlet-overlap"})
    with pytest.raises(RecipeError, match=r"partition = dirichlet-overlap.*: every client is left with no samples"):
        run(recipe, tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


def test_uploads_of_a_run_can_be_read_one_by_one(digits: Dataset, tmp_path: Path) -> None:
    run(small_recipe(local__workers=1), tmp_path / "run", data=digits)
    uploads = RunFolder(tmp_path / "run").uploads()
    assert [type(upload) for upload in uploads] == [Upload] * 5
    assert final(tmp_path / "run")["uploads"] == {upload.client: upload.content for upload in uploads}
    assert torch.isfinite(uploads[0].weights["prototypes"]).all()


def test_a_safeguard_that_stops_a_client_on_a_snapshot_epoch_ends_the_run(digits: Dataset, tmp_path: Path) -> None:
    """Every epoch is a snapshot: the stopped client's upload is of the epoch that was asked for, and the run ends all the same."""
    recipe = small_recipe(
        "etf-decoupled", alignment__weight={"kind": "fixed", "value": 50.0}, safeguards={"on_explosion": "stop", "largest_weight": 20.0},
        snapshots=1, training__epochs=3, partition__clients=3, local__workers=1,
    )  # fmt: skip
    folder, epochs = tmp_path / "run", set()

    def emit(event: dict[str, object]) -> None:
        if event["event"] == "epoch":
            epochs.add(event["epoch"])

    with pytest.raises(RunError, match=r"client_00\d, epoch 1.*λ is out of range") as caught:
        oneround.run(recipe, folder, data=digits, emit=emit)
    assert f"every client's upload so far is in {folder}/uploads" in str(caught.value)
    assert f"oneround fuse {folder}" in str(caught.value)
    assert epochs == {1}, "nobody trains on"
    assert [upload.epoch for upload in RunFolder(folder).uploads()] == [1, 1, 1]
    assert not (folder / "result.json").exists()
    with pytest.raises(RunError, match="out of range"):
        oneround.run(recipe, folder, data=digits, emit=emit, resume=True)
    assert epochs == {1}, "nor when it is resumed"


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["simulation", "federation"])
def test_a_recipe_refused_while_the_broadcast_is_prepared_leaves_nothing_behind(
    begun: str, digits: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"no weights")
    recipe = small_recipe(local__initial_weights=str(tmp_path / "weights.safetensors"), local__workers=1)
    with pytest.raises(ProtocolError, match=r"local\.initial_weights = .*not a readable safetensors file"):
        if begun == "simulation":
            run(recipe, tmp_path / "run", data=digits)
        else:
            serve(InProcess({}), recipe, tmp_path / "run", NOW)
    left = {path.name for path in (tmp_path / "run").glob("*")}
    assert not left & {"recipe.yaml", "partition.json", "environment.json", "broadcast.safetensors"}, left
    assert begun == "federation" or not (tmp_path / "run").exists()
    corrected = change(recipe, {"local.initial_weights": None})
    assert run(corrected, tmp_path / "run", data=digits).rules, "corrected, it runs in the same folder"


def test_what_does_not_change_between_snapshots_is_computed_once(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every snapshot's uploads carry the same sums: they are checked once a client, and solved once for all rules."""
    calls: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (calls.update([name]), function(*args))[1])

    counted(ridge, "solve")
    counted(messages, "check_sums")
    recipe = small_recipe("routed", training__epochs=3, snapshots=1, local__workers=1, partition__clients=3)
    result = run(recipe, tmp_path / "run", data=digits)
    assert len(result.curves["ridge"]) == 3
    assert calls == {"solve": 1, "check_sums": 3}
