"""Students of generated images: the digits of skewed sites from their generators alone, the same after a kill, on any transport."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from federation import NOW, SHARES
from generating import TINY, generating
from inprocess import InProcess
from oneround import acts
from oneround.cli import app
from oneround.config.load import load
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.errors import RecipeError
from oneround.federate.server_app import serve
from oneround.fusion import rules
from oneround.fusion.student import Mirrored
from oneround.global_model import GlobalModel
from oneround.runs.folder import RunFolder
from oneround.simulate import run
from oneround.site import Site

STUDENT: dict[str, Any] = {
    "kind": "student", "generated": {"count": 500, "steps": 5, "fewest": 10}, "epochs": 10, "batch_size": 64, "learning_rate": 0.1,
}  # fmt: skip
FEW: dict[str, Any] = STUDENT | {"generated": {"count": 150, "steps": 2, "fewest": 1}, "epochs": 3}


def small(digits: Dataset, preset: str = "generated", **changes: Any) -> Recipe:
    """Three sites at α = 0.3 whose training is over at once."""
    given = {"partition__clients": 3, "partition__alpha": 0.3, "fusion": [FEW], "sums": None}
    return generating(digits, preset, **{"local__workers": 1, "snapshots": 0, **given, **changes})


class Killed(BaseException):
    """What ends a run in the middle."""


def run_until(recipe: Recipe, folder: Path, digits: Dataset, moment: tuple[str, ...]) -> None:
    """Run until an event with these words."""

    def emit(event: dict[str, Any]) -> None:
        if all(word in str(event) for word in moment):
            raise Killed

    with pytest.raises(Killed):
        run(recipe, folder, data=digits, emit=emit, resume=True)


def outcome(folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What uploads contain, and the model's tensors."""
    model = GlobalModel.load(folder / "model")
    return [upload.content for upload in RunFolder(folder).uploads()], model.inference.state_dict()


