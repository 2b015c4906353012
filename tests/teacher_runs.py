"""Whole runs with a large network at the server: digits, three clients, narrow networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import small_recipe
from oneround.config.recipe import Recipe
from oneround.global_model import GlobalModel
from oneround.mergenet import Merger
from oneround.runs.folder import RunFolder
from oneround.runs.log import MetricsLog
from oneround.training.step import Stepper

SHORT = {"training__schedule": "constant", "training__milestones": []}
TEACHER = {"encoder": {"kind": "cnn", "width": 8}, "epochs": 2}
ADAPTER = {"width": 8, "heads": 2, "layers": 1}


def federated(kind: str = "mergenet", rounds: int = 4, more: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """Digits, three clients, narrow networks, one epoch a round."""
    preset = {"mergenet": "mergenet", "taught": "fedavg+taught", "average": "fedavg"}[kind]
    extra = {"adapter": ADAPTER} if kind == "mergenet" else {}
    rule = {"kind": kind, **({} if kind == "average" else {"teacher": TEACHER, **extra, **(more or {})})}
    usual = {
        "rounds": rounds, "partition__clients": 3, "partition__alpha": 1.0, "local__workers": 1, "public": 0.3, "validation": 0.2,
        "fusion": [rule, "average"] if kind != "average" else ["average"], **SHORT,
    }  # fmt: skip
    return small_recipe(preset, **{**usual, **changes})


def fusions(folder: Path) -> list[dict[str, Any]]:
    return [event for event in MetricsLog(folder / "metrics.jsonl") if event["event"] == "fusion"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return GlobalModel.load(folder / "model").inference.state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


def contents(folder: Path) -> list[str]:
    return [upload.content for upload in RunFolder(folder).uploads()]


def nothing_trained(folder: Path) -> bool:
    """Whether a run was refused before anybody learned anything."""
    return not any((folder / name).exists() for name in ("recipe.yaml", "uploads", "server", "metrics.jsonl"))


def short_of_memory(monkeypatch: pytest.MonkeyPatch, wide: int, room: int) -> None:
    """Networks of that width have room for so many samples and no more."""
    step = Stepper._step

    def short(self: Stepper, pixels: Any, labels: Any, numbers: Any) -> None:
        if self.recipe.model.encoder.dump()["width"] == wide and len(labels) > room:  # type: ignore[union-attr]
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self, pixels, labels, numbers)

    monkeypatch.setattr(Stepper, "_step", short)


def scale_outputs(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """What adapters make of the student's matrices, times this factor."""
    outputs = Merger._outputs

    def scaled(self: Merger, *given: Any) -> dict[str, torch.Tensor]:
        return {name: factor * value for name, value in outputs(self, *given).items()}

    monkeypatch.setattr(Merger, "_outputs", scaled)
