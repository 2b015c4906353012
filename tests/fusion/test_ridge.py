"""Ridge regression from sums: the pooled answer whoever holds what, and every command on a run that trains nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oneround import acts
from oneround.analysis.comparison import compare
from oneround.analysis.diagnosis.diagnose import diagnose
from oneround.analysis.tables import rounds_sheet
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import ProtocolError, RecipeError
from oneround.evaluate import score_model
from oneround.fusion import rules
from oneround.fusion.ridge import pooled_solution, total_sums
from oneround.global_model import GlobalModel
from oneround.protocol import Broadcast, Upload, UploadFolder
from oneround.report import report
from oneround.runs.archive import find_runs
from oneround.runs.result import Result
from oneround.server.plan import DealtPlan
from oneround.simulate import run
from oneround.site import Site
from oneround.studies.study import study
from oneround.sums import solve, unpacked
from ridge_runs import SMALL, oneround
from small_sums import broadcast_of, upload_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def broadcast(digits: Dataset) -> Broadcast:
    return broadcast_of(digits)


@pytest.fixture(scope="module")
def pooled(broadcast: Broadcast, digits: Dataset) -> GlobalModel:
    return acts.fuse([upload_of(broadcast, digits, "all", np.arange(len(digits.train)))], broadcast)


@st.composite
def partitions(draw: st.DrawFn) -> list[np.ndarray]:
    """1 to 100 clients: random, or shards of samples sorted by class; every sample once, nobody without any."""
    samples, clients = 1442, draw(st.integers(1, 100))
    random = np.random.RandomState(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        owner = random.choice(clients, samples, p=random.dirichlet(np.full(clients, draw(st.sampled_from([0.1, 1.0])))))
    else:
        owner = np.arange(samples) * clients // samples  # digits come sorted by nothing; sort by label below
    return [np.flatnonzero(owner == client) for client in range(clients) if (owner == client).any()]


@given(partitions(), st.booleans())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_partition_gives_the_pooled_answer(
    broadcast: Broadcast, digits: Dataset, pooled: GlobalModel, split: list[np.ndarray], by_class: bool
) -> None:
    order = np.argsort(digits.train.labels.numpy(), kind="stable") if by_class else np.arange(len(digits.train))
    uploads = [upload_of(broadcast, digits, f"client_{number:03d}", order[index]) for number, index in enumerate(split)]
    found = acts.fuse(uploads, broadcast)
    assert float((found.predict(digits.test.pixels) - pooled.predict(digits.test.pixels)).abs().max()) < 1e-5


def test_a_client_comes_and_goes_without_a_trace(broadcast: Broadcast, digits: Dataset) -> None:
    parts = np.array_split(np.arange(len(digits.train)), 4)
    uploads = [upload_of(broadcast, digits, f"client_{k}", index) for k, index in enumerate(parts)]
    three, all_four = total_sums(uploads[:3], broadcast, CPU), total_sums(uploads, broadcast, CPU)
    without = all_four - unpacked(uploads[3].sums)
    assert float((without.gram - three.gram).abs().max()) <= 1e-12 * float(three.gram.abs().max())
    late = three + unpacked(uploads[3].sums)
    for one, other in ((without, three), (late, all_four)):
        apart = solve(one).weights - solve(other).weights
        assert float(apart.abs().max()) < 1e-9
    assert float((solve(three).weights - solve(all_four).weights).abs().max()) > 1e-3


def test_priors_and_mirrored_answers(broadcast: Broadcast, digits: Dataset) -> None:
    index = np.concatenate([np.flatnonzero(digits.train.labels == label)[: 14 * label] for label in range(10)])
    uploads = [upload_of(broadcast, digits, "site", index)]

    def scores(images: Tensor, **options: object) -> Tensor:
        with torch.no_grad():
            return acts.fuse(uploads, broadcast, rule=rules.parse({"kind": "ridge", **options}))(images)

    images = digits.test.pixels[:30].float() / 255
    raised = scores(images, priors="uniform") - scores(images)
    expected = -torch.tensor([126.0, 14, 28, 42, 56, 70, 84, 98, 112, 126]).log()  # nobody holds a 0
    assert torch.allclose(raised, expected.expand(30, 10), atol=1e-3)
    both = (scores(images) + scores(images.flip(3))) / 2
    assert torch.allclose(scores(images, mirrored=True), both, atol=1e-3)
    assert float((both - scores(images)).abs().max()) > 0.1


def test_a_session_solves_anew_for_other_uploads_another_recipe_and_another_penalty(
    broadcast: Broadcast, digits: Dataset, tmp_path: Path
) -> None:
    """One server site scores several sets of uploads; nothing that it knows of one is taken for another."""
    server, other = Site("server"), broadcast_of(digits, sums__mirror="copies")
    parts = {"a": np.arange(400), "b": np.arange(400, 900)}

    def solution(sent: Broadcast, names: str, site: Site, penalty: float | None = None) -> tuple[Tensor, Tensor]:
        folder = tmp_path / sent.digest
        for name in names:
            if not (folder / f"{name}.safetensors").exists():
                upload_of(sent, digits, name, parts[name]).write(folder / f"{name}.safetensors")
        uploads = UploadFolder([folder / f"{name}.safetensors" for name in names], sent, acts.statistics_of(sent))
        solved, counts = pooled_solution(uploads, sent, site, penalty)
        return solved.weights, counts

    asked = [(broadcast, "a"), (broadcast, "ab"), (other, "a"), (broadcast, "a", 0.5), (broadcast, "a")]
    for sent, names, *penalty in asked:
        shared, fresh = (solution(sent, names, site, *penalty) for site in (server, Site("server")))
        assert all(torch.equal(one, two) for one, two in zip(shared, fresh, strict=True)), (names, penalty)
    assert solution(broadcast, "a", server)[0] is solution(broadcast, "a", server)[0], "solved once"


@pytest.fixture(scope="module")
def folder(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("ridge") / "run"
    run(load("ridge", [*SMALL, ("partition.alpha", 0.05)]), run_dir, data=digits)
    return run_dir


def test_the_answer_does_not_depend_on_the_partition(folder: Path, digits: Dataset, tmp_path: Path) -> None:
    even = run(load("ridge", [*SMALL, ("partition.kind", "iid")]), tmp_path / "iid", data=digits)
    skewed = Result.read(folder)
    assert skewed.rules == even.rules and skewed.rules["ridge"] > 0.9
    assert max(skewed.clients.values()) < 0.75 < min(even.clients.values())
    assert skewed.curves == {"ridge": {1: skewed.rules["ridge"]}}


@pytest.mark.slow
def test_a_run_without_a_network_says_so(digits: Dataset, folder: Path) -> None:
    plan = DealtPlan.of(load("ridge", [*SMALL, ("partition.alpha", 0.05), ("training.epochs", 50)]), digits)
    assert plan.recipe.training.epochs == 1 and plan.snapshot_epochs == [1] and plan.steps == len(plan.clients)
    (line,) = [each for each in plan.lines() if "sums of" in each]
    assert line.strip() == "sums of 96 fixed features (patches size=96 patch=4), one pass, nothing is trained"
    uploads = [Upload.read(path, plan.prepare(), {}) for path in sorted((folder / "uploads").glob("*"))]
    assert all(
        not upload.weights and sum(value.nbytes for value in upload.sums.values()) == plan.traffic.up
        for upload in uploads
    )


@pytest.mark.slow
def test_the_model_is_saved_whole_and_exported(folder: Path, digits: Dataset, tmp_path: Path) -> None:
    model = GlobalModel.load(folder / "model")
    assert score_model(model, digits.test, torch.device("cpu")).accuracy == Result.read(folder).rules["ridge"]
    assert model.to_onnx(tmp_path / "ridge.onnx") < 1e-3
    code, output = oneround("evaluate", str(folder), "--json")
    assert code == 0 and json.loads(output)["accuracy"] == Result.read(folder).rules["ridge"]


def test_a_client_is_removed_and_a_late_one_counts(folder: Path, digits: Dataset, tmp_path: Path) -> None:
    names = sorted(path.stem for path in (folder / "uploads").glob("*"))
    gone = names[1]
    code, output = oneround(
        "fuse", str(folder), "--rule", "ridge", "--without", gone, "--out", str(tmp_path / "without")
    )
    assert code == 0 and gone not in output, output
    recipe = load(folder)
    plan = DealtPlan.of(recipe, digits)
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
    ("words", "message"),
    [
        (["--without", "client_00"], "--without client_00: no upload of that name; did you mean"),
        (
            ["--with", "{}/uploads/client_000.safetensors"],
            "client_000 is among the uploads already and would count twice",
        ),
        (["--rule", "iffi"], "iffi: these uploads do not carry what it needs (networks)"),
    ],
)
def test_mistakes_of_fuse_are_one_line(folder: Path, words: list[str], message: str) -> None:

    with pytest.raises(ProtocolError) as caught:
        oneround("fuse", str(folder), *(word.format(folder) for word in words))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sums": None, "fusion": ["iffi"]}, "objective.terms is empty: start from a preset"),
        ({"fusion": ["ridge", "iffi"]}, "fusion: iffi needs networks, and objective.terms is empty"),
        ({"alignment": {}}, "alignment: objective.terms is empty, so there is no network it could help"),
        ({"sums.mirror": "twice"}, 'sums.mirror = "twice": must be one of none, copies, features'),
    ],
)
def test_recipes_that_cannot_be_run(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load("ridge", changes.items())
    with pytest.raises(RecipeError, match="fusion: ridge needs sums of fixed features"):
        load("fafi", [("fusion", ["ridge"])])


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], [("sums.secure", True), ("reveal.class_counts", False)]], ids=["plain", "masked"])
def test_the_whole_study_has_the_pooled_ridge_as_its_bound(
    digits: Dataset, tmp_path: Path, more: list[tuple[str, object]]
) -> None:
    found = study(load("ridge", [*SMALL, *more]), tmp_path, [1, 2])
    assert found.centralised == found.results[0].rules["ridge"] == found.results[1].rules["ridge"]
    assert np.isfinite(found.centralised)
    assert ("mean client alone" in found.accuracies) == (not more)
