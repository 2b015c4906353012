"""Networks the server trains for itself, on images of its own: the teacher of a bank or of MergeNet, the student of an ensemble.

They learn in the same loop as every client, by a recipe that is the clients' without what only clients have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from oneround.data import Images
from oneround.errors import RunError
from oneround.learning.loop import Learner
from oneround.models.prototype import PrototypeNet
from oneround.protocol import Broadcast
from oneround.recipe import Federated
from oneround.site import Site

OF_CLIENTS = ("alignment", "bank", "queue", "reference", "companion")


def recipe_aside(
    recipe: Federated, objective: Mapping[str, Any], training: Mapping[str, Any], model: Mapping[str, Any] | None = None
) -> Federated:
    """What such a network does: its own objective, and its own training and model where they are named."""
    plain = recipe.plain() | dict.fromkeys(OF_CLIENTS)
    plain |= {"objective": objective, "trace": {"every": 0}, "fusion": ["average"], "rounds": 1, "participation": {}}
    plain |= {"sums": None, "model": model or plain["model"], "training": plain["training"] | training}
    return Federated.model_validate(plain)


def train_aside(
    broadcast: Broadcast, recipe: Federated, start: Mapping[str, Tensor], images: Images, server: Site, name: str, batch_key: str,
    teacher: Callable[[Tensor], Tensor] | None = None,
) -> PrototypeNet:  # fmt: skip
    """Such a network, trained from `start`. `batch_key`: what a recipe calls its batch size."""
    sent = replace(broadcast, recipe=recipe, weights=dict(start), extras={}, round=1)
    with server.arithmetic(sum(tensor.numel() for tensor in start.values()), search=True):
        learner = Learner(sent, Site(name, images, local=server.local), teacher=teacher, batch_key=batch_key)
        learner.train(recipe.training.epochs)
    if learner.stopped:
        raise RunError(learner.stopped)
    return learner.net
