"""The public feature bank: features of the server's public images by a teacher trained on them, sent to every site."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.config.sections import Bank, Reference
from oneround.data.augment import preprocessing
from oneround.models.prototype import PrototypeNet, on_cpu
from oneround.protocol import Broadcast
from oneround.seeds import generator
from oneround.site import Site
from oneround.training.loop import Emit
from oneround.training.server_side import public_images, server_recipe, train_on_server

log = logging.getLogger("oneround")


def make_bank(options: Bank, broadcast: Broadcast, server: Site, emit: Emit) -> dict[str, Tensor]:
    """The broadcast's extras `bank.features` (size, features) and `bank.labels` (size,)."""
    features, labels = public_features("bank", options, broadcast, server, emit)
    return {"bank.features": features, "bank.labels": labels}


def public_features(
    name: str, options: Bank | Reference, broadcast: Broadcast, server: Site, emit: Emit
) -> tuple[Tensor, Tensor]:
    """Unit features (n, features) and labels (n,) of up to `options.size` random public images, for the section `name`.

    A teacher makes them, trained on all public images from the broadcast's initial weights.
    """
    images, epochs = public_images(server, f"a {name}"), options.teacher_epochs
    message = f"the server's teacher learns from {len(images):,} public images ({epochs} epochs) and makes a {name} of features"
    emit({"event": "prepare", "text": message})
    log.info(message)
    recipe = server_recipe(broadcast.recipe, options.teacher.model_dump(mode="json"), {"epochs": epochs})
    teacher = train_on_server(broadcast, recipe, broadcast.weights, images, server, "teacher")
    order = torch.randperm(len(images), generator=generator(broadcast.recipe.seeds.initialisation, name))
    chosen = images.take(order[: options.size].sort().values)
    unit = unit_features(teacher, chosen.batches(server.device, *preprocessing(broadcast.recipe)))
    return on_cpu(unit), chosen.labels


@torch.inference_mode()
def unit_features(net: PrototypeNet, batches: Iterable[Tensor]) -> Tensor:
    """(n, features) of length 1, without augmentation; batches of normalised images"""
    net.eval()
    return torch.cat([F.normalize(net.encoder(images), dim=1) for images in batches])
