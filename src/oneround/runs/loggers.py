"""Loggers of a run's metrics besides `metrics.jsonl`: TensorBoard, MLflow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from oneround.config.recipe import Recipe
from oneround.errors import RecipeError

Logger = Callable[[str, float, int], object]
"""A function of name, value and epoch."""


def numbers(event: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """The numbers of an event, with name and epoch: `accuracy/iffi`, `client_000/lambda_effective`, …"""
    epoch = event["epoch"]
    if event["event"] == "snapshot":
        yield f"accuracy/{event['rule']}", event["accuracy"], epoch
    elif event["event"] == "client":
        yield f"{event['client']}/accuracy_alone", event["accuracy"], epoch
    elif event["event"] in ("epoch", "fusion"):
        who = event.get("client") or event["rule"]
        for name, value in event.items():
            if isinstance(value, float):
                yield f"{who}/{name}", value, epoch


def write_events(events: Iterable[dict[str, Any]], loggers: Sequence[Logger]) -> None:
    """Write every number of every event to every logger."""
    for write, event in product(loggers, events):
        for number in numbers(event):
            write(*number)


@contextmanager
def open_loggers(recipe: Recipe, folder: Path) -> Iterator[list[Logger]]:
    """Open the loggers in `local.sinks` for the duration of a run."""
    makers = {"tensorboard": _tensorboard, "mlflow": _mlflow}
    with ExitStack() as stack:
        yield [stack.enter_context(makers[name](recipe, folder)) for name in recipe.local.sinks]


@contextmanager
def _tensorboard(_: Recipe, folder: Path) -> Iterator[Logger]:
    """Event files in RUN/tensorboard: `tensorboard --logdir runs`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RecipeError("local.sinks: tensorboard is not installed here; pip install tensorboard") from None

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        yield writer.add_scalar


@contextmanager
def _mlflow(recipe: Recipe, folder: Path) -> Iterator[Logger]:
    """A run in $MLFLOW_TRACKING_URI, or in mlflow.db beside the run folder: `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`."""
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise RecipeError(
            "local.sinks: mlflow is not installed here; pip install mlflow-skinny sqlalchemy alembic"
        ) from None
    parent = folder.resolve().parent
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{parent / 'mlflow.db'}"))
    existing = client.get_experiment_by_name("oneround")
    experiment = (
        existing.experiment_id if existing else client.create_experiment("oneround", (parent / "mlflow").as_uri())
    )
    id_file = folder / "mlflow_run"  # a resumed run continues the same MLflow run
    if id_file.is_file():
        run_id = id_file.read_text()
        client.update_run(run_id, "RUNNING")
    else:
        run_id = client.create_run(experiment, run_name=folder.name).info.run_id
        for key, value in (("method", recipe.method), ("recipe_digest", recipe.digest), ("folder", str(folder))):
            client.log_param(run_id, key, value)
        id_file.write_text(run_id)

    try:
        yield lambda name, value, epoch: client.log_metric(run_id, name, value, step=epoch)
    except BaseException:
        client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id)
