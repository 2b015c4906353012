"""The three acts of one-shot learning: prepare (server), train (site), fuse (server).

broadcast = prepare(recipe, data.class_names, data.shape)
uploads = [train(broadcast, site) for site in sites]
model = fuse(uploads, broadcast)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import oneround.catalog  # noqa: F401 — a recipe finds its parts
from oneround import sums
from oneround.config.load import change
from oneround.config.recipe import Federated, Local, Recipe
from oneround.data import Dataset, Images
from oneround.data.augment import preprocessing
from oneround.errors import ProtocolError, RecipeError, RunError, refused
from oneround.fusion import Rule, rules
from oneround.fusion.base import expert_of
from oneround.fusion.feature_vote import class_sums
from oneround.global_model import GlobalModel
from oneround.mergenet import CompanionNetwork, check_companion
from oneround.models import Single, initialise
from oneround.models.features import Constants, ExpertFeatures, FeaturesPart, FrozenEncoder, Shape, features
from oneround.models.inference import check_transductive
from oneround.models.pretrained import load_weights
from oneround.models.prototype import Layout, all_on_cpu, meta_network
from oneround.models.unet import generator_from, initial_generator, meta_generator
from oneround.privacy.disclosure import disclosed_counts, disclosed_history, disclosed_stop
from oneround.protocol.encoding import as_received, bytes_of, encoded_layout, layout_of
from oneround.protocol.messages import (
    Broadcast,
    Shapes,
    Upload,
    UploadFolder,
    prefixed,
    split_by_prefix,
    strip_prefix,
)
from oneround.seeds import generator
from oneround.site import Site
from oneround.training import Emit, Learner, Trainer, silent
from oneround.training.alignment.anchors import anchors
from oneround.training.bank import make_bank
from oneround.training.batched_loop import Group
from oneround.training.copies import fetched_later
from oneround.training.feature_sums import feature_sums
from oneround.training.generator import GeneratorLearner
from oneround.training.reference import make_reference
from oneround.training.server_side import public_images
from oneround.training.shared_base import SHARED
from oneround.training.step import unrecorded


def resolve(recipe: Recipe, data: Dataset) -> Recipe:
    """The recipe with every option that depends on the data filled in: encoder, mirroring, fixed features.

    A recipe whose clients train no network that classifies gets one epoch of it, of nothing.
    """
    changes: dict[str, object] = {}
    if recipe.sums is not None:
        changes["sums.features"] = features.of(recipe.sums.features).resolve(data.shape).dump()
        if recipe.sums.mirror is None:
            changes["sums.mirror"] = "features" if data.mirror else "none"
    if not recipe.trains:
        changes["training.epochs"] = 1
    if recipe.model.encoder is None and not recipe.sums_only:
        changes["model.encoder"] = "cnn" if max(data.shape[1:]) <= 16 else "resnet18"
    if recipe.training.augment.flip is None:
        changes["training.augment.flip"] = 0.5 if data.mirror else 0.0
    if recipe.generator is not None and recipe.generator.flip is None:
        changes["generator.flip"] = 0.5 if data.mirror else 0.0
    resolved = change(recipe, changes) if changes else recipe
    if resolved.sums is not None:
        sums.check_memory(sums.size_of(resolved, data.shape, resolved.partition.clients or 1))
    if resolved.evaluation.transductive:
        check_transductive(resolved, data.shape[0], data.classes, len(data.test))
    return resolved


def prepare(
    recipe: Recipe, class_names: tuple[str, ...], shape: Shape, server: Site | None = None, emit: Emit = silent
) -> Broadcast:
    """Server: the message every site starts from. `server` holds the public images, for recipes that need some."""
    server = server or Site("server", local=recipe.local)
    extras = _feature_extras(recipe, shape, server) if recipe.sums is not None and not recipe.stacked else {}
    seed = recipe.seeds.initialisation
    images: dict[str, Tensor] = {}
    if recipe.generator is not None:
        images = initial_generator(recipe.generator.network, shape, len(class_names), seed).state_dict()
    if not recipe.trains:
        return Broadcast(recipe.federated, class_names, shape, {}, extras, generator=images)
    net = initialise(recipe.encoder, shape[0], len(class_names), seed, recipe.model.head)
    if recipe.local.initial_weights:
        load_weights(recipe.local.initial_weights, net, "initial_weights")
    if recipe.local.initial_features:
        net.prototypes.data.copy_(_prototypes_from(recipe.local.initial_features, net.prototypes.data))
    if recipe.alignment is not None:
        extras["anchors"] = anchors.of(recipe.alignment.anchors).make(len(class_names), net.encoder.features, seed)
        if recipe.alignment.initial != "random":
            net.prototypes.data.copy_(extras["anchors"])
    broadcast = Broadcast(recipe.federated, class_names, shape, net.weights(), generator=images)
    for rule in rules_of(recipe):
        rule.check(broadcast, recipe.local)
    if recipe.companion is not None:
        check_companion(recipe.companion, broadcast)
    with server.arithmetic(net.size):
        extras |= make_bank(recipe.bank, broadcast, server, emit) if recipe.bank else {}
        extras |= make_reference(recipe.reference, broadcast, server, emit) if recipe.reference else {}
    return replace(broadcast, extras=extras)


def _prototypes_from(run: Path, prototypes: Tensor) -> Tensor:
    """Prototypes in the direction of the features that the clients of an earlier run uploaded, as long as they were."""
    key = f"local.initial_features = {run}"
    broadcast_file, paths = run / "broadcast.safetensors", sorted((run / "uploads").glob("*.safetensors"))
    if not broadcast_file.is_file() or not paths:
        raise RecipeError(f"{key}: no finished run (its broadcast and uploads/ are needed)")
    broadcast = Broadcast.read(broadcast_file)
    if "features" not in statistics_of(broadcast):
        raise RecipeError(
            f"{key}: its clients uploaded no features; run it with feature-vote in fusion (fafi+features)"
        )
    directions = class_sums(UploadFolder(paths, broadcast, statistics_of(broadcast)))
    if directions.shape != prototypes.shape:
        raise RecipeError(
            f"{key}: has {len(directions)} classes of {directions.shape[1]} features, this recipe {len(prototypes)} of {prototypes.shape[1]}; "
            "take a run on the same classes with the same encoder"
        )
    known = directions.norm(dim=1, keepdim=True) > 0
    return torch.where(known, F.normalize(directions, dim=1) * prototypes.norm(dim=1, keepdim=True), prototypes)


def _feature_extras(recipe: Recipe, shape: Shape, server: Site) -> dict[str, Tensor]:
    """The broadcast's extras for fixed features: a checksum, or the constants that a site cannot build itself."""
    part = features.of(recipe.summed.features)
    extras = sums.feature_extras(part, _constants(recipe, part, shape, server))
    return extras | _exponent(recipe, shape, extras)


