"""The server's large network: from a file, or trained on the server's public images; fixed, or learning on between rounds."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field
from torch import Tensor

from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.learning.loop import Learner
from oneround.models.prototype import PrototypeNet, initialise
from oneround.parts import In, Part, Strict
from oneround.protocol import Broadcast, blob
from oneround.protocol.start import start_from
from oneround.recipe import Federated
from oneround.sections import Count, Positive
from oneround.site import Site

log = logging.getLogger("oneround")


class Teacher(Strict):
    """The network whose knowledge goes into the students'."""

    encoder: Annotated[Part, In("encoder")] = Field(default="resnet50", validate_default=True)
    from_file: bool = False
    """The server brings its weights (`local.teacher_weights`); otherwise it is trained on public images."""
    epochs: Count = 30
    """How long it is trained before the first round."""
    batch_size: Count = 128
    learning_rate: Positive = 0.05
    learns_on: bool = False
    """Train it on public images for one more epoch before every fusion."""

    @property
    def needs_public(self) -> bool:
        return self.learns_on or not self.from_file


def teacher_of(options: Teacher, broadcast: Broadcast, server: Site, lessons: int) -> dict[str, Tensor]:
    """The teacher's weights before its so many-th lesson to students; made when first asked for and kept in the server's folder."""
    place = kept_by(server, options)
    begun = place / "teacher.safetensors"
    if not begun.is_file():
        _keep(begun, _first(options, broadcast, server), broadcast)
    if not options.learns_on:
        return _read(begun, broadcast)
    known = max((number for number in range(1, lessons + 1) if _at(place, number).is_file()), default=0)
    weights = _read(_at(place, known) if known else begun, broadcast)
    for number in range(known + 1, lessons + 1):
        weights = _trained(options, broadcast, server, weights, 1, f"teacher/{number}")
        _keep(_at(place, number), weights, broadcast)
        _at(place, number - 2).unlink(missing_ok=True)
    return weights


def _at(place: Path, number: int) -> Path:
    return place / f"teacher_{number:03d}.safetensors"


def kept_by(server: Site, options: Strict) -> Path:
    """The folder in which the server keeps what belongs to these options from round to round."""
    if server.folder is None:
        raise RunError("fusion: a teacher and an adapter are kept between rounds; give the server site a folder")
    return server.folder / "server" / hashlib.sha256(options.model_dump_json().encode()).hexdigest()[:8]


def network_of(options: Teacher, broadcast: Broadcast) -> PrototypeNet:
    """The teacher's network with fresh weights."""
    seed = broadcast.recipe.seeds.initialisation
    return initialise(options.encoder, broadcast.shape[0], broadcast.classes, seed, "linear")


def _first(options: Teacher, broadcast: Broadcast, server: Site) -> dict[str, Tensor]:
    net = network_of(options, broadcast)
    if options.from_file:
        if server.local.teacher_weights is None:
            raise RecipeError(
                "fusion: teacher.from_file needs local.teacher_weights, a safetensors file; or set from_file: false"
            )
        start_from(server.local.teacher_weights, net, "teacher_weights", whole=True)
        return net.weights()
    return _trained(options, broadcast, server, net.weights(), options.epochs, "teacher")


def _trained(
    options: Teacher, broadcast: Broadcast, server: Site, start: dict[str, Tensor], epochs: int, name: str
) -> dict[str, Tensor]:
    if server.data is None or len(server.data) == 0:
        raise RecipeError(
            "fusion: the teacher has nothing to learn from; set public (for example 0.1), or teacher.from_file"
        )
    log.info("%s: %s learns from %d public images, %d epochs", name, options.encoder.label, len(server.data), epochs)
    sent = replace(
        broadcast, recipe=teachers_recipe(broadcast.recipe, options, epochs), weights=start, extras={}, round=1
    )
    learner = Learner(sent, Site(name, server.data, local=server.local))
    learner.train(epochs)
    if learner.stopped:
        raise RunError(learner.stopped)
    return learner.net.weights()


def teachers_recipe(recipe: Federated, options: Teacher, epochs: int) -> Federated:
    """What the teacher does: cross-entropy on its own network."""
    plain = recipe.plain() | dict.fromkeys(("alignment", "bank", "queue", "reference", "companion", "sums"))
    plain |= {
        "objective": {"terms": {"cross-entropy": {}}}, "model": {"encoder": options.encoder.dump(), "head": "linear"},
        "trace": {"every": 0}, "fusion": ["average"], "rounds": 1, "participation": {}, "method": f"teacher of {recipe.method}",
    }  # fmt: skip
    plain["training"] |= {
        "epochs": epochs, "batch_size": options.batch_size, "learning_rate": options.learning_rate, "schedule": "cosine" if epochs > 1 else "constant",
        "milestones": [], "restart_optimizer": False, "sampling": "shuffle", "clip_norm": 1.0,
    }  # fmt: skip
    return Federated.model_validate(plain)


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
