"""Statistics, tables, the log, words, seeds."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats

from conftest import small_recipe
from oneround.data import Dataset
from oneround.observe import environment
from oneround.observe.log import MetricsLog
from oneround.observe.pictures import draw_accuracy
from oneround.observe.progress import Live
from oneround.observe.statistics import Summary, paired
from oneround.observe.tables import Row, terminal_table
from oneround.observe.words import duration, size_in_words
from oneround.seeds import derive, generator
from oneround.simulate import run


def test_intervals_are_scipy_s() -> None:
    random = np.random.RandomState(0)
    for n in (2, 3, 10, 40):
        ours, theirs = random.randn(n) * 5 + 70, random.randn(n) * 5 + 60
        found = paired(ours, theirs)
        low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        assert np.allclose([found.mean - found.margin, found.mean + found.margin], [low, high])
        assert found.distinguishable == (stats.ttest_rel(ours, theirs).pvalue < 0.05)
    assert Summary((3.0,)).margin is None and not Summary((3.0,)).distinguishable
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


def test_tables_say_when_a_difference_is_not_distinguishable() -> None:
    base = Row("average", Summary((60.0, 70.0, 65.0)), None)
    clear = Row("better", Summary((70.1, 80.0, 74.9)), paired([70.1, 80.0, 74.9], [60.0, 70.0, 65.0]))
    vague = Row("maybe", Summary((59.0, 75.0, 66.0)), paired([59.0, 75.0, 66.0], [60.0, 70.0, 65.0]))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(terminal_table([base, clear, vague], "title", "average"))
    text = console.export_text()
    assert (
        "+10.0 ± 0.2" in text
        and "(n.d.)" in text.split("maybe")[1]
        and "(n.d.)" not in text.split("maybe")[0].split("better")[1]
    )


def test_the_log_survives_a_torn_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert list(log) == []
    log.append([{"event": "epoch", "client": "a", "epoch": epoch} for epoch in (1, 2)])
    with log.path.open("a") as file:
        file.write('{"event": "ep')
    assert [event["epoch"] for event in log] == [1, 2]
    log.keep(event for event in list(log) if event["epoch"] == 2)
    assert log.path.read_text() == '{"event": "epoch", "client": "a", "epoch": 2}\n'


def test_progress_tells_size_pace_and_snapshots_where_no_bar_is_drawn() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    with Live(console) as live:
        live.emit({"event": "plan", "lines": ["a run of 100 steps"], "steps": 100, "epochs": 10})
        live.emit({"event": "steps", "client": "a", "epoch": 1, "done": 2, "of": 10})
        live.started -= 60
        live.emit({"event": "epoch", "client": "a", "epoch": 1, "steps": 10})
        scored = {"event": "snapshot", "epoch": 1, "when": "epoch 1", "accuracy": {"iffi": 0.5, "average": 0.75}}
        for seconds, left in ((2, 9), (20, 0), (20, 9), (20, 8)):
            live.emit({"event": "scoring", "epoch": 1})
            assert live.bars.tasks[0].description == "scoring"
            live.emit({**scored, "seconds": seconds, "left": left})
            assert live.bars.tasks[0].description == "training"
    text = console.export_text()
    assert (
        text.count("scoring took") == 1 and "fusing and scoring took 20 s and comes 9 more times: about 3 min" in text
    )
    assert "a run of 100 steps" in text
    assert "about 11 min left" in text
    assert "epoch 1: average 75.0, iffi 50.0" in text


def test_words() -> None:
    assert [duration(seconds) for seconds in (4, 89, 300, 7200)] == ["4 s", "89 s", "5 min", "2.0 h"]
    assert [size_in_words(count) for count in (12, 1500, 45_000_000, 2.5e12)] == [
        "12 bytes",
        "1.5 kB",
        "45 MB",
        "2500 GB",
    ]


def test_randomness_belongs_to_its_purpose() -> None:
    drawn = {
        tuple(torch.rand(3, generator=generator(1, *who)).tolist())
        for who in [("a", 1), ("a", 2), ("b", 1), ("a", "1", "x")]
    }
    assert len(drawn) == 4
    assert torch.equal(torch.rand(3, generator=generator(1, "a", 1)), torch.rand(3, generator=generator(1, "a", 1)))
    assert derive(1, "a") != derive(2, "a") and 0 <= derive(1, "a") < 2**63


# --- other boards ----------------------------------------------------------------------------------------------------


def test_metrics_go_to_tensorboard_and_mlflow_too(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe = small_recipe(
        training__epochs=2, snapshots=1, fusion=["iffi"], local__workers=1, local__sinks=["tensorboard", "mlflow"]
    )
    result = run(recipe, tmp_path / "runs" / "one", data=digits)
    board = EventAccumulator(str(tmp_path / "runs" / "one" / "tensorboard"))
    board.Reload()
    told = [(event.step, event.value) for event in board.Scalars("accuracy/iffi")]
    assert [step for step, _ in told] == [1, 2] and told[-1][1] == pytest.approx(result.rules["iffi"])
    assert {"client_000/loss", "client_000/supervised-contrastive"} <= set(board.Tags()["scalars"])
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (kept,) = client.search_runs([client.get_experiment_by_name("oneround").experiment_id])
    assert (
        kept.data.metrics["accuracy/iffi"] == pytest.approx(result.rules["iffi"])
        and kept.data.params["method"] == "fafi"
    )
    assert [entry.step for entry in client.get_metric_history(kept.info.run_id, "client_000/loss")] == [1, 2]


def test_the_commit_is_that_of_the_checkout_marked_when_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src"
    package.mkdir()
    (package / "environment.py").write_text("one\n")
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    monkeypatch.delenv("ONEROUND_COMMIT", raising=False)
    assert environment.commit() is None  # no checkout

    def git(*words: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *named, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init")
    git("add", "-A")
    git("commit", "-m", "one")
    known = git("rev-parse", "HEAD")[:12]
    (package / "new.py").write_text("untracked\n")
    assert environment.commit() == known
    (package / "environment.py").write_text("two\n")
    assert environment.commit() == f"{known}-dirty"
    monkeypatch.setenv("ONEROUND_COMMIT", "told")
    assert environment.commit() == "told"


@pytest.mark.filterwarnings("error")
def test_long_names_leave_room_for_the_curves(tmp_path: Path) -> None:
    long = "mergenet teacher.encoder=cnn width=16 teacher.epochs=4 adapter.width=8 adapter.heads=2 adapter.layers=1"
    draw_accuracy({long: [{1: 0.2, 2: 0.4}], "average": [{1: 0.3, 2: 0.5}]}, tmp_path / "a.png", "a run")
    assert (tmp_path / "a.png").stat().st_size > 10_000
