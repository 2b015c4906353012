"""Networks that the server trains on its own images: the teacher of a bank or of MergeNet, the student of an ensemble.

They use the clients' training loop and the clients' recipe without its client-only sections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from torch import Tensor

from oneround.config.recipe import Federated
from oneround.data import Images
from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.models.prototype import PrototypeNet
from oneround.protocol import Broadcast, blob
from oneround.site import Site
from oneround.training.loop import Emit, Learner, silent

CLIENT_ONLY = ("alignment", "bank", "queue", "reference", "companion", "generator", "sums")

OWN_TRAINING = {"milestones": [], "restart_optimizer": False, "sampling": "shuffle"}
"""Training options that networks trained at the server do not take from the clients' recipe."""


def public_images(server: Site, what: str, otherwise: str = "") -> Images:
    """The server's public images, for `what`; `otherwise`: what to set instead, if it works without them."""
    if not server.data:
        raise RecipeError(
            f"{what}: the server has no public images; set public, for example --set public=0.1{otherwise}"
        )
    return server.data


def server_recipe(
    recipe: Federated, objective: Mapping[str, Any], training: Mapping[str, Any], model: Mapping[str, Any] | None = None
) -> Federated:
    """The recipe of a network trained at the server: its own objective, and its own training and model options where given."""
    plain = recipe.plain() | dict.fromkeys(CLIENT_ONLY)
    plain |= {
        "objective": objective,
        "trace": {"every": 0},
        "fusion": ["average"],
        "rounds": 1,
        "participation": {},
        "snapshots": 0,
    }
    plain |= {"model": model or plain["model"], "training": plain["training"] | training}
    return Federated.model_validate(plain)


def train_on_server(
    broadcast: Broadcast,
    recipe: Federated,
    start: Mapping[str, Tensor],
    images: Images,
    server: Site,
    name: str,
    batch_key: str = "training.batch_size",
    teacher: Callable[[Tensor], Tensor] | None = None,
    folder: Path | None = None,
    emit: Emit = silent,
) -> PrototypeNet:
    """A network trained at the server from the weights `start`. `batch_key`: the recipe's key of its batch size.

    `folder`: of the state it resumes from after a kill, removed when it is trained; for these images and this recipe alone.
    """
    initial = replace(broadcast, recipe=recipe, weights=dict(start), generator={}, extras={}, round=1, digest="")
    with server.arithmetic(sum(tensor.numel() for tensor in start.values())):
        site = Site(name, images, folder, server.local)
        learner = Learner(initial, site, emit, teacher=teacher, batch_key=batch_key)
        learner.train(recipe.training.epochs)
    if learner.stopped:
        raise RunError(learner.stopped)
    if folder is not None:
        rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()  # where other states are, it stays
    return learner.net


def write_state(path: Path, kind: str, tensors: dict[str, Tensor], broadcast: Broadcast) -> None:
    """Write tensors that the server keeps from round to round."""
    blob.write(path, kind, tensors, {"recipe_digest": broadcast.digest})


def read_state(path: Path, kind: str, broadcast: Broadcast, fix: str) -> dict[str, Tensor]:
    """Read what `write_state` wrote; `fix`: what to do about a file that is missing, damaged or of another recipe."""
    try:
        manifest, tensors = blob.read(path, kind)
    except ProtocolError as error:
        raise RunError(f"{error}; {fix}") from None
    if manifest.get("recipe_digest") != broadcast.digest:
        raise RunError(f"{path}: the {kind} of another recipe; {fix}")
    return tensors
