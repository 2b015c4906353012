"""The three acts of one-shot learning: prepare (server), train (site), fuse (server).

broadcast = prepare(recipe, data.class_names, data.shape)
uploads = [train(broadcast, site) for site in sites]
model = fuse(uploads, broadcast)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from oneround.data import Dataset
from oneround.errors import ProtocolError, RunError
from oneround.fusion import Rule, rules
from oneround.learning import Emit, Learner, silent
from oneround.learning.anchors import anchors
from oneround.learning.bank import make_bank, unit_features
from oneround.learning.reference import make_reference
from oneround.models import PrototypeNet, initialise
from oneround.models.prototype import build
from oneround.protocol import Broadcast, GlobalModel, Upload
from oneround.protocol.encoding import as_received, as_sent, bytes_of, layout_of
from oneround.protocol.messages import Shapes, size_of
from oneround.protocol.model import preprocessing
from oneround.protocol.reveal import told_counts, told_history
from oneround.reading import change
from oneround.recipe import Federated, Local, Recipe
from oneround.site import Site


def settle(recipe: Recipe, data: Dataset) -> Recipe:
    """The recipe with what depends on the data filled in: the encoder, and whether views may be mirrored."""
    changes: dict[str, object] = {}
    if recipe.model.encoder is None:
        changes["model.encoder"] = "cnn" if max(data.shape[1:]) <= 16 else "resnet18"
    if recipe.training.augment.flip is None:
        changes["training.augment.flip"] = 0.5 if data.mirror else 0.0
    return change(recipe, changes) if changes else recipe


def prepare(
    recipe: Recipe,
    class_names: tuple[str, ...],
    shape: tuple[int, int, int],
    server: Site | None = None,
    emit: Emit = silent,
) -> Broadcast:
    """Server: what every site starts from. `server` holds the public images, for recipes that need some."""
    assert recipe.model.encoder is not None, "settle the recipe first"
    net = initialise(recipe.model.encoder, shape[0], len(class_names), recipe.seeds.initialisation)
    if recipe.local.initial_weights:
        _start_from(recipe.local.initial_weights, net)
    broadcast = Broadcast(recipe.federated, class_names, shape, net.weights())
    extras: dict[str, Tensor] = {}
    if recipe.alignment is not None:
        maker = anchors.of(recipe.alignment.anchors)
        extras["anchors"] = maker.make(len(class_names), net.encoder.features, recipe.seeds.initialisation)
    with (server or Site("server")).arithmetic(net.size):
        extras |= make_bank(broadcast, server, emit) if recipe.bank else {}
        extras |= make_reference(broadcast, server, emit) if recipe.reference else {}
    return replace(broadcast, extras=extras)


@dataclass(frozen=True)
class Traffic:
    """What crosses the network for one client, known before anything is trained."""

    parameters: int
    down: int
    """Bytes"""
    up: int


def traffic(recipe: Federated, classes: int, channels: int, public: int) -> Traffic:
    """For a task of that many classes and channels, with so many public images at the server."""
    assert recipe.model.encoder is not None, "settle the recipe first"
    with torch.device("meta"):
        net = build(recipe.model.encoder, channels, classes)
    network, features = size_of(net.state_dict()), net.encoder.features
    extras = 4 * classes * features if recipe.alignment else 0
    if recipe.bank is not None:
        extras += min(recipe.bank.size, public) * (4 * features + 8)
    if recipe.reference is not None:
        size = recipe.reference.size
        extras += (min(size, public) if recipe.reference.source == "public" else size) * 4 * features
    asked = {name: (shape, torch.float32) for name, shape in asked_by(rules_of(recipe), classes, features).items()}
    up = bytes_of(as_sent(layout_of(net.state_dict()) | asked, recipe.upload.encoding))
    return Traffic(net.size, network + extras, up)


def train(broadcast: Broadcast, site: Site, until: int | None = None, emit: Emit = silent) -> Upload:
    """Site: train on its own data (to the end, or to the end of epoch `until`), resuming what its folder holds."""
    with site.arithmetic(sum(tensor.numel() for tensor in broadcast.weights.values())):
        learner = Learner(broadcast, site, emit)
        learner.train(broadcast.recipe.training.epochs if until is None else until)
        if learner.stopped and learner.epoch == 0:
            raise RunError(learner.stopped)
        recipe, encoding = broadcast.recipe, broadcast.recipe.upload.encoding
        return Upload(
            client=site.name,
            recipe_digest=broadcast.digest,
            epoch=learner.epoch,
            class_counts=told_counts(learner.counts.cpu(), recipe.reveal),
            weights=as_received(learner.net.weights(), encoding),
            statistics=as_received(_measure(learner, broadcast), encoding),
            history=told_history(learner.history, recipe.reveal),
            stopped=learner.stopped or "",
            encoding=encoding,
        )


def fuse(
    uploads: Sequence[Upload], broadcast: Broadcast, site: Site | None = None, rule: Rule | None = None
) -> GlobalModel:
    """Server: one model from the uploads, by the recipe's first rule unless another is given."""
    if len(uploads) == 0:
        raise ProtocolError("no uploads to fuse")
    chosen = rule or rules_of(broadcast.recipe)[0]
    server = site or Site("server", local=Local(device="cpu"))
    return GlobalModel.of(chosen.fuse(uploads, broadcast, server), chosen, broadcast)


