"""A federation of three sites in one process: recipes, sites that misbehave, and what the server wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message

from conftest import small_recipe
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.federate.client_app import app as client_app
from oneround.federate.intake import UploadIntake
from oneround.federate.messages import TRAIN
from oneround.federate.server_app import Pace

NOW = Pace(poll=0.01, patience=0.0, farewell=0.0)


SHARES: dict[int, dict[str, Any]] = {10 + k: {"partition-id": k, "num-partitions": 3} for k in range(3)}


def three(**changes: Any) -> Recipe:
    return small_recipe(partition__clients=3, partition__alpha=0.3, local__workers=1, **changes)


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def log_of(folder: Path) -> str:
    return (folder / "run.log").read_text()


def deadline_when(patch: pytest.MonkeyPatch, true: Callable[[UploadIntake], bool]) -> None:
    """Let the recipe's deadline pass at a moment of the test's choice, however slow the machine is."""
    patch.setattr(UploadIntake, "waited", property(lambda intake: 1e9 if true(intake) else 0.0))


class Moody:
    """The ClientApp, except for one node, whose instructions go wrong so many times."""

    def __init__(self, node: int, error: int | None, times: int) -> None:
        self.node, self.error, self.left = node, error, times
        self.trained = 0

    def __call__(self, message: Message, context: Context) -> Message | None:
        train = message.metadata.message_type == TRAIN
        if train and context.node_id == self.node and self.left:
            self.left -= 1
            return None if self.error is None else Message(Error(self.error, "out of memory"), reply_to=message)
        self.trained += train
        return client_app(message, context)


def own_sites(digits: Dataset, tmp_path: Path) -> tuple[Recipe, dict[int, dict[str, Any]]]:
    """Two sites with .npz files whose classes are numbered each in its own way, and a server that has test images only."""
    names = ["zero", "one", "two"]
    (tmp_path / "server").mkdir()
    test = digits.test.labels < 3
    np.savez(
        tmp_path / "server" / "test.npz",
        x=digits.test.pixels[test].numpy(),
        y=np.array(names)[digits.test.labels[test]],
    )
    nodes = {}
    for number, order in enumerate((["one", "zero"], ["two", "une"])):
        meant = [names.index({"une": "one"}.get(word, word)) for word in order]
        mine = [int(at) for at, label in enumerate(digits.train.labels) if int(label) in meant][number::2]
        labels = np.array([meant.index(int(digits.train.labels[at])) for at in mine])
        np.savez(tmp_path / f"{number}.npz", x=digits.train.pixels[mine].numpy(), y=labels, class_names=order)
        file = tmp_path / f"site_{number}.yaml"
        file.write_text(f"name: site-{number}\ndata: {tmp_path / f'{number}.npz'}\nlabels: {{une: one}}\n")
        nodes[number] = {"site": str(file)}
    recipe = small_recipe(
        data={"kind": "sites", "classes": names, "size": 8, "grey": True}, partition__clients=2, training__epochs=3,
        training__augment__flip=0.0, fusion=["typicality-gated", "iffi"], local__data_path=str(tmp_path / "server"),
    )  # fmt: skip
    return recipe, nodes
