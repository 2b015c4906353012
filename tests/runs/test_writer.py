"""What a run writes: nothing is in the log before its model is on disk, and the best model on validation images is the one kept."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import small_recipe
from oneround import acts
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.evaluate import Score, Scores
from oneround.global_model import GlobalModel
from oneround.runs import pictures
from oneround.runs import writer as writer_module
from oneround.runs.folder import RunFolder
from oneround.runs.log import MetricsLog
from oneround.runs.writer import RunWriter, Snapshot
from oneround.simulate import run
from oneround.site import Site


class Killed(Exception):
    """Stands for a kill at that moment."""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return small_recipe(
        training__epochs=3,
        snapshots=1,
        validation=0.3,
        local__workers=1,
        fusion=["iffi", "average"],
    )


@pytest.mark.slow
def test_killed_between_model_and_log_the_snapshot_is_made_again(
    recipe: Recipe, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = run(recipe, tmp_path / "calm", data=digits)
    append = MetricsLog.append
    appended: list[int] = []

    def killed(self: MetricsLog, events: object) -> None:
        appended.append(1)
        if len(appended) == 2:
            raise Killed
        append(self, events)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(MetricsLog, "append", killed)
        run(recipe, tmp_path / "killed", data=digits)
    resumed = run(recipe, tmp_path / "killed", data=digits, resume=True)
    assert (resumed.rules, resumed.curves, resumed.validation) == (calm.rules, calm.curves, calm.validation)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("calm", "killed")]
    assert results[0] == results[1]
    models = [GlobalModel.load(tmp_path / name / "model").predict(digits.test.pixels) for name in ("calm", "killed")]
    assert models[0].equal(models[1])


def test_a_snapshot_without_all_its_rules_is_dropped_from_the_log(
    recipe: Recipe, digits: Dataset, tmp_path: Path
) -> None:
    run(recipe, tmp_path / "run", data=digits)
    folder = RunFolder(tmp_path / "run")
    events = list(folder.metrics)
    folder.metrics.replace(event for event in events if (event.get("rule"), event["epoch"]) != ("average", 3))
    writer = RunWriter(folder, {rule.label: rule for rule in acts.rules_of(recipe)})
    assert writer.done == {1, 2} and {event["epoch"] for event in folder.metrics} == {1, 2}


def test_where_the_best_model_is_gone_the_last_one_is_kept_and_it_is_reported(
    recipe: Recipe, digits: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = run(recipe, tmp_path / "run", data=digits)
    assert result.chosen["iffi"] != 3
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree(tmp_path / "run" / "model")
    with caplog.at_level(logging.WARNING, "oneround"):
        run(recipe, tmp_path / "run", data=digits, resume=True)
    assert "best on validation images, is gone; the last one is kept instead" in caplog.text
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["model"] == {"rule": "iffi", "epoch": 3, "chosen_on": "end"}
    assert any("the model is of epoch 3; that of epoch" in remark for remark in written["remarks"])
    GlobalModel.load(tmp_path / "run" / "model")


def test_of_equals_on_validation_images_the_earliest_is_the_model(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []

    class Model(SimpleNamespace):
        def save(self, folder: Path, *, flush: bool) -> None:
            saved.append(self.epoch)

    monkeypatch.setattr(RunWriter, "_model", lambda self, snapshot, site: Model(epoch=snapshot.epoch))
    rules = {rule.label: rule for rule in acts.rules_of(recipe)}
    writer = RunWriter(RunFolder(tmp_path), rules)
    for epoch, right in ((1, 6), (2, 7), (3, 7), (4, 5)):
        judged = {name: Score(((right, 10 - right), (0, 0)), 1.0, 1.0) for name in rules}
        snapshot = Snapshot(epoch, SimpleNamespace(paths=[]), Scores(judged, {}, judged, {}))
        writer.snapshot(snapshot, range(epoch, epoch + 1), Site("server"))
    assert saved == [1, 2] and writer.chosen == 2


def test_epochs_of_rounds_that_are_over_stay_without_test_images(recipe: Recipe, tmp_path: Path) -> None:
    """A server without test images has no snapshots in its log; started again in round 3 it keeps what was measured."""
    folder = RunFolder(tmp_path)
    folder.metrics.append({"event": "epoch", "client": "a", "epoch": epoch, "loss": 1.0} for epoch in (1, 2, 3))
    RunWriter(folder, {rule.label: rule for rule in acts.rules_of(recipe)}, epochs_over=2)
    assert [event["epoch"] for event in folder.metrics] == [1, 2]


def test_a_log_with_nothing_but_a_torn_line_is_begun_again(recipe: Recipe, tmp_path: Path) -> None:
    """Killed while it wrote its first events: what is appended must not continue the torn line."""
    folder, event = RunFolder(tmp_path), {"event": "epoch", "client": "a", "epoch": 1, "loss": 1.0}
    folder.metrics.path.write_text('{"event": "ep')
    RunWriter(folder, {rule.label: rule for rule in acts.rules_of(recipe)})
    folder.metrics.append([event])
    assert list(folder.metrics) == [event]


@pytest.mark.slow
def test_killed_while_its_picture_is_drawn_a_run_is_not_finished(
    recipe: Recipe, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(pictures, "draw_accuracy", killed)
        run(recipe, tmp_path, data=digits)
    run(recipe, tmp_path, data=digits, resume=True)
    assert (tmp_path / "accuracy.png").is_file()


def test_a_model_chosen_at_a_snapshot_is_on_disk_at_the_end(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written without waiting for the disk, and flushed before the result says that the run is over."""
    flushed: list[Path] = []
    monkeypatch.setattr(writer_module, "flush_file", flushed.append)
    run(
        small_recipe(training__epochs=2, snapshots=1, validation=0.2, fusion=["average"]), tmp_path / "run", data=digits
    )
    assert sorted(flushed) == sorted((tmp_path / "run" / "model").iterdir()) and len(flushed) >= 2
