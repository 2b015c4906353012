"""The three acts of one-shot learning: prepare (server), train (site), fuse (server).

broadcast = prepare(recipe, data.class_names, data.shape)
uploads = [train(broadcast, site) for site in sites]
model = fuse(uploads, broadcast)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oneround import sums
from oneround.data import Dataset
from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.fusion import Rule, rules
from oneround.learning import Emit, Learner, silent, summing
from oneround.learning.anchors import anchors
from oneround.learning.bank import make_bank, unit_features
from oneround.learning.companion import companions
from oneround.learning.reference import make_reference
from oneround.models import Single, initialise
from oneround.models.features import Constants, FeaturesPart, FrozenEncoder, features
from oneround.models.prototype import build, on_cpu
from oneround.protocol import Broadcast, GlobalModel, Upload
from oneround.protocol.encoding import as_received, as_sent, bytes_of, layout_of
from oneround.protocol.messages import Shapes, size_of, sums_bytes
from oneround.protocol.model import preprocessing
from oneround.protocol.reveal import told_counts, told_history
from oneround.protocol.start import start_from
from oneround.reading import change
from oneround.recipe import Federated, Local, Recipe
from oneround.seeds import generator
from oneround.site import Site


def settle(recipe: Recipe, data: Dataset) -> Recipe:
    """The recipe with what depends on the data filled in: the encoder, whether images may be mirrored; one pass for sums alone."""
    changes: dict[str, object] = {}
    if recipe.sums is not None:
        chosen = features.of(recipe.sums.features).settled(data.shape)
        sums.check_room(chosen.size_for(data.shape))
        changes["sums.features"] = chosen.dump()
        if recipe.sums.mirror is None:
            changes["sums.mirror"] = "features" if data.mirror else "none"
    if not recipe.trains:
        changes["training.epochs"] = 1
    elif recipe.model.encoder is None:
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
    extras = _features(recipe, shape, server) if recipe.sums is not None else {}
    if not recipe.trains:
        return Broadcast(recipe.federated, class_names, shape, {}, extras)
    assert recipe.model.encoder is not None, "settle the recipe first"
    model, seed = recipe.model, recipe.seeds.initialisation
    net = initialise(recipe.model.encoder, shape[0], len(class_names), seed, model.head)
    if recipe.local.initial_weights:
        start_from(recipe.local.initial_weights, net, "initial_weights")
    broadcast = Broadcast(recipe.federated, class_names, shape, net.weights())
    for rule in rules_of(recipe):
        rule.check(broadcast, recipe.local)
    if recipe.companion is not None:
        companions.of(recipe.companion).check(broadcast)
    if recipe.alignment is not None:
        maker = anchors.of(recipe.alignment.anchors)
        extras["anchors"] = maker.make(len(class_names), net.encoder.features, recipe.seeds.initialisation)
    with (server or Site("server")).arithmetic(net.size):
        extras |= make_bank(broadcast, server, emit) if recipe.bank else {}
        extras |= make_reference(broadcast, server, emit) if recipe.reference else {}
    return replace(broadcast, extras=extras)


def _features(recipe: Recipe, shape: tuple[int, int, int], server: Site | None) -> dict[str, Tensor]:
    """What the broadcast says of the fixed features; those that a site cannot build itself are made here."""
    assert recipe.sums is not None
    part = features.of(recipe.sums.features)
    constants = _constants(recipe, part, shape, server)
    told = sums.announce(part, constants)
    if recipe.secure:
        told[sums.EXPONENT] = sums.exponent_of(recipe, shape, constants, *preprocessing(recipe))
    return told


def _constants(recipe: Recipe, part: FeaturesPart, shape: tuple[int, int, int], server: Site | None) -> Constants:
    seed = recipe.seeds.initialisation
    if isinstance(part, FrozenEncoder) and recipe.local.frozen_encoder is not None:
        net = initialise(part.encoder, shape[0], 2, seed)
        start_from(recipe.local.frozen_encoder, net, "frozen_encoder")
        return {name: on_cpu(value) for name, value in net.encoder.state_dict().items()}
    if not part.needs_public:
        return part.make(shape, seed, None)
    if server is None or server.data is None or len(server.data) == 0:
        raise RecipeError("sums.features: the server has no public images to cut patches from; set public")
    mean, std = preprocessing(recipe)
    return part.make(shape, seed, (server.data.pixels.float() / 255 - mean) / std)


@dataclass(frozen=True)
class Traffic:
    """What crosses the network for one client, known before anything is trained."""

    parameters: int
    """Numbers in the network; in the sums where no network is trained."""
    down: int
    """Bytes"""
    up: int


def traffic(recipe: Federated, classes: int, shape: tuple[int, int, int], public: int) -> Traffic:
    """For a task of that many classes and images of that shape, with so many public images at the server."""
    asked = Broadcast(recipe, ("",) * classes, shape, {}).sums
    summed = sums_bytes(asked)
    carried = features.of(recipe.sums.features).bytes_down(shape) if recipe.sums else 0
    if not recipe.trains:
        return Traffic(sum(int(torch.Size(each).numel()) for each, _ in asked.values()), carried, summed)
    assert recipe.model.encoder is not None, "settle the recipe first"
    with torch.device("meta"):
        net = build(recipe.model.encoder, shape[0], classes, recipe.model.head)
    network, width = size_of(net.state_dict()), net.encoder.features
    extras = 4 * classes * width if recipe.alignment else 0
    if recipe.bank is not None:
        extras += min(recipe.bank.size, public) * (4 * width + 8)
    if recipe.reference is not None:
        size = recipe.reference.size
        extras += (min(size, public) if recipe.reference.source == "public" else size) * 4 * width
    statistics = {name: (shape, torch.float32) for name, shape in asked_by(rules_of(recipe), classes, width).items()}
    up = bytes_of(as_sent(layout_of(net.state_dict()) | statistics, recipe.upload.encoding)) + summed
    return Traffic(net.size, network + extras + carried, up)


def train(broadcast: Broadcast, site: Site, until: int | None = None, emit: Emit = silent) -> Upload:
    """Site: train on its own data (to the end, or to the end of epoch `until`), resuming what its folder holds."""
    if not broadcast.recipe.trains:
        return _sum_only(broadcast, site, emit)
    with site.arithmetic(sum(tensor.numel() for tensor in broadcast.weights.values()), search=True):
        learner = Learner(broadcast, site, emit)
        learner.train(broadcast.last_epoch if until is None else until)
        if learner.stopped and learner.epoch == broadcast.first_epoch:
            raise RunError(learner.stopped)
        recipe, encoding = broadcast.recipe, broadcast.recipe.upload.encoding
        return Upload(
            client=site.name,
            recipe_digest=broadcast.digest,
            epoch=learner.epoch,
            class_counts=told_counts(learner.counts.cpu(), recipe.reveal),
            weights=as_received(learner.net.weights(), encoding),
            statistics=as_received(_measure(learner, broadcast), encoding),
            sums=summing.of_site(broadcast, site),
            history=told_history(learner.history, recipe.reveal),
            stopped=learner.stopped or "",
            encoding=encoding,
        )


def _sum_only(broadcast: Broadcast, site: Site, emit: Emit) -> Upload:
    """Where no network is trained: one pass over the site's images."""
    if site.data is None or len(site.data) == 0:
        raise RunError(f"{site.name}: no data to sum over")
    started, counts = time.monotonic(), site.data.class_counts(broadcast.classes)
    steps = sums.steps_of(len(site.data))

    def told(done: int) -> None:
        emit({"event": "steps", "client": site.name, "epoch": 1, "done": done, "of": steps})

    with site.arithmetic(sum(int(torch.Size(shape).numel()) for shape, _ in broadcast.sums.values())):
        found = summing.of_site(broadcast, site, told)
    seen = {"epoch": 1, "steps": steps, "classes_seen": int((counts > 0).sum()), "seconds": time.monotonic() - started}
    emit({"event": "epoch", "client": site.name, **seen})
    if broadcast.recipe.secure:
        hidden, roster = told_history([seen], broadcast.recipe.reveal), tuple(sorted(broadcast.roster))
        nothing = torch.zeros(0, dtype=torch.int64)
        return Upload(
            site.name, broadcast.digest, 1, nothing, {}, sums=found, history=hidden, roster=roster, context=broadcast.context
        )  # fmt: skip
    return Upload(site.name, broadcast.digest, 1, counts, {}, sums=found, history=[seen])