def rules_of(recipe: Federated) -> list[Rule]:
    """The recipe's fusion rules; the first makes the global model."""
    return [rules.of(part) for part in recipe.fusion]


def statistics_of(broadcast: Broadcast) -> Shapes:
    """Names and shapes of the statistics the recipe's rules ask every client for."""
    return asked_by(rules_of(broadcast.recipe), *broadcast.weights["prototypes"].shape)


def asked_by(chosen: Sequence[Rule], classes: int, features: int) -> Shapes:
    """Names and shapes of the statistics these rules ask every client for."""
    asked: Shapes = {}
    for rule in chosen:
        asked |= rule.statistics(classes, features)
    return asked


@torch.inference_mode()
def _measure(learner: Learner, broadcast: Broadcast) -> dict[str, Tensor]:
    """The statistics asked for, from unit features of the site's own images without augmentation."""
    if not statistics_of(broadcast):
        return {}
    site, shown = learner.site, preprocessing(broadcast.recipe)
    unit, labels = unit_features(learner.net, learner.data.batches(site.device, *shown)), learner.data.labels
    held, asked = unit, labels
    if site.validation is not None and len(site.validation):
        held, asked = unit_features(learner.net, site.validation.batches(site.device, *shown)), site.validation.labels
    measured: dict[str, Tensor] = {}
    for rule in rules_of(broadcast.recipe):
        measured |= rule.measure(unit, labels, broadcast.classes)
        measured |= rule.judge(held @ learner.net.prototypes.T, asked.to(site.device), broadcast.classes)
    return {name: value.float().cpu().contiguous() for name, value in measured.items()}


def _start_from(path: Path, net: PrototypeNet) -> None:
    """Fill the network from a safetensors file: a whole network, or an encoder alone (with or without `encoder.`)."""
    try:
        given = safetensors.torch.load(path.read_bytes())
    except Exception as error:  # the library raises several kinds
        raise ProtocolError(f"local.initial_weights = {path}: not a readable safetensors file ({error})") from None
    given = {
        name.removeprefix("weights."): value for name, value in given.items() if not name.startswith("statistics.")
    }
    if not any(name.startswith("encoder.") for name in given):
        given = {name if name == "prototypes" else f"encoder.{name}": value for name, value in given.items()}
    wanted = net.state_dict()
    for name in sorted(given.keys() | {name for name in wanted if name != "prototypes"}):
        if name not in given or name not in wanted:
            raise ProtocolError(
                f"local.initial_weights = {path}: tensor {name} is {'missing' if name in wanted else 'not part of this encoder'}"
            )
        if given[name].shape != wanted[name].shape:
            raise ProtocolError(
                f"local.initial_weights = {path}: {name} is {tuple(given[name].shape)}, this encoder has {tuple(wanted[name].shape)}"
            )
        if given[name].is_floating_point() and not torch.isfinite(given[name]).all():
            raise ProtocolError(f"local.initial_weights = {path}: {name} holds values that are not finite")
    net.load_state_dict(given, strict=False)
