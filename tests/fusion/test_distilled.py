"""One network that answers as the ensemble does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from conftest import small_recipe
from oneround import acts
from oneround.cli import app
from oneround.config.load import load
from oneround.data import Dataset
from oneround.data.augment import MEAN, STD
from oneround.errors import RecipeError
from oneround.fusion import distilled, rules
from oneround.global_model import GlobalModel
from oneround.protocol import UploadFolder
from oneround.runs.folder import RunFolder
from oneround.server.plan import DealtPlan
from oneround.simulate import run
from oneround.site import Site
from oneround.training.distillation import distil, inversions, noise_images

pytestmark = pytest.mark.slow


class Federation:
    """Five clients of the demo at α = 0.5, a fifth of the images public."""

    def __init__(self, folder: Path, digits: Dataset) -> None:
        given = {
            "data": "digits", "partition.alpha": 0.5, "training.epochs": 15, "training.batch_size": 64, "model.encoder": "cnn",
            "training.augment.crop_scale": [0.6, 1.0], "fusion": [{"kind": "distilled", "epochs": 30}, "typicality-gated"],
        }  # fmt: skip
        recipe = load("fafi+distilled", given.items())
        self.folder, self.digits = folder, digits
        self.result = run(recipe, folder, data=digits)
        self.server = DealtPlan.of(recipe, digits).server(folder)
        self.uploads: UploadFolder = RunFolder(folder).uploads()

    def fused(self, **rule: object) -> GlobalModel:
        return acts.fuse(self.uploads, self.uploads.broadcast, self.server, rules.parse(rule))

    def answers(self, model: GlobalModel) -> torch.Tensor:
        return model.predict(self.digits.test.pixels).argmax(1)


@pytest.fixture(scope="module")
def federation(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation(tmp_path_factory.mktemp("distilled"), digits)


def test_the_student_gives_its_teachers_answer(federation: Federation) -> None:
    """On images neither has seen; the model of the run is the student, one network."""
    student = GlobalModel.load(federation.folder / "model")
    teacher = federation.fused(kind="typicality-gated")
    agreed = (federation.answers(student) == federation.answers(teacher)).float().mean()
    assert agreed >= 0.95, f"{agreed:.3f}"
    assert len(list((federation.folder / "model").glob("shard_*"))) == 1
    right = (federation.answers(student) == federation.digits.test.labels).float().mean()
    assert float(right) == pytest.approx(federation.result.rules[next(iter(federation.result.rules))])


def test_a_student_of_another_kind_from_made_up_images(federation: Federation, tmp_path: Path) -> None:
    student = federation.fused(
        kind="distilled", teacher="iffi", student={"kind": "cnn", "width": 8}, images="noise", made_up=300, epochs=40
    )
    assert student.inference.net.encoder.features != federation.uploads.broadcast.weights["prototypes"].shape[1]
    student.save(tmp_path / "small")
    again = GlobalModel.load(tmp_path / "small")
    assert torch.equal(again.predict(federation.digits.test.pixels), student.predict(federation.digits.test.pixels))
    made_up = noise_images((1, 8, 8), 300, federation.uploads.broadcast.recipe.seeds.training).pixels
    copied, copying = (model.predict(made_up).argmax(1) for model in (federation.fused(kind="iffi"), student))
    assert len(copied.unique()) > 1 and (copied == copying).float().mean() > 0.6


def test_inversions_are_what_the_teacher_takes_for_each_class(federation: Federation) -> None:
    teacher = federation.fused(kind="iffi").inference.load_experts().requires_grad_(False)
    made = inversions(teacher, (1, 8, 8), 10, 60, 1, torch.device("cpu"))
    normalised = torch.cat(list(made.batches(torch.device("cpu"), MEAN, STD)))
    right = (teacher(normalised).argmax(1) == made.labels).float().mean()
    before = torch.cat(list(noise_images((1, 8, 8), 60, 1).batches(torch.device("cpu"), MEAN, STD)))
    assert right >= 0.5 > 2 * (teacher(before).argmax(1) == made.labels).float().mean()  # half of them are mixes of two


def test_without_public_images_it_says_what_to_do(federation: Federation) -> None:
    for rule in ({}, {"images": "noise", "calibrate": True}):
        with pytest.raises(RecipeError, match=r"fusion.distilled: the server has no public images; set public"):
            acts.fuse(
                federation.uploads,
                federation.uploads.broadcast,
                Site("server"),
                rules.parse({"kind": "distilled", **rule}),
            )


@pytest.mark.parametrize(
    ("teacher", "fault"),
    [
        ("ridge", "fusion: distilled needs sums of fixed features"),
        ({"kind": "split", "restate": "public"}, "fusion: distilled needs public images at the server"),
        (
            {"kind": "distilled", "calibrate": True, "images": "noise"},
            "fusion: distilled needs public images at the server",
        ),
    ],
)
def test_what_its_teacher_needs_it_needs_too(teacher: object, fault: str) -> None:
    with pytest.raises(RecipeError, match=fault):
        load("fafi", [("fusion", [{"kind": "distilled", "images": "noise", "teacher": teacher}])])


def test_what_its_teacher_refuses_is_refused_before_anything_is_trained(digits: Dataset) -> None:
    large = {"kind": "taught", "teacher": {"encoder": {"kind": "cnn", "width": 4}, "from_file": True}}
    recipe = small_recipe(public=0.1, fusion=[{"kind": "distilled", "teacher": large}])
    with pytest.raises(RecipeError, match=r"teacher.from_file needs local.teacher_weights"):
        acts.prepare(acts.resolve(recipe, digits), digits.class_names, digits.shape)


def test_fusing_a_finished_run_teaches_one_student(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    taught = []
    monkeypatch.setattr(distilled, "distil", lambda *given, **more: taught.append(1) or distil(*given, **more))
    words = ["fuse", str(federation.folder), "--rule", "distilled", "--set", "epochs=1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and len(taught) == 1, done.output
    assert len(list((federation.folder / "fused/distilled").glob("shard_*"))) == 1
