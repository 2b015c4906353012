"""The server's large network: from a file, or trained on the server's public images; fixed, or trained on between rounds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from oneround.config.recipe import Federated, Local
from oneround.config.sections import Count, LargerNetwork
from oneround.errors import RecipeError
from oneround.models.pretrained import load_weights
from oneround.models.prototype import PrototypeNet, build, initialise
from oneround.protocol import Broadcast
from oneround.site import Site
from oneround.training.server_side import (
    OWN_TRAINING,
    public_images,
    read_state,
    server_recipe,
    train_on_server,
    write_state,
)

log = logging.getLogger("oneround")


class Teacher(LargerNetwork):
    """The server's teacher."""

    from_file: bool = False
    """Read its weights from a file (`local.teacher_weights`); otherwise train it on public images."""
    epochs: Count = 30
    """Epochs of its training before the first round."""
    batch_size: Count = 128
    learns_on: bool = False
    """Train it on public images for one more epoch before every fusion."""
    control: Literal["none", "zero", "random"] = "none"
    """In the teacher's place, to see what its knowledge is worth: zeros, or its network as it is initialised."""

    @model_validator(mode="after")
    def _control_learns_nothing(self) -> Teacher:
        if self.control != "none" and (self.from_file or self.learns_on):
            other = "from_file" if self.from_file else "learns_on"
            raise ValueError(
                f"control = {self.control}: stands in for a teacher that knows something; leave {other} out, or control"
            )
        return self

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `control` where there is none: recipes of before keep their digest, and runs their folders of state."""
        plain: dict[str, Any] = write(self)
        return {key: value for key, value in plain.items() if (key, value) != ("control", "none")}

    @property
    def needs_public(self) -> bool:
        return self.control == "none" and (self.learns_on or not self.from_file)

    def check(self, broadcast: Broadcast, local: Local) -> None:
        """Refuse, before training, a file that is missing, unused or of another network."""
        if self.from_file:
            _from_file(self, broadcast, local)
        elif local.teacher_weights is not None:
            raise RecipeError(
                f"local.teacher_weights = {local.teacher_weights}: the teacher is trained on public images instead; set from_file: true"
            )


def teacher_of(options: Teacher, broadcast: Broadcast, server: Site, fusion: int, batch_key: str) -> dict[str, Tensor]:
    """The teacher's weights for fusion number `fusion`, made on first use and stored in the server's folder.

    `batch_key`: the recipe's key of its batch size.
    """
    folder = server.state_folder(options)

    def path(number: int) -> Path:
        return folder / (f"teacher_{number:03d}.safetensors" if number else "teacher.safetensors")

    def trained(start: dict[str, Tensor], epochs: int, name: str) -> dict[str, Tensor]:
        images = public_images(server, "fusion: teacher", ", or teacher.from_file")
        log.info("%s: %s learns from %d public images, %d epochs", name, options.encoder.label, len(images), epochs)
        recipe = teacher_recipe(broadcast.recipe, options, epochs, options.batch_size)
        return train_on_server(broadcast, recipe, start, images, server, name, batch_key).weights()

    if not path(0).is_file():
        if options.from_file:
            weights = _from_file(options, broadcast, server.local)
        elif options.control != "none":
            weights = _control(options, broadcast)
        else:
            weights = trained(network_of(options, broadcast).weights(), options.epochs, "teacher")
        write_state(path(0), "teacher", weights, broadcast)
    if not options.learns_on:
        fusion = 0
    last = max(number for number in range(fusion + 1) if path(number).is_file())
    weights = read_state(path(last), "teacher", broadcast, "remove it and resume, then it is made again")
    for number in range(last + 1, fusion + 1):
        weights = trained(weights, 1, f"teacher/{number}")
        write_state(path(number), "teacher", weights, broadcast)
        if number > 2:
            path(number - 2).unlink(missing_ok=True)
    return weights


def network_of(options: LargerNetwork, broadcast: Broadcast) -> PrototypeNet:
    """The teacher's network with fresh weights."""
    seed = broadcast.recipe.seeds.initialisation
    return initialise(options.encoder, broadcast.shape[0], broadcast.classes, seed, "linear")


def layout_of(options: LargerNetwork, broadcast: Broadcast) -> dict[str, Tensor]:
    """The teacher's tensors on the meta device: names and shapes without values."""
    with torch.device("meta"):
        return build(options.encoder, broadcast.shape[0], broadcast.classes, "linear").state_dict()


def _from_file(options: Teacher, broadcast: Broadcast, local: Local) -> dict[str, Tensor]:
    if local.teacher_weights is None:
        raise RecipeError(
            "fusion: teacher.from_file needs local.teacher_weights, a safetensors file; or set from_file: false"
        )
    net = network_of(options, broadcast)
    load_weights(local.teacher_weights, net, "teacher_weights", whole=True)
    return net.weights()


def _control(options: Teacher, broadcast: Broadcast) -> dict[str, Tensor]:
    """Weights that know nothing of the task; norm statistics stay, so that a network of zeros has finite outputs."""
    weights = network_of(options, broadcast).weights()
    if options.control == "zero":
        weights = {name: torch.zeros_like(value) if value.dim() > 1 else value for name, value in weights.items()}
    return weights


def teacher_recipe(recipe: Federated, options: LargerNetwork, epochs: int, batch_size: int) -> Federated:
    """The teacher's recipe: cross-entropy on its own network."""
    training = OWN_TRAINING | {
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": options.learning_rate,
        "schedule": "cosine" if epochs > 1 else "constant",
        "clip_norm": 1.0,
    }
    model = {"encoder": options.encoder.dump(), "head": "linear"}
    return server_recipe(recipe, {"terms": {"cross-entropy": {}}}, training, model)
