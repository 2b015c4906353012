"""Networks the server trains for itself learn in the clients' loop, by a recipe without what only clients have."""

from __future__ import annotations

import pytest
import torch

from clients import prepared
from oneround.config.load import load
from oneround.data import Dataset
from oneround.errors import RunError
from oneround.models.prototype import PrototypeNet, network_from
from oneround.site import Site
from oneround.training.server_side import server_recipe, train_on_server

PLAIN = {"terms": {"cross-entropy": {}}}


def test_its_recipe_has_nothing_that_only_clients_have() -> None:
    clients = load("v6", [("model.encoder", "cnn"), ("sums", {}), ("training.batch_size", 48)]).federated
    own = server_recipe(clients, PLAIN, {"epochs": 3}, {"encoder": "resnet18", "head": "linear"})
    absent = ("alignment", "bank", "queue", "reference", "companion", "sums")
    assert clients.bank and clients.sums and all(getattr(own, name) is None for name in absent)
    assert list(own.objective.terms) == ["cross-entropy"] and not own.objective.stages
    assert (own.training.epochs, own.training.batch_size, own.rounds, own.trace.every) == (3, 48, 1, 0)
    assert own.encoder.kind == "resnet18" and own.model.head == "linear"
    assert server_recipe(clients, PLAIN, {}).encoder == clients.encoder, "the clients' network unless another is named"


def test_it_learns_from_the_images_of_the_server(digits: Dataset) -> None:
    broadcast, images = prepared(digits), digits.train.take(torch.arange(300))
    start = {name: value.clone() for name, value in broadcast.weights.items()}
    recipe = server_recipe(broadcast.recipe, PLAIN, {"epochs": 12, "learning_rate": 0.1})
    net = train_on_server(broadcast, recipe, start, images, Site("server"), "teacher", "training.batch_size")

    @torch.no_grad()
    def accuracy(net: PrototypeNet) -> float:
        return float((net.eval()((images.pixels.float() / 255 - 0.5) / 0.5).argmax(1) == images.labels).float().mean())

    assert accuracy(net) > 2 * accuracy(network_from(broadcast.recipe.encoder, 1, 10, start))
    assert all(torch.equal(value, broadcast.weights[name]) for name, value in start.items()), "where it starts stays"


def test_training_that_is_stopped_is_an_error_that_names_the_network(digits: Dataset) -> None:
    broadcast = prepared(digits)
    recipe = server_recipe(broadcast.recipe, PLAIN, {"epochs": 3, "learning_rate": 1e30, "clip_norm": 0.0})
    images = digits.train.take(torch.arange(200))
    with pytest.raises(RunError, match=r"^teacher, epoch \d: the loss or its gradient is not finite"):
        train_on_server(broadcast, recipe, broadcast.weights, images, Site("server"), "teacher", "training.batch_size")