def _exponent(recipe: Federated, shape: Shape, extras: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The extra for masks, where the recipe asks for them."""
    if not recipe.secure:
        return {}
    constants = sums.constants_of(recipe, shape, extras)
    return {sums.EXPONENT: sums.exponent_of(recipe, shape, constants, *preprocessing(recipe))}


def _constants(recipe: Federated, part: FeaturesPart, shape: Shape, server: Site) -> Constants:
    seed = recipe.seeds.initialisation
    if isinstance(part, FrozenEncoder) and server.local.frozen_encoder is not None:
        net = initialise(part.encoder, shape[0], 2, seed)
        load_weights(server.local.frozen_encoder, net, "frozen_encoder")
        return all_on_cpu(net.encoder.state_dict())
    if not part.needs.public:
        return sums.constants_from_seed(part, shape, seed)
    public, (mean, std) = public_images(server, "sums.features"), preprocessing(recipe)
    return part.make(shape, seed, (public.pixels.float() / 255 - mean) / std)


@dataclass(frozen=True)
class Traffic:
    """Bytes that cross the network for one client, known before training."""

    parameters: int
    """Numbers in the networks; in the sums where none is trained."""
    down: int
    """Bytes from the server to the client."""
    up: int
    """Bytes from the client to the server."""


def traffic(recipe: Federated, classes: int, shape: Shape, public: int, clients: int | None = None) -> Traffic:
    """Traffic per client for a number of classes, an image shape, and a number of public images at the server.

    `clients`: those whose networks come back in a second exchange; default: the recipe's, or one.
    """
    summed, constants = {}, 0
    experts = (clients or recipe.partition.clients or 1) if recipe.stacked else 0
    if recipe.sums is not None:
        size = sums.size_of(recipe, shape, experts)
        summed = sums.sums_layout(recipe, size, classes)
        constants = features.of(recipe.sums.features).bytes_down(shape)
    if recipe.sums_only:
        return Traffic(sum(math.prod(size) for size, _ in summed.values()), constants, bytes_of(summed))
    images: Layout = {}
    if recipe.generator is not None:
        images = layout_of(meta_generator(recipe.generator.network, shape, classes).state_dict())
    numbers = sum(math.prod(size) for size, _ in images.values())
    if not recipe.trains:
        up = bytes_of(encoded_layout(images, recipe.upload.encoding)) + bytes_of(summed)
        return Traffic(numbers, bytes_of(images) + constants, up)
    net = meta_network(recipe.encoder, shape[0], classes, recipe.model.head)
    weights, width, float32 = layout_of(net.state_dict()), net.encoder.features, torch.float32
    extras: Layout = {}
    if recipe.alignment is not None:
        extras["anchors"] = ((classes, width), float32)
    if recipe.bank is not None:
        size = min(recipe.bank.size, public)
        extras |= {"bank.features": ((size, width), float32), "bank.labels": ((size,), torch.int64)}
    if recipe.reference is not None:
        size = recipe.reference.size
        size = min(size, public) if recipe.reference.source == "public" else size
        extras["reference.features"] = ((size, width), float32)
    statistics = requested_statistics(rules_of(recipe), classes, width)
    sent = weights | {name: (size, float32) for name, size in statistics.items()}
    up = bytes_of(encoded_layout(sent, recipe.upload.encoding)) + bytes_of(summed)
    up += bytes_of(encoded_layout(images, recipe.upload.encoding))
    down = bytes_of(weights) + bytes_of(images) + bytes_of(extras) + constants
    down += experts * bytes_of(layout_of(net.encoder.state_dict()))
    return Traffic(net.size + numbers, down, up)


def train(
    broadcast: Broadcast, site: Site, until: int | None = None, emit: Emit = silent, trainer: Trainer | None = None
) -> Upload:
    """Site: train on its own data, to the last epoch or to epoch `until`, resuming from the state in its folder.

    `trainer`: a worker's own, reused from client to client, so that networks and recorded steps are made once.
    """
    return train_and_measure(broadcast, site, until, emit, trainer)()


def train_and_measure(
    broadcast: Broadcast, site: Site, until: int | None = None, emit: Emit = silent, trainer: Trainer | None = None
) -> Callable[[], Upload]:
    """`train`; what is left to do takes the networks off the device, beside the next client's training."""
    recipe = broadcast.recipe
    if not broadcast.parameters:
        upload = _sum_only(broadcast, site, emit)
        return lambda: upload
    classifier = generator = None
    with site.arithmetic(broadcast.parameters):
        if recipe.trains:
            companion = CompanionNetwork(recipe.companion, broadcast, site) if recipe.companion else None
            classifier = Learner(broadcast, site, emit, trainer, companion=companion)
        if recipe.generator is not None:
            key = "generator.batch_size"
            generator = GeneratorLearner(broadcast, site, emit, trainer, batch_key=key)
        for learner in (classifier, generator):
            if learner is not None:
                learner.train(broadcast.last_epoch if until is None else until)
                if learner.stopped:
                    break
        return _upload(classifier, generator)


def train_group(
    broadcast: Broadcast,
    sites: Mapping[int, Site],
    slots: int,
    until: int,
    emit: Emit = silent,
    trainer: Trainer | None = None,
) -> Iterator[Upload]:
    """`train` for several clients at once, each in its slot of one batched network; uploads come as each is measured."""
    first = next(iter(sites.values()))
    with first.arithmetic(broadcast.parameters):
        group = Group(broadcast, sites, slots, emit, trainer)
        group.train(until)
        refusal: RunError | None = None
        for learner in group.learners.values():
            try:
                yield _upload(learner)()
            except RunError as error:
                refusal = error
        if refusal is not None:
            raise refusal


def _upload(classifier: Learner | None, generator: GeneratorLearner | None = None) -> Callable[[], Upload]:
    """Measure what the rules ask for; what is left to do makes the message of a trained client."""
    learners: list[Learner] = [each for each in (classifier, generator) if each is not None]
    current = next((each for each in learners if each.epoch < each.last), learners[-1])
    broadcast, site, epoch, counts = current.broadcast, current.site, current.epoch, current.counts
    recipe, encoding = broadcast.recipe, broadcast.recipe.upload.encoding
    stopped = disclosed_stop(current.stopped, current.stopped_summary, recipe.reveal)
    if stopped and epoch == broadcast.first_epoch:
        raise RunError(stopped)  # no epoch counts: the client sends this refusal
    with unrecorded:
        statistics = as_received(_measure(classifier, broadcast), encoding) if classifier else {}
        summed = feature_sums(broadcast, site)
    live = {
        "weights": classifier.net.state_dict() if classifier else {},
        "generator": generator.average if generator else {},
    }
    fetched = fetched_later(prefixed(**live))
    history = [entry for each in learners for entry in each.history]

    def message() -> Upload:
        networks = split_by_prefix(as_received(fetched(), encoding), *live)
        return Upload(
            client=site.name,
            recipe_digest=broadcast.digest,
            epoch=epoch,
            class_counts=disclosed_counts(counts, recipe.reveal),
            weights=networks["weights"],
            generator=networks["generator"],
            statistics=statistics,
            sums=summed,
            history=disclosed_history(history, recipe.reveal),
            stopped=stopped,
            encoding=encoding,
        )

    return message


def _sum_only(broadcast: Broadcast, site: Site, emit: Emit) -> Upload:
    """An upload without a network: sums from one pass over the site's images."""
    if not site.data:
        raise RunError(f"{site.name}: no data to sum over")
    recipe, counts = broadcast.recipe, site.data.class_counts(broadcast.classes)
    if recipe.summed.held_back and site.validation:
        counts = counts + recipe.summed.held_back * site.validation.class_counts(broadcast.classes)
    started, steps = time.monotonic(), sums.steps_of(len(site.data))

    def on_progress(done: int) -> None:
        emit({"event": "steps", "client": site.name, "epoch": broadcast.last_epoch, "done": done, "of": steps})

    with site.arithmetic(sum(math.prod(shape) for shape, _ in broadcast.sums.values())):
        summed = feature_sums(broadcast, site, on_progress)
    metrics = {
        "epoch": broadcast.last_epoch,
        "steps": steps,
        "classes_seen": int((counts > 0).sum()),
        "seconds": time.monotonic() - started,
    }
    emit({"event": "epoch", "client": site.name, **metrics})
    return Upload(
        client=site.name,
        recipe_digest=broadcast.digest,
        epoch=broadcast.last_epoch,
        class_counts=torch.zeros(0, dtype=torch.int64) if recipe.secure else counts,
        weights={},
        sums=summed,
        history=disclosed_history([metrics], recipe.reveal),
        roster=tuple(sorted(broadcast.roster)),
        context=broadcast.context if broadcast.masked else "",
    )


def fuse(
    uploads: Sequence[Upload], broadcast: Broadcast, site: Site | None = None, rule: Rule | None = None
) -> GlobalModel:
    """Server: one model from the uploads, by the recipe's first rule unless another is given."""
    if not uploads:
        raise ProtocolError("no uploads to fuse")
    chosen = rule or rules_of(broadcast.recipe)[0]
    server = site or Site("server", local=Local(device="cpu"))
    return GlobalModel.of(chosen.fuse(uploads, broadcast, server), chosen, broadcast)


@torch.inference_mode()
def check_usable(upload: Upload, broadcast: Broadcast, where: str) -> None:
    """Server, when an upload arrives: refuse impossible statistics, and networks whose outputs on noise are not finite."""
    seed, cpu = broadcast.recipe.seeds.initialisation, torch.device("cpu")
    noise = torch.randn(2, *broadcast.shape, generator=generator(seed, "noise image"))
    if broadcast.recipe.generator is not None:
        net = generator_from(broadcast.recipe.generator.network, broadcast.shape, broadcast.classes, upload.generator)
        if not bool(torch.isfinite(net(noise, torch.tensor([0.0, 1.0]), torch.tensor([0, net.no_class]))).all()):
            raise refused(where, "its generator's outputs are not finite")
    if not broadcast.weights:
        return
    for rule in rules_of(broadcast.recipe):
        try:
            rule.check_statistics(upload.statistics)
        except ValueError as error:
            raise refused(where, str(error)) from None
    expert = expert_of(upload, broadcast, cpu)
    if not bool(torch.isfinite(expert.output(noise).logits).all() and torch.isfinite(expert.noise_feature).all()):
        raise refused(where, "its network's outputs are not finite")


def advance(model: GlobalModel, broadcast: Broadcast) -> Broadcast:
    """Server: the broadcast of the next round, with the network that the recipe's first rule made."""
    assert isinstance(model.inference, Single), "the recipe allows several rounds only with rules that make one network"
    return replace(broadcast, weights=model.inference.net.weights(), round=broadcast.round + 1)


def stack(uploads: Sequence[Upload], broadcast: Broadcast, server: Site) -> Broadcast:
    """Server: the broadcast of the second exchange, with all clients' encoders, whose features the sites sum."""
    recipe, shape = broadcast.recipe, broadcast.shape
    names, encoders = [], []
    for upload in uploads:
        names.append(upload.client)
        encoders.append(strip_prefix(upload.weights, "encoder"))
    part = features.of(recipe.summed.features)
    beside: dict[str, Tensor] = {}
    if isinstance(part, ExpertFeatures) and part.beside is not None:
        fixed = features.of(part.beside)
        beside = sums.feature_extras(fixed, _constants(recipe, fixed, shape, server))
    extras = sums.stacked_extras(encoders, beside)
    sums.check_memory(sums.size_of(recipe, shape, len(names)))
    extras |= _exponent(recipe, shape, extras)
    return replace(broadcast, weights={}, generator={}, extras=extras, round=broadcast.round + 1, experts=tuple(names))


def participants(recipe: Federated, clients: Sequence[str], number: int) -> list[str]:
    """The clients of one round: a fraction of all, drawn anew every round, in their original order."""
    participation = recipe.participation
    count = min(len(clients), max(participation.minimum, round(participation.fraction * len(clients))))
    order = torch.randperm(len(clients), generator=generator(recipe.seeds.training, number, "participants"))
    return [clients[at] for at in sorted(order[:count].tolist())] if recipe.rounds > 1 else list(clients)


def rules_of(recipe: Federated) -> list[Rule]:
    """The recipe's fusion rules; the first makes the global model."""
    return [rules.of(part) for part in recipe.fusion]


def statistics_of(broadcast: Broadcast) -> Shapes:
    """Names and shapes of the statistics that the recipe's rules require of every client."""
    if not broadcast.weights:
        return {}
    return requested_statistics(rules_of(broadcast.recipe), *broadcast.weights["prototypes"].shape)


def missing_inputs(rule: Rule, broadcast: Broadcast) -> list[str]:
    """Inputs of this rule that uploads to this broadcast do not carry; empty if it can be applied to them."""
    if rule.needs.network and not broadcast.weights:
        return ["networks"]
    if rule.needs.generator and not broadcast.generator:
        return ["generators"]
    if rule.needs.state:
        return ["what the server keeps between rounds"]
    if rule.needs.prototypes and "bias" in broadcast.weights:
        return ["prototypes: model.head is linear"]
    if rule.needs.experts and not broadcast.experts:
        return ["sums of the networks' features"]
    sums_missing = ["sums of fixed features"] if rule.needs.sums and not broadcast.sums else []
    requested = rule.statistics(*broadcast.weights["prototypes"].shape) if broadcast.weights else {}
    available = statistics_of(broadcast)
    return sums_missing + sorted(name for name, shape in requested.items() if available.get(name) != shape)


def requested_statistics(fusion_rules: Sequence[Rule], classes: int, features: int) -> Shapes:
    """Names and shapes of the statistics that these rules require of every client."""
    statistics: Shapes = {}
    for rule in fusion_rules:
        for name, shape in rule.statistics(classes, features).items():
            if statistics.setdefault(name, shape) != shape:
                raise RecipeError(
                    f"fusion: {rule.label} and another rule ask for {name} in different sizes; leave one out"
                )
    return statistics


@torch.inference_mode()
def _measure(learner: Learner, broadcast: Broadcast) -> dict[str, Tensor]:
    """The required statistics, from unit features of the site's own images without augmentation."""
    if not statistics_of(broadcast):
        return {}
    net, data, device = learner.net.eval(), learner.data, learner.site.device

    def features_of(images: Images) -> Tensor:
        at_once = images.scored_at_once(device)
        while True:
            try:
                batches = images.batches(device, *preprocessing(broadcast.recipe), at_once)
                return torch.cat([net.encoder(batch) for batch in batches])
            except torch.OutOfMemoryError:  # what a recorded step holds is not free for this
                if at_once == 1:
                    raise
            at_once //= 2

    own_features = features_of(data)
    unit, logits, labels = F.normalize(own_features, dim=1), net.classify(own_features), data.labels
    if validation := learner.site.validation:
        logits, labels = net.classify(features_of(validation)), validation.labels.to(device)
    measured: dict[str, Tensor] = {}
    for rule in rules_of(broadcast.recipe):
        if learner.depth is not None and SHARED in rule.statistics(broadcast.classes, unit.shape[1]):
            measured[SHARED] = torch.tensor(learner.depth)
        measured |= rule.measure(unit, data.labels, broadcast.classes) | rule.judge(logits, labels, broadcast.classes)
        measured |= rule.measure_raw(own_features)
    return {name: value.float().cpu().contiguous() for name, value in measured.items()}
