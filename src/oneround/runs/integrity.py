"""Checks of the contents of a run's files, which can be damaged, edited, or cut off by a kill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Content(BaseModel):
    """A JSON file of a run: the keys it must have, with their types. It may have others."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, defer_build=True)


class ScoreContent(Content):
    """The score of a rule or client."""

    accuracy: Share
    confusion: list[list[Count]] = []
    per_class: list[Share | None] = []

    @model_validator(mode="after")
    def _as_many_classes(self) -> ScoreContent:
        classes = len(self.confusion)
        if any(len(row) != classes for row in self.confusion) or len(self.per_class) != classes:
            raise ValueError("confusion must be a square table, and per_class have an entry for each class")
        return self


class ResultContent(Content):
    """`result.json`"""

    partition: str
    remarks: list[Any]
    uploads: dict[str, Any]
    rules: dict[str, ScoreContent]
    clients: dict[str, ScoreContent]

    @model_validator(mode="after")
    def _rules_beside_clients(self) -> ResultContent:
        if self.clients and not self.rules:
            raise ValueError("clients are scored but no rules")
        return self


class PartitionContent(Content):
    """`partition.json`"""

    digest: str
    class_counts: Annotated[list[list[Count]], Field(min_length=1)]
    shared_samples: int


class EnvironmentContent(Content):
    """`environment.json`"""

    device: str
    packages: dict[str, Any]
    commit: str | None


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_share(value: Any) -> bool:
    """A finite number from 0 to 1."""
    return is_number(value) and 0 <= value <= 1


def valid_event(event: Any) -> dict[str, Any] | None:
    """An event that has the keys of its kind, without damaged gradients or validation accuracy; None for any other."""
    if not isinstance(event, dict) or not isinstance(event.get("epoch"), int):
        return None
    kind = event.get("event")
    owner = "rule" if kind in ("snapshot", "fusion") else "client"
    if not isinstance(kind, str) or not isinstance(event.get(owner), str):
        return None
    if kind in ("client", "snapshot") and not is_share(event.get("accuracy")):
        return None
    damaged = set()
    if not _are_gradients(event.get("gradients", {})):
        damaged.add("gradients")
    if not is_share(event.get("validation", 0)):
        damaged.add("validation")
    return {name: value for name, value in event.items() if name not in damaged} if damaged else event


def valid_entry(event: Mapping[str, Any]) -> dict[str, Any]:
    """Training metrics of a client in one epoch: the numbers, marks of trouble and gradients of a valid event."""
    entry: dict[str, Any] = {name: value for name, value in event.items() if is_number(value)}
    if isinstance(event.get("trouble"), list):
        entry["trouble"] = [str(kind) for kind in event["trouble"]]
    if "gradients" in event:
        entry["gradients"] = event["gradients"]
    return entry


def _are_gradients(traced: Any) -> bool:
    """Whether these are norms and cosines of gradients, by the tensor they were traced at."""
    return isinstance(traced, dict) and all(
        isinstance(measured, dict)
        and isinstance(measured.get(name), dict)
        and all(value is None or is_number(value) for value in measured[name].values())
        for measured in traced.values()
        for name in ("norm", "cosine")
    )
