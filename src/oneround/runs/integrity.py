"""Schemas of a run's JSON files, which may be damaged or edited."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Content(BaseModel):
    """A JSON file of a run: its required keys and their types. It may have more."""

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
