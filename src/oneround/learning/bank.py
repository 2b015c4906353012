"""The public feature bank: a teacher learns from the server's public images, its features of them go to every site."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.data import Images
from oneround.errors import RecipeError
from oneround.learning.aside import recipe_aside, train_aside
from oneround.learning.loop import Emit
from oneround.models.prototype import PrototypeNet, on_cpu
from oneround.protocol import Broadcast
from oneround.protocol.model import preprocessing
from oneround.sections import Taught
from oneround.seeds import generator
from oneround.site import Site

log = logging.getLogger("oneround")


def make_bank(broadcast: Broadcast, server: Site | None, emit: Emit) -> dict[str, Tensor]:
    """Train the teacher from the broadcast's initial weights; `bank.features` (size, features), `bank.labels` (size,)."""
    recipe = broadcast.recipe
    assert recipe.bank is not None
    teacher, images = teach(broadcast, server, recipe.bank, "a bank", emit)
    # Randomly chosen; a bank as large as the public set holds all of it.
    chosen = torch.randperm(len(images), generator=generator(recipe.seeds.initialisation, "bank"))[: recipe.bank.size]
    kept = images.take(chosen.sort().values)
    assert server is not None
    unit = unit_features(teacher, kept.batches(server.device, *preprocessing(recipe)))
    return {"bank.features": on_cpu(unit), "bank.labels": kept.labels.clone()}


def teach(
    broadcast: Broadcast, server: Site | None, options: Taught, what: str, emit: Emit
) -> tuple[PrototypeNet, Images]:
    """A teacher trained on the server's public images, and those images."""
    if server is None or server.data is None or len(server.data) == 0:
        raise RecipeError(f"{what}: the server has no public images; set public, for example --set public=0.1")
    epochs = options.teacher_epochs
    told = f"the server's teacher learns from {len(server.data):,} public images ({epochs} epochs) and makes {what} of features"
    emit({"event": "prepare", "text": told})
    log.info(told)
    recipe = recipe_aside(broadcast.recipe, options.model_dump(mode="json")["teacher"], {"epochs": epochs})
    key = "training.batch_size"
    return train_aside(broadcast, recipe, broadcast.weights, server.data, server, "teacher", key), server.data


@torch.inference_mode()
def unit_features(net: PrototypeNet, batches: Iterable[Tensor]) -> Tensor:
    """(n, features) of length 1, without augmentation; batches of normalised images"""
    net.eval()
    return torch.cat([F.normalize(net.encoder(images), dim=1) for images in batches])