def fuse(
    uploads: Sequence[Upload], broadcast: Broadcast, site: Site | None = None, rule: Rule | None = None
) -> GlobalModel:
    """Server: one model from the uploads, by the recipe's first rule unless another is given."""
    if len(uploads) == 0:
        raise ProtocolError("no uploads to fuse")
    chosen = rule or rules_of(broadcast.recipe)[0]
    server = site or Site("server", local=Local(device="cpu"))
    return GlobalModel.of(chosen.fuse(uploads, broadcast, server), chosen, broadcast)


def advance(model: GlobalModel, broadcast: Broadcast) -> Broadcast:
    """Server: what the next round begins with, the network that the recipe's first rule made of this one's uploads."""
    assert isinstance(model.inference, Single), "the recipe allows several rounds only with rules that make one network"
    return replace(broadcast, weights=model.inference.net.weights(), round=broadcast.round + 1)


def participants(recipe: Federated, clients: Sequence[str], number: int) -> list[str]:
    """Who of these takes part in a round: a share of them, drawn anew every round, in the order given."""
    who = recipe.participation
    wanted = min(len(clients), max(who.minimum, round(who.fraction * len(clients))))
    order = torch.randperm(len(clients), generator=generator(recipe.seeds.training, number, "participants"))
    return [clients[at] for at in sorted(order[:wanted].tolist())] if recipe.rounds > 1 else list(clients)


def rules_of(recipe: Federated) -> list[Rule]:
    """The recipe's fusion rules; the first makes the global model."""
    return [rules.of(part) for part in recipe.fusion]


def statistics_of(broadcast: Broadcast) -> Shapes:
    """Names and shapes of the statistics the recipe's rules ask every client for."""
    if not broadcast.weights:
        return {}
    return asked_by(rules_of(broadcast.recipe), *broadcast.weights["prototypes"].shape)


def lacking(rule: Rule, broadcast: Broadcast) -> list[str]:
    """What this rule needs that uploads to this broadcast do not carry."""
    if rule.needs_network and not broadcast.weights:
        return ["networks"]
    if rule.between_rounds:
        return ["what the server keeps between rounds"]
    if rule.needs_prototypes and "bias" in broadcast.weights:
        return ["prototypes: model.head is linear"]
    lacks = ["sums of fixed features"] if rule.needs_sums and not broadcast.sums else []
    wanted = rule.statistics(*broadcast.weights["prototypes"].shape) if broadcast.weights else {}
    return lacks + sorted(wanted.keys() - statistics_of(broadcast).keys())


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
