"""Runs that train nothing: the simulator and every command take them as they take others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from oneround import acts, sums
from oneround.cli.options import app
from oneround.compare import compare
from oneround.data import Dataset
from oneround.describe import describe
from oneround.diagnose import diagnose
from oneround.errors import RecipeError
from oneround.evaluate import score_model
from oneround.finished import find_runs
from oneround.layouts import rounds_sheet
from oneround.protocol import GlobalModel, Upload
from oneround.reading import load
from oneround.report import report
from oneround.runs import Plan, Result
from oneround.simulate import run
from oneround.site import Site

SMALL = [("sums.features", {"kind": "patches", "size": 96, "patch": 4}), ("local.workers", 1), ("partition.clients", 4)]


@pytest.fixture(scope="module")
def folder(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ridge") / "run"
    run(load("ridge", [*SMALL, ("partition.alpha", 0.05)]), place, data=digits)
    return place


def oneround(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_the_answer_does_not_depend_on_the_partition(folder: Path, digits: Dataset, tmp_path: Path) -> None:
    even = run(load("ridge", [*SMALL, ("partition.kind", "iid")]), tmp_path / "iid", data=digits)
    skewed = Result.read(folder)
    assert skewed.rules == even.rules and skewed.rules["ridge"] > 0.9
    assert max(skewed.clients.values()) < 0.75 < min(even.clients.values())
    assert skewed.curves == {"ridge": {1: skewed.rules["ridge"]}}


def test_a_rank_that_saves_nothing_is_remarked(digits: Dataset) -> None:
    def told(rank: int) -> str:
        return " ".join(Plan.of(load("ridge", [*SMALL, ("sums.rank", rank)]), digits).remarks())

    assert "rank" not in told(20)
    assert "sums.rank = 100000 makes uploads no smaller: 42 kB, where all second moments are 23 kB" in told(100000)
    assert "rank = 60 makes" in told(60)


def test_sums_that_no_memory_holds_are_refused_at_once(digits: Dataset) -> None:
    with pytest.raises(RecipeError, match=r"size = 8000000000: adding and solving take 1\.54e\+12 GB of memory"):
        Plan.of(load("ridge", [("sums.features.size", 8_000_000_000)]), digits)
    with pytest.raises(RecipeError, match=r"take \d+000 or less"):
        sums.check_room(10**7)


def test_masks_on_a_natural_partition_wait_for_the_data(digits: Dataset) -> None:
    masked = [*SMALL[:2], ("sums.secure", True), ("reveal.class_counts", False), ("partition", {"kind": "natural"})]
    with pytest.raises(RecipeError, match=r"quorum = 2: with sums\.secure masks cancel only in the sum of all clients"):
        load("ridge", [*masked, ("quorum", 2)])
    groups = torch.arange(len(digits.train)) % 3
    assert len(Plan.of(load("ridge", masked), replace(digits, groups=groups)).clients) == 3
    with pytest.raises(RecipeError, match="only one client"):
        Plan.of(load("ridge", masked), replace(digits, groups=0 * groups))


def test_a_run_without_a_network_says_so(digits: Dataset, folder: Path) -> None:
    plan = Plan.of(load("ridge", [*SMALL, ("partition.alpha", 0.05), ("training.epochs", 50)]), digits)
    assert plan.recipe.training.epochs == 1 and plan.stops == [1] and plan.steps == len(plan.clients)
    (told,) = [line for line in plan.lines() if "sums of" in line]
    assert told.strip() == "sums of 96 fixed features (patches size=96 patch=4), one pass, nothing is trained"
    uploads = [Upload.read(path, plan.prepare(), {}) for path in sorted((folder / "uploads").glob("*"))]
    assert all(not upload.weights and upload.size == plan.traffic.up for upload in uploads)


def test_the_model_is_saved_whole_and_exported(folder: Path, digits: Dataset, tmp_path: Path) -> None:
    model = GlobalModel.load(folder / "model")
    assert score_model(model, digits.test, torch.device("cpu")).accuracy == Result.read(folder).rules["ridge"]
    assert model.to_onnx(tmp_path / "ridge.onnx") < 1e-3
    code, told = oneround("evaluate", str(folder), "--json")
    assert code == 0 and json.loads(told)["accuracy"] == Result.read(folder).rules["ridge"]


def test_a_client_is_forgotten_and_a_late_one_counts(folder: Path, digits: Dataset, tmp_path: Path) -> None:
    names = sorted(path.stem for path in (folder / "uploads").glob("*"))
    gone = names[1]
    code, told = oneround("fuse", str(folder), "--rule", "ridge", "--without", gone, "--out", str(tmp_path / "without"))
    assert code == 0 and gone not in told, told
    recipe = load(folder)
    plan = Plan.of(recipe, digits)
    broadcast = plan.prepare()
    others = [name for name in names if name != gone]
    never = acts.fuse(
        [
            acts.train(broadcast, Site(name, digits.train.take(plan.split.clients[plan.clients[name]])))
            for name in others
        ],
        broadcast,
    )
    forgot = GlobalModel.load(tmp_path / "without")
    assert float((forgot.predict(digits.test.pixels) - never.predict(digits.test.pixels)).abs().max()) < 1e-5
    (tmp_path / f"{gone}.safetensors").write_bytes((folder / "uploads" / f"{gone}.safetensors").read_bytes())
    (folder / "uploads" / f"{gone}.safetensors").rename(tmp_path / "away")
    try:
        late = str(tmp_path / f"{gone}.safetensors")
        code, _ = oneround("fuse", str(folder), "--rule", "ridge", "--with", late, "--out", str(tmp_path / "late"))
    finally:
        (tmp_path / "away").rename(folder / "uploads" / f"{gone}.safetensors")
    assert code == 0
    whole, found = (
        GlobalModel.load(each).predict(digits.test.pixels) for each in (folder / "model", tmp_path / "late")
    )
    assert float((whole - found).abs().max()) < 1e-5
    assert float((whole - forgot.predict(digits.test.pixels)).abs().max()) > 0.01


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--without", "client_00"], "--without client_00: no upload of that name; did you mean"),
        (
            ["--with", "{}/uploads/client_000.safetensors"],
            "client_000 is among the uploads already and would count twice",
        ),
        (["--rule", "iffi"], "iffi: these uploads do not carry what it needs (networks)"),
    ],
)
def test_mistakes_of_fuse_are_one_line(folder: Path, words: list[str], said: str) -> None:
    from oneround.errors import ProtocolError

    with pytest.raises(ProtocolError) as caught:
        oneround("fuse", str(folder), *(word.format(folder) for word in words))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_it_is_compared_with_runs_that_train(folder: Path, digits: Dataset, tmp_path: Path) -> None:
    same = [("partition.clients", 4), ("partition.alpha", 0.05), ("local.workers", 1)]
    for epochs in (1, 2):
        small = [("model.encoder", {"kind": "cnn", "width": 4}), ("training.epochs", epochs), ("fusion", ["iffi"])]
        run(load("fafi", [*same, *small]), tmp_path / f"fafi_{epochs}", data=digits)
    groups = compare(find_runs([tmp_path, folder]))
    assert [[entry.method for entry in group.entries] for group in groups] == [["fafi", "ridge"], ["fafi", "ridge"]]
    assert groups[0].comparisons["ridge · ridge"].difference.mean > 0
    assert [row[0] for row in rounds_sheet(groups[1]).rows] == ["2"]
    assert "ridge" in report([tmp_path, folder], None, 1.0)
    found = diagnose(folder, deep=True, data=digits)
    assert not found.findings and found.remarks == (
        "the deep check is left out: no network was trained, there is no encoder to look at",
    )


def test_what_is_revealed_is_said() -> None:
    method = describe("ridge", "resnet18", 10, 5000)
    told = "\n".join(method.lines())
    assert "second moments" in told and "class counts" in told and "the server sees only their total" in told
    assert method.traffic.up == 4 * 6400 * 6401 // 2 + 6400 * (4 * 10 + 8) + 4 * 10
    assert not any("second moments" in line for line in describe("fafi", "resnet18", 10, 5000).lines())
    masked = describe("ridge", "resnet18", 10, 5000, [("sums.secure", True), ("reveal.class_counts", False)])
    assert masked.reveals == ["that it took part; its sums and class counts only within the total over all clients"]
    assert any("exchange of public keys before the broadcast" in need for need in masked.needs)
    assert masked.traffic.up == 8 * (6400 * 6401 // 2 + 6400 * 11 + 10 + 8)
    sums_say = "second moments of fixed features of its images, features summed by class"
    assert method.reveals == ["class counts", sums_say]  # nothing is trained, so nothing was measured
    routed = describe("routed", "resnet18", 10, 5000)
    assert "not offered beside networks" in "\n".join(routed.lines())
    assert routed.reveals.count(sums_say) == 1 and len(set(routed.reveals)) == len(routed.reveals) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sums": None, "fusion": ["iffi"]}, "objective.terms is empty: start from a preset"),
        ({"fusion": ["ridge", "iffi"]}, "fusion: iffi needs networks, and objective.terms is empty"),
        ({"alignment": {}}, "alignment: objective.terms is empty, so there is no network it could help"),
        ({"sums.mirror": "twice"}, 'sums.mirror = "twice": must be one of none, copies, features'),
    ],
)
def test_recipes_that_cannot_be_run(changes: dict[str, object], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load("ridge", changes.items())
    with pytest.raises(RecipeError, match="fusion: ridge needs sums of fixed features"):
        load("fafi", [("fusion", ["ridge"])])


def test_sums_are_kept_between_snapshots(digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [("model.encoder", {"kind": "cnn", "width": 4}), ("training.epochs", 3), ("training.batch_size", 64)]
    broadcast = Plan.of(load("routed", [SMALL[0], *small]), digits).prepare()
    site = Site("site", digits.train.take(np.arange(80)), tmp_path)
    first = acts.train(broadcast, site, until=1)

    def again(*_: object, **__: object) -> None:
        raise AssertionError("summed again")

    monkeypatch.setattr(sums, "gather", again)
    second = acts.train(broadcast, site, until=2)
    assert all(torch.equal(second.sums[name], value) for name, value in first.sums.items()) and second.epoch == 2
    (kept,) = tmp_path.glob("sums/*")
    kept.write_bytes(kept.read_bytes()[:-9])
    with pytest.raises(AssertionError, match="summed again"):
        acts.train(broadcast, site)


@pytest.mark.parametrize("more", [[], [("sums.secure", True), ("reveal.class_counts", False)]], ids=["plain", "masked"])
def test_the_whole_study_has_the_pooled_ridge_as_its_bound(
    digits: Dataset, tmp_path: Path, more: list[tuple[str, object]]
) -> None:
    from oneround.study import accuracies, study

    found = study(load("ridge", [*SMALL, *more]), tmp_path, [1, 2])
    assert found.centralised == found.results[0].rules["ridge"] == found.results[1].rules["ridge"]
    assert np.isfinite(found.centralised)
    assert ("mean client alone" in accuracies(found.record())) == (not more)
