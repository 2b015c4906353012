"""The server's large network: from a file, or trained on the server's public images; fixed, or learning on between rounds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.learning.aside import recipe_aside, train_aside
from oneround.models.prototype import PrototypeNet, build, initialise
from oneround.parts import In, Part, Strict
from oneround.protocol import Broadcast, blob
from oneround.protocol.start import start_from
from oneround.recipe import Federated, Local
from oneround.sections import Count, Positive
from oneround.site import Site

log = logging.getLogger("oneround")


class Larger(Strict):
    """The network whose knowledge goes into the students'."""

    encoder: Annotated[Part, In("encoder")] = Field(default="resnet50", validate_default=True)
    learning_rate: Positive = 0.05


class Teacher(Larger):
    """One that the server brings."""

    from_file: bool = False
    """The server brings its weights (`local.teacher_weights`); otherwise it is trained on public images."""
    epochs: Count = 30
    """How long it is trained before the first round."""
    batch_size: Count = 128
    learns_on: bool = False
    """Train it on public images for one more epoch before every fusion."""

    @property
    def needs_public(self) -> bool:
        return self.learns_on or not self.from_file

    def check(self, broadcast: Broadcast, local: Local) -> None:
        """Refuse, before anything is trained, a file that is not there, not wanted or of another network."""
        if self.from_file:
            _from_file(self, broadcast, local)
        elif local.teacher_weights is not None:
            raise RecipeError(
                f"local.teacher_weights = {local.teacher_weights}: the teacher is trained on public images instead; set from_file: true"
            )


def teacher_of(options: Teacher, broadcast: Broadcast, server: Site, lessons: int, batch_key: str) -> dict[str, Tensor]:
    """The teacher's weights before its so many-th lesson to students; made when first asked for and kept in the server's folder.

    `batch_key`: what the recipe calls its batch size.
    """
    place = server.kept_for(options)
    begun = place / "teacher.safetensors"
    if not begun.is_file():
        _keep(begun, _first(options, broadcast, server, batch_key), broadcast)
    if not options.learns_on:
        return _read(begun, broadcast)
    known = max((number for number in range(1, lessons + 1) if _at(place, number).is_file()), default=0)
    weights = _read(_at(place, known) if known else begun, broadcast)
    for number in range(known + 1, lessons + 1):
        weights = _trained(options, broadcast, server, weights, 1, f"teacher/{number}", batch_key)
        _keep(_at(place, number), weights, broadcast)
        _at(place, number - 2).unlink(missing_ok=True)
    return weights


def _at(place: Path, number: int) -> Path:
    return place / f"teacher_{number:03d}.safetensors"


def network_of(options: Larger, broadcast: Broadcast) -> PrototypeNet:
    """The teacher's network with fresh weights."""
    seed = broadcast.recipe.seeds.initialisation
    return initialise(options.encoder, broadcast.shape[0], broadcast.classes, seed, "linear")


def layout_of(options: Larger, broadcast: Broadcast) -> dict[str, Tensor]:
    """Names and shapes of the teacher's tensors, without their numbers."""
    with torch.device("meta"):
        return build(options.encoder, broadcast.shape[0], broadcast.classes, "linear").state_dict()


def _first(options: Teacher, broadcast: Broadcast, server: Site, batch_key: str) -> dict[str, Tensor]:
    if options.from_file:
        return _from_file(options, broadcast, server.local)
    fresh = network_of(options, broadcast).weights()
    return _trained(options, broadcast, server, fresh, options.epochs, "teacher", batch_key)


def _from_file(options: Teacher, broadcast: Broadcast, local: Local) -> dict[str, Tensor]:
    if local.teacher_weights is None:
        raise RecipeError(
            "fusion: teacher.from_file needs local.teacher_weights, a safetensors file; or set from_file: false"
        )
    net = network_of(options, broadcast)
    start_from(local.teacher_weights, net, "teacher_weights", whole=True)
    return net.weights()


def _trained(
    options: Teacher,
    broadcast: Broadcast,
    server: Site,
    start: dict[str, Tensor],
    epochs: int,
    name: str,
    batch_key: str,
) -> dict[str, Tensor]:
    if server.data is None or len(server.data) == 0:
        raise RecipeError(
            "fusion: the teacher has nothing to learn from; set public (for example 0.1), or teacher.from_file"
        )
    log.info("%s: %s learns from %d public images, %d epochs", name, options.encoder.label, len(server.data), epochs)
    recipe = teachers_recipe(broadcast.recipe, options, epochs, options.batch_size)
    return train_aside(broadcast, recipe, start, server.data, server, name, batch_key).weights()


def teachers_recipe(recipe: Federated, options: Larger, epochs: int, batch_size: int) -> Federated:
    """What the teacher does: cross-entropy on its own network."""
    training: dict[str, object] = {
        "epochs": epochs, "batch_size": batch_size, "learning_rate": options.learning_rate, "schedule": "cosine" if epochs > 1 else "constant",
        "milestones": [], "restart_optimizer": False, "sampling": "shuffle", "clip_norm": 1.0,
    }  # fmt: skip
    model = {"encoder": options.encoder.dump(), "head": "linear"}
    return recipe_aside(recipe, {"terms": {"cross-entropy": {}}}, training, model)


def _keep(path: Path, weights: dict[str, Tensor], broadcast: Broadcast) -> None:
    blob.write_durably(path, blob.pack("teacher", weights, {"recipe_digest": broadcast.digest}))


def _read(path: Path, broadcast: Broadcast) -> dict[str, Tensor]:
    try:
        manifest, weights = blob.read(path, "teacher")
    except ProtocolError as error:
        raise RunError(f"{error}; remove it and resume, then it is made again") from None
    if manifest.get("recipe_digest") != broadcast.digest:
        raise RunError(f"{path}: the teacher of another recipe; remove it to train it anew")
    return weights