@pytest.fixture(scope="module")
def whole(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """An undisturbed small run, and its events."""
    folder, events = tmp_path_factory.mktemp("student") / "whole", list[dict[str, Any]]()
    run(small(digits), folder, data=digits, emit=events.append)
    return folder, events


@pytest.mark.slow
def test_sites_with_few_classes_each_teach_one_network_all_of_them(digits: Dataset, tmp_path: Path) -> None:
    """The demo's five very skewed sites, with a quarter of its training; IFFI has two thirds after all of it."""
    changes = {
        "generator.network": TINY["generator.network"],
        "generator.epochs": 10,
        "generator.batch_size": 32,
        "sums": None,
    }
    recipe = load(
        "generated-demo", {**changes, "generator.learning_rate": 8e-3, "fusion": [STUDENT], "local.workers": 1}
    )
    assert run(recipe, tmp_path / "run", data=digits).rules[rules.parse(STUDENT).label] > 0.8


def test_a_run_that_is_killed_three_times_ends_as_undisturbed(
    digits: Dataset, tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    recipe, folder = small(digits, local__checkpoint_seconds=0.0), tmp_path / "killed"
    run_until(recipe, folder, digits, ("'epoch'", "client_001", "'epoch': 2"))
    run_until(recipe, folder, digits, ("fusing", "images of client_001"))
    kept = next((folder / "server").glob("*/client_000.safetensors"))
    made = kept.stat().st_mtime_ns
    run_until(recipe, folder, digits, ("fusing", "epochs of the student", "'done': 2"))
    assert list((folder / "server").glob("*/*/state.safetensors")), "its state is saved"
    run(recipe, folder, data=digits, resume=True)
    assert kept.stat().st_mtime_ns == made and not list((folder / "server").glob("*/*/state.safetensors"))
    (contents, model), (expected_contents, expected) = outcome(folder), outcome(whole[0])
    assert contents == expected_contents and model.keys() == expected.keys()
    assert all(torch.equal(model[name], expected[name]) for name in expected)


def test_progress_is_shown(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    fusing = [event for event in whole[1] if event["event"] == "fusing"]
    texts = list(dict.fromkeys(event["text"] for event in fusing))
    assert texts == ["images of client_000", "images of client_001", "images of client_002", "epochs of the student"]
    assert [event["done"] for event in fusing[-3:]] == [1, 2, 3] and fusing[-1]["of"] == 3


def test_the_federation_uploads_what_the_simulation_does(
    digits: Dataset, tmp_path: Path, whole: tuple[Path, list[dict[str, Any]]]
) -> None:
    serve(InProcess(SHARES), small(digits), tmp_path / "federated", NOW)
    (contents, model), (expected_contents, expected) = outcome(tmp_path / "federated"), outcome(whole[0])
    assert contents == expected_contents and all(torch.equal(model[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "option",
    [
        {"epochs": 2}, {"batch_size": 32}, {"learning_rate": 0.05}, {"weight_decay": 0.1}, {"smoothing": 0.5}, {"augment": {"shift": 0.5}},
        {"augment": {"hole": 0.5}}, {"augment": {"flip": 0.5}}, {"augment": {"jitter": 0.8}}, {"student": {"kind": "cnn", "width": 6}},
        {"generated": {"count": 140, "steps": 2, "fewest": 1}}, {"generated": {"count": 150, "steps": 3, "fewest": 1}},
        {"generated": {"count": 150, "steps": 2, "fewest": 40}},
    ],
)  # fmt: skip
def test_every_option_changes_the_student(whole: tuple[Path, list[dict[str, Any]]], option: dict[str, Any]) -> None:
    uploads, standard = RunFolder(whole[0]).uploads(), outcome(whole[0])[1]
    changed = acts.fuse(uploads, uploads.broadcast, Site("server"), rules.parse(FEW | option)).inference.state_dict()
    assert any(
        not torch.equal(changed[name], standard[name])
        for name in standard
        if changed[name].shape == standard[name].shape
    )


def test_mirror_images_are_scored_too_where_they_keep_their_label(digits: Dataset) -> None:
    broadcast = acts.prepare(small(digits, training__augment__flip=0.5), digits.class_names, digits.shape)
    upload = acts.train(broadcast, Site("site", digits.train.take(torch.arange(60))))
    mirrored, plain = (
        acts.fuse([upload], broadcast, Site("server"), rules.parse(FEW | {"mirrored": each})) for each in (True, False)
    )
    images = digits.test.pixels[:8].float() / 255
    expected = (plain(images).log_softmax(1) + plain(images.flip(3)).log_softmax(1)) / 2
    assert isinstance(mirrored.inference, Mirrored)
    torch.testing.assert_close(mirrored(images), expected)


def test_the_model_is_one_network_and_exports(whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    model = GlobalModel.load(whole[0] / "model")
    assert model.to_onnx(tmp_path / "student.onnx") < 1e-4 and len(list((whole[0] / "model").glob("shard_*"))) == 1


def test_two_networks_travel_together_and_each_rule_takes_its_own(digits: Dataset, tmp_path: Path) -> None:
    rule = {"kind": "routed", "posterior": "typicality"}
    sums = {"sums": {"features": {"kind": "patches", "size": 96, "patch": 4}}}
    recipe = generating(
        digits,
        "generated+routed",
        partition__clients=3,
        partition__alpha=0.3,
        fusion=[FEW, rule],
        local__workers=1,
        **sums,
    )
    result = run(recipe, tmp_path / "both", data=digits)
    assert set(result.rules) == {rules.parse(FEW).label, "routed posterior=typicality"} and len(result.clients) == 3
    upload = RunFolder(tmp_path / "both").uploads()[0]
    assert upload.weights and upload.generator and upload.sums and upload.epoch == 1 + TINY["generator.epochs"]


def test_generators_come_in_the_first_exchange_and_stacked_sums_in_the_second(digits: Dataset, tmp_path: Path) -> None:
    recipe = generating(
        digits, "stacked", partition__clients=3, partition__alpha=0.3, fusion=["stacked", FEW], validation=0.0, local__workers=1,
        sums__features={"kind": "experts", "beside": None},
    )  # fmt: skip
    result = run(recipe, tmp_path / "stacked", data=digits)
    scored = {
        event["rule"]: event["epoch"]
        for event in RunFolder(tmp_path / "stacked").metrics
        if event["event"] == "snapshot"
    }
    assert scored == {rules.parse(FEW).label: 3, "stacked": 4} and set(result.rules) == {"stacked"}
    with pytest.raises(RecipeError, match="student comes first, so it would make the model"):
        load("stacked", {"generator": {}, "fusion": ["student", "stacked"]})
    first = RunFolder(tmp_path / "stacked").first_exchange.uploads()
    assert first[0].generator and not first[0].sums


def test_a_student_without_generators_is_refused() -> None:
    with pytest.raises(RecipeError, match="student needs generators; add generator"):
        load("fafi", {"fusion": ["student"]})


def test_methods_says_what_a_generator_reveals() -> None:
    output = " ".join(CliRunner().invoke(app, ["methods", "generated+routed"]).output.split())
    assert "whoever has it can make images that look like them, class by class" in output
    assert "(network, generator, sums of fixed features, class counts, statistics of the fusion rules; fp16)" in output
