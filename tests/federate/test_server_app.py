"""The server: the same result as a simulation, sites with images of their own, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import bad, good
from conftest import small_recipe
from federation import NOW, SHARES, deadline_when, log_of, own_sites, result, three
from inprocess import InProcess
from oneround.config.load import load
from oneround.data import Dataset, load_dataset
from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.federate.server_app import serve
from oneround.global_model import GlobalModel
from oneround.runs.folder import RunFolder
from oneround.runs.result import Result
from oneround.server.plan import plan_run
from oneround.simulate import run as simulate


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"upload__encoding": "int8"},
        {"upload__encoding": "fp16"},
        {"reveal__class_counts": False, "fusion": ["iffi", "average"]},
    ],
    ids=["plain", "int8", "fp16", "hidden"],
)
def test_the_same_uploads_and_scores_as_a_simulation(digits: Dataset, tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = three(**changes)
    simulate(recipe, tmp_path / "simulated", data=digits)
    serve(InProcess(SHARES), recipe, tmp_path / "carried", NOW)
    simulated, federated = result(tmp_path / "simulated"), result(tmp_path / "carried")
    for key in ("recipe_digest", "partition", "uploads", "rules", "clients", "remarks"):
        assert simulated[key] == federated[key], key
    assert Result.read(tmp_path / "carried").curves == Result.read(tmp_path / "simulated").curves
    sizes = {path.stem: path.stat().st_size for path in (tmp_path / "carried" / "uploads").iterdir()}
    assert {name: traffic["up"] for name, traffic in federated["traffic"].items()} == sizes


SMALL: dict[str, Any] = {"model.encoder": {"kind": "cnn", "width": 4}, "training.epochs": 1, "training.batch_size": 64}


FEW = {"sums.features": {"kind": "patches", "size": 96}}


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("v12", SMALL),
        ("bank", {**SMALL, "bank.teacher_epochs": 1}),
        ("ridge", FEW),
        ("routed", {**SMALL, **FEW}),
        ("fafi+distilled", {**SMALL, "fusion.0.epochs": 1}),
        ("split", {**SMALL, "label_noise": {"clients": 1, "share": 0.5}}),
    ],
)
def test_every_kind_of_method_comes_through_as_in_a_simulation(
    digits: Dataset, tmp_path: Path, preset: str, more: dict[str, Any]
) -> None:
    recipe = load(preset, {**more, "partition.clients": 3, "partition.alpha": 1.0, "local.workers": 1}.items())
    simulate(recipe, tmp_path / "simulated", data=digits)
    serve(InProcess(SHARES), recipe, tmp_path / "carried", NOW)
    simulated, federated = result(tmp_path / "simulated"), result(tmp_path / "carried")
    assert simulated["uploads"] == federated["uploads"] and simulated["rules"] == federated["rules"]


def test_what_only_a_simulation_can_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"alignment.schedule = consensus: .*only a simulation"):
        serve(InProcess(SHARES), three(alignment={"schedule": "consensus"}), tmp_path / "run", NOW)


def test_a_quorum_nobody_can_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"quorum = 4: must be ≤ 3, the number of sites"):
        serve(InProcess(SHARES), three(quorum=4), tmp_path / "run", NOW)


def test_sites_bring_their_own_images_and_classes_are_matched_by_name(digits: Dataset, tmp_path: Path) -> None:
    recipe, nodes = own_sites(digits, tmp_path)
    serve(InProcess(nodes), recipe, tmp_path / "run", NOW)
    found = result(tmp_path / "run")
    assert found["rules"]["typicality-gated"]["accuracy"] > 0.8, "matched by number it would be a third at most"
    assert list(found["uploads"]) == ["site-0", "site-1"]


def test_a_server_without_images_makes_the_model_all_the_same(digits: Dataset, tmp_path: Path) -> None:
    recipe, nodes = own_sites(digits, tmp_path)
    (tmp_path / "server" / "test.npz").unlink()
    serve(InProcess(nodes), recipe, tmp_path / "run", NOW)
    assert "no test images here to score it" in log_of(tmp_path / "run")
    assert (tmp_path / "run" / "model" / "manifest.json").exists() and result(tmp_path / "run")["rules"] == {}
    folder = str(tmp_path / "run")
    assert "no test images here; name some with --data-dir" in bad("evaluate", folder)
    assert (
        "typicality-gated"
        in good("report", folder, "--out", str(tmp_path / "page.html"), cwd=tmp_path)
        + (tmp_path / "page.html").read_text()
    )
    assert "left out: " not in good("diagnose", folder)
    assert "model written to" in good("fuse", folder, "--rule", "iffi", cwd=tmp_path)


def test_sites_that_bring_their_own_data_have_to_be_counted_by_the_recipe(digits: Dataset, tmp_path: Path) -> None:
    data = {"kind": "sites", "classes": list(digits.class_names), "size": 8, "grey": True}
    for changes in ({}, {"quorum": 2}):
        recipe = small_recipe(data=data, partition={"kind": "natural"}, **changes)
        with pytest.raises(RecipeError, match=r"so their number is unknown; set partition\.clients"):
            serve(InProcess({}), recipe, tmp_path / "run", NOW)
    counted = small_recipe(data=data, partition={"kind": "natural", "clients": 3})
    assert plan_run(counted, load_dataset(counted.data)).num_sites == 3


def test_the_server_writes_its_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadline_when(monkeypatch, lambda intake: True)
    recipe, outcome = three(deadline=1.0), tmp_path / "run" / "outcome.json"
    with pytest.raises(RunError, match="0 of 3 uploads") as caught:
        serve(InProcess({}), recipe, tmp_path / "run", NOW)
    assert json.loads(outcome.read_text()) == {"error": str(caught.value)}

    class Looking(InProcess):
        def get_nodes(self) -> Any:
            assert not outcome.exists(), "of an earlier start"
            return super().get_nodes()

    monkeypatch.undo()
    serve(Looking(SHARES), recipe, tmp_path / "run", NOW)
    assert json.loads(outcome.read_text()) == {"ok": True}


def test_a_folder_in_which_another_server_is_at_work_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oneround.federate.server_app.LOCK_TIMEOUT", 0.1)
    with RunFolder(tmp_path / "run").locked(), pytest.raises(RunError, match="another process is running here"):
        serve(InProcess(SHARES), three(), tmp_path / "run", NOW)
    assert "another process is running here" in json.loads((tmp_path / "run" / "outcome.json").read_text())["error"]


def test_a_model_that_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    serve(InProcess(SHARES), three(fusion=["average"]), run, NOW)
    before = (run / "model" / "manifest.json").read_bytes()
    model = GlobalModel.load(run / "model")
    next(model.parameters()).data.fill_(torch.nan)
    with pytest.raises(ProtocolError, match=r"the model of average is refused, .*values that are not finite"):
        model.save(run / "model")
    assert (run / "model" / "manifest.json").read_bytes() == before
    GlobalModel.load(run / "model")
