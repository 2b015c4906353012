"""TensorBoard and MLflow get what the log has."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from conftest import small_recipe
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.runs.loggers import open_loggers
from oneround.simulate import run


@pytest.mark.slow
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
    scalars = [(event.step, event.value) for event in board.Scalars("accuracy/iffi")]
    assert [step for step, _ in scalars] == [1, 2] and scalars[-1][1] == pytest.approx(result.rules["iffi"])
    assert {"client_000/loss", "client_000/supervised-contrastive"} <= set(board.Tags()["scalars"])
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    (kept,) = client.search_runs([client.get_experiment_by_name("oneround").experiment_id])
    assert (
        kept.data.metrics["accuracy/iffi"] == pytest.approx(result.rules["iffi"])
        and kept.data.params["method"] == "fafi"
    )
    assert [entry.step for entry in client.get_metric_history(kept.info.run_id, "client_000/loss")] == [1, 2]


def test_a_run_that_fails_does_not_stay_running_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    recipe, client, states = (
        small_recipe(local__sinks=["mlflow"]),
        MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}"),
        [],
    )
    for error in (RunError("stopped"), KeyboardInterrupt(), None):
        with suppress(RunError, KeyboardInterrupt), open_loggers(recipe, tmp_path):
            states.append(client.get_run((tmp_path / "mlflow_run").read_text()).info.status)
            if error is not None:
                raise error
        states.append(client.get_run((tmp_path / "mlflow_run").read_text()).info.status)
    assert states == ["RUNNING", "FAILED"] * 2 + ["RUNNING", "FINISHED"], "a resumed run goes on in the same one"
