"""Where else a run's metrics go, for people who have their boards already: TensorBoard, MLflow. `metrics.jsonl` is always written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from oneround.errors import RecipeError
from oneround.recipe import Recipe


class Sink(Protocol):
    """Takes numbers with a name and an epoch."""

    def write(self, name: str, value: float, epoch: int) -> None: ...


def numbers(event: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """What of an event is a number over epochs: `accuracy/iffi`, `client_000/lambda_effective`, …"""
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


def pour(events: Iterable[dict[str, Any]], sinks: Sequence[Sink]) -> None:
    """Every number of every event into every sink."""
    if sinks:
        for event in events:
            for name, value, epoch in numbers(event):
                for sink in sinks:
                    sink.write(name, value, epoch)


@contextmanager
def opened(recipe: Recipe, folder: Path) -> Iterator[list[Sink]]:
    """The sinks the local half names, for the length of a run."""
    makers = {"tensorboard": _tensorboard, "mlflow": _mlflow}
    with ExitStack() as stack:
        yield [stack.enter_context(makers[name](recipe, folder)) for name in recipe.local.sinks]


@contextmanager
def _tensorboard(_: Recipe, folder: Path) -> Iterator[Sink]:
    """Event files in RUN/tensorboard: `tensorboard --logdir runs`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RecipeError("local.sinks: tensorboard is not installed here; pip install tensorboard") from None

    class Board:
        def write(self, name: str, value: float, epoch: int) -> None:
            writer.add_scalar(name, value, epoch)

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        yield Board()


@contextmanager
def _mlflow(recipe: Recipe, folder: Path) -> Iterator[Sink]:
    """A run in $MLFLOW_TRACKING_URI, or in mlflow.db beside the run folder: `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`."""
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise RecipeError(
            "local.sinks: mlflow is not installed here; pip install mlflow-skinny sqlalchemy alembic"
        ) from None
    beside = folder.resolve().parent
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{beside / 'mlflow.db'}"))
    known = client.get_experiment_by_name("oneround")
    experiment = known.experiment_id if known else client.create_experiment("oneround", (beside / "mlflow").as_uri())
    told = folder / "mlflow_run"  # a resumed run goes on in the same one
    if told.is_file():
        number = told.read_text()
    else:
        number = client.create_run(experiment, run_name=folder.name).info.run_id
        for key, value in (("method", recipe.method), ("recipe_digest", recipe.digest), ("folder", str(folder))):
            client.log_param(number, key, value)
        told.write_text(number)

    class Flow:
        def write(self, name: str, value: float, epoch: int) -> None:
            client.log_metric(number, name, value, step=epoch)

    yield Flow()
    client.set_terminated(number)
