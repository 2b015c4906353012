"""The Python API takes paths as text and recipe keys as a mapping."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import oneround
from conftest import small_recipe
from oneround import acts
from oneround.analysis.describe import describe
from oneround.analysis.diagnosis.diagnose import LiveDiagnosis, diagnose
from oneround.config.load import parse_part
from oneround.data import Dataset, load_dataset
from oneround.errors import RecipeError
from oneround.fusion import rules
from oneround.protocol import UploadFolder
from oneround.report import report
from oneround.runs.archive import find_runs, keep
from oneround.runs.result import Result
from oneround.studies.study import study
from oneround.studies.sweep import Grid, cells, read_grid, sweep

TINY = {"model.encoder": {"kind": "cnn", "width": 4}, "training.epochs": 1, "partition.clients": 2, "local.workers": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, digits: Dataset) -> str:
    """A run whose folder is named by text."""
    folder = str(tmp_path_factory.mktemp("runs") / "x")
    result = oneround.run(oneround.load("fafi", TINY), folder, data=digits)
    assert result.folder == Path(folder)
    return folder


def test_recipe_keys_as_a_mapping_or_as_pairs(tmp_path: Path) -> None:
    assert (
        oneround.load("fafi", TINY) == oneround.load("fafi", list(TINY.items())) == oneround.load("fafi", TINY.items())
    )
    recipe = oneround.load("fafi", {"training.epochs": 3})
    assert recipe.training.epochs == 3
    assert oneround.load("fafi", {"local.data_path": tmp_path}).local.data_path == tmp_path
    assert oneround.change(recipe, [("training.epochs", 4)]) == oneround.change(recipe, {"training.epochs": 4})
    (tmp_path / "mine.yaml").write_text("extends: fafi\n")
    assert oneround.load(str(tmp_path / "mine.yaml"), {"training.epochs": 2}).training.epochs == 2
    words = ["fafi", "cnn", 10, 100]
    assert describe(*words, {"training.epochs": 2}).plain() == describe(*words, [("training.epochs", 2)]).plain()


@pytest.mark.slow
def test_a_model_by_text(finished: str, digits: Dataset, tmp_path: Path) -> None:
    model = oneround.GlobalModel.load(f"{finished}/model")
    model.save(str(tmp_path / "copy"))
    pixels = digits.test.pixels[:5]
    assert torch.equal(oneround.GlobalModel.load(str(tmp_path / "copy")).predict(pixels), model.predict(pixels))
    Image.fromarray(pixels[0, 0].numpy()).save(tmp_path / "a.png")
    assert torch.equal(model.read_image(str(tmp_path / "a.png")), pixels[0])
    single = acts.fuse(UploadFolder([f"{finished}/uploads/client_000.safetensors"], *_asked(finished)), _asked(finished)[0], rule=rules.parse("average"))  # fmt: skip
    assert single.to_onnx(str(tmp_path / "model.onnx")) < 1e-4


def _asked(folder: str) -> tuple[oneround.Broadcast, dict[str, tuple[int, ...]]]:
    broadcast = oneround.Broadcast.read(f"{folder}/broadcast.safetensors")
    return broadcast, acts.statistics_of(broadcast)


def test_messages_by_text(finished: str, tmp_path: Path) -> None:
    broadcast, statistics = _asked(finished)
    broadcast.write(str(tmp_path / "b.safetensors"))
    assert oneround.Broadcast.read(str(tmp_path / "b.safetensors")).digest == broadcast.digest
    upload = oneround.Upload.read(f"{finished}/uploads/client_000.safetensors", broadcast, statistics)
    copy = str(tmp_path / "u.safetensors")
    upload.write(copy)
    assert oneround.Upload.read(copy, broadcast, statistics).content == upload.content
    assert oneround.Upload.content_of(copy) == upload.content and oneround.Upload.epoch_of(copy) == 1


def test_a_site_with_a_folder_by_text(digits: Dataset, tmp_path: Path) -> None:
    recipe = oneround.settle(small_recipe(fusion=["iffi"], training__epochs=2), digits)
    broadcast = oneround.prepare(recipe, digits.class_names, digits.shape)
    site = oneround.Site("a", digits.train.take(torch.arange(60)), str(tmp_path / "state"))  # type: ignore[arg-type]
    assert site.folder == tmp_path / "state"
    assert oneround.train(broadcast, site, until=1).samples == 60 and list((tmp_path / "state").iterdir())


def test_data_by_text(tmp_path: Path) -> None:
    images, labels = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert len(load_dataset(parse_part("data", "npz"), str(tmp_path / "mine.npz")).train) == 4


def test_runs_are_found_by_text(finished: str, tmp_path: Path) -> None:
    (run,) = find_runs([finished])
    keep([run], str(tmp_path / "runs.json"))
    (again,) = find_runs(path for path in [str(tmp_path / "runs.json")])
    assert again.accuracy == run.accuracy == Result.read(finished).rules
    with pytest.raises(RecipeError, match=r"no finished run in .*empty"):
        (tmp_path / "empty").mkdir()
        find_runs(path for path in [str(tmp_path / "empty")])


def test_a_run_is_looked_at_by_text(finished: str, caplog: pytest.LogCaptureFixture) -> None:
    assert diagnose(finished).plain() == diagnose(Path(finished)).plain()
    findings: list[object] = []
    LiveDiagnosis(finished, findings.append)({"event": "plan"})
    assert "diagnosis while training ended" not in caplog.text
    assert report([finished]) == report([Path(finished)])


def test_a_study_by_text(tmp_path: Path) -> None:
    found = study(oneround.load("fafi", TINY), str(tmp_path / "s"), [1])
    assert found.folder == tmp_path / "s" and (tmp_path / "s" / "study.json").is_file()


@pytest.mark.processes
def test_a_sweep_by_text(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("methods: [fafi]\nseeds: 1-2\n")
    grid = Grid.model_validate(read_grid(str(tmp_path / "grid.yaml")))
    every = cells(grid, TINY)
    assert every == cells(grid, iter(TINY.items())) and len(every) == 2
    progress = sweep(every[:1], str(tmp_path / "sweep"), workers=1)
    assert len(progress.done) == 1 and not progress.failed
    assert "<html" in report([str(tmp_path / "sweep")])


def test_the_package_offers_the_names_of_the_api() -> None:
    assert oneround.__all__ == oneround.api.__all__
    assert all(hasattr(oneround, name) for name in oneround.__all__) and not hasattr(oneround, "nothing")
