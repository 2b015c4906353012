"""The recipe: an experiment as data.

A recipe has two halves. The *federated* half is the same for all sites (data, partition, model, training, objective,
fusion, seeds); it is hashed and travels in the Broadcast. The *local* half says how this machine does it (paths, device,
threads); it never leaves the site and never changes what is hashed.

This file has the recipe and the checks across its sections; `sections.py` has the sections with every default. `load.py` turns
presets, files and overrides into a `Recipe`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from oneround.config.parts import In, Part, PartitionPart, RulePart, Strict, slot
from oneround.config.sections import (
    Alignment,
    Bank,
    Companion,
    Count,
    Evaluation,
    Generator,
    LabelNoise,
    Model,
    NotNegative,
    Objective,
    Participation,
    Positive,
    Queue,
    Reference,
    Reveal,
    Safeguards,
    Seeds,
    Share,
    Sums,
    Trace,
    Training,
    UploadOptions,
)
from oneround.errors import RecipeError

FORMER_NAMES = {"rails": "safeguards"}
"""Keys of older recipes, with their names today. Both are read; today's are written."""
ADDED: Mapping[str, Mapping[str, Any]] = {
    "evaluation": {"batch_norm": "running", "batch_size": 256},
    "alignment": {"initial": "random", "one_class": "all"},
    "sums": {"held_back": 0, "shift": 0},
    "training": {"optimizer": "sgd", "nesterov": False},
    "training.augment": {"shift": 0.0, "hole": 0.0},
}
"""Keys by section that were added since, with their defaults. Those that have their default do not enter the digest: a recipe
keeps the one it had."""
ADDED_SECTIONS = ("share", "generator")
"""Sections that were added since; one that is not there does not enter the digest."""


def current_name(key: str) -> str:
    """Today's name of a recipe key such as `rails.on_explosion`."""
    section, dot, rest = key.partition(".")
    return FORMER_NAMES.get(section, section) + dot + rest


def with_current_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with today's names of its keys; RecipeError if it has a key under both names."""
    twice = next((former for former, name in FORMER_NAMES.items() if former in raw and name in raw), None)
    if twice is not None:
        raise RecipeError(f"{twice} is the former name of {FORMER_NAMES[twice]}; give one of them")
    return {FORMER_NAMES.get(key, key): value for key, value in raw.items()}


def _snapshots(value: Any) -> Any:
    """Refuse what is neither a number nor a list of epochs that rises."""
    if isinstance(value, list):
        if any(type(epoch) is not int or epoch < 1 for epoch in value) or value != sorted(set(value)) or not value:
            raise ValueError("must be epochs from 1 on that rise, such as [1, 11, 21]")
    elif type(value) is not int:
        raise ValueError("must be a whole number, or a list of epochs")
    elif value < 0:
        raise ValueError("must be ≥ 0")
    return value


class Federated(Strict):
    """The half every site agrees on: hashed, and sent with the Broadcast."""

    method: str = "custom"
    """Name of the preset or of your own composition; a label."""
    seeds: Seeds = Seeds()
    data: Annotated[Part, In("data")] = Field(default="digits", validate_default=True)
    """The data set: digits, mnist, fashion-mnist, cifar10, cifar100, svhn, tiny-imagenet, gtsrb, images, npz, arrays; sites: each its own."""
    partition: Annotated[PartitionPart, In("partition")] = Field(default="dirichlet", validate_default=True)
    """Which client has which samples."""
    public: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training images the server keeps for itself, taken out of every class before the partition."""
    label_noise: LabelNoise | None = None
    """Default: no label is changed."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share held back to choose snapshots and options of rules by, and to judge clients by."""
    validation_from: Literal["public", "clients"] | None = None
    """Whose images they are; default: public ones if there are any, else every client's."""
    model: Model = Model()
    training: Training = Training()
    objective: Objective = Field(default_factory=dict, validate_default=True)
    alignment: Alignment | None = None
    """Default: none."""
    bank: Bank | None = None
    """Default: none. Needs public images."""
    queue: Queue | None = None
    """Default: none."""
    reference: Reference | None = None
    """Default: none. Needs public images unless its source is a prior."""
    share: Share | None = None
    """Default: none. A split between a shared base and a personal head, chosen before training."""
    companion: Companion | None = None
    """Default: none. A larger network that learns beside the client's on the same machine (`mergenet`)."""
    generator: Generator | None = None
    """Default: none. A second network of every client, which makes images; with an empty objective the only one."""
    sums: Sums | None = None
    """Default: none. With sums, an empty objective and no generator, no network is trained at all."""
    safeguards: Safeguards = Safeguards()
    trace: Trace = Trace()
    fusion: list[Annotated[RulePart, In("fusion")]] = Field(default=["iffi"], validate_default=True, min_length=1)
    """Fusion rules: the first makes the global model, the others are scored beside it on the same uploads."""
    rounds: Count = 1
    """Real exchanges. The network that the first rule makes is where the next round starts; `training` describes one round."""
    participation: Participation = Participation()
    """Which clients train in a round; all of them where there is only one round."""
    snapshots: Annotated[int | list[int], BeforeValidator(_snapshots)] = 10
    """Epochs between snapshots (intermediate uploads, fused and scored); 0: only at the end; or after which epochs, `[1, 11, 21]`, and
    at the end. With several rounds: after every round."""
    evaluation: Evaluation = Evaluation()
    upload: UploadOptions = UploadOptions()
    reveal: Reveal = Reveal()
    quorum: Count | None = None
    """Minimum number of uploads to fuse in a federation; default: all (`partition.clients`)."""
    deadline: Positive | None = None
    """Seconds a federation waits for all uploads; then it fuses if the quorum is reached. Default: wait until the quorum is reached."""

    @model_validator(mode="before")
    @classmethod
    def _former_names(cls, raw: Any) -> Any:
        return with_current_names(raw) if isinstance(raw, Mapping) else raw

    @field_validator("fusion")
    @classmethod
    def _rules_once(cls, rules: list[RulePart]) -> list[RulePart]:
        labels = [rule.label for rule in rules]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"names {twice} twice")
        return rules

    @model_validator(mode="after")
    def _parts_fit(self) -> Federated:
        problem = next(self._problems(), None)
        if problem is not None:
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Why this recipe cannot run: a part needs what nothing provides, or sections exclude each other."""
        if not self.trains:
            yield from self._problems_without_network()
        if self.secure:
            yield from self._problems_of_masks()
        for rule in self.fusion:
            if rule.needs.sums and self.sums is None:
                yield f"fusion: {rule.kind} needs sums of fixed features; add sums: {{}}"
            if rule.needs.generator and self.generator is None:
                yield f"fusion: {rule.kind} needs generators; add generator: {{}}"
            if rule.needs.experts and not self.stacked:
                yield f"fusion: {rule.kind} needs sums of the networks' features; set sums.features: experts (extends: stacked)"
        if self.sums is not None and self.sums.held_back:
            key = f"sums.held_back = {self.sums.held_back}"
            if not self.clients_hold_back:
                yield f"{key}: no client holds images back; set validation: 0.1 and validation_from: clients, or held_back: 0"
            if not (self.sums_only or self.stacked):
                yield f"{key}: networks and sums of one upload are of the same images; set it to 0 (sums.features: experts has uploads of their own)"
        if self.generator is not None:
            yield from self._problems_of_generators()
        if self.stacked:
            yield from self._problems_of_a_second_exchange()
        yield from self._problems_without_public_images()
        for rule in self.fusion:
            if rule.needs.validation and not self.validation:
                yield f"fusion: {rule.kind} chooses on images the server holds back; set validation, for example validation: 0.1"
        yield from self._problems_of_rounds()
        if isinstance(self.snapshots, list) and self.snapshots[-1] > self.round_epochs:
            also = (
                "" if self.generator is None else " + generator.epochs" if self.trains else ", those of the generator"
            )
            yield f"snapshots = {self.snapshots}: must be ≤ training.epochs{also} = {self.round_epochs}"
        if self.model.head == "linear":
            yield from self._problems_of_a_linear_head()
        shortest = sum(stage.epochs or 1 for stage in self.objective.stages)
        if shortest > self.training.epochs:
            yield (
                f"training.epochs = {self.training.epochs}: must be ≥ {shortest}, as many as objective.stages name and one for each "
                "that names none"
            )
        for name, term in self.objective.terms.items():
            if term.needs.bank and self.bank is None:
                yield f"objective.terms.{name}: needs bank; add bank: {{}} and public: 0.1"
            if term.needs.reference and self.reference is None:
                yield f"objective.terms.{name}: needs reference; add reference: {{}} and public: 0.1"
        yield from self._problems_of_a_shared_base()
        if self.queue is not None and not any(term.uses_queue for term in self.objective.terms.values()):
            yield "queue: no term uses it; add supervised-contrastive or bank-contrastive to objective.terms"
        if self.reveal.class_counts is not True and (self.stacked or not self.secure):
            yield from self._problems_of_hidden_counts()

    def _problems_without_network(self) -> Iterator[str]:
        """An empty objective leaves nothing to train: sums alone are sent."""
        if self.sums is None and self.generator is None:
            known = ", ".join(sorted(slot("term").kinds))
            yield f"objective.terms is empty: start from a preset (extends: fafi) or name terms ({known})"
        for section in ("alignment", "bank", "queue", "reference", "companion", "share"):
            if getattr(self, section) is not None:
                yield f"{section}: objective.terms is empty, so there is no network it could help; name terms"
        for rule in self.fusion:
            if rule.needs.network:
                yield f"fusion: {rule.kind} needs networks, and objective.terms is empty; name terms, or use ridge"

    def _problems_of_generators(self) -> Iterator[str]:
        """What assumes that a client trains one network."""
        if self.rounds > 1:
            yield f"rounds = {self.rounds}: generators are for one round; set rounds: 1, or leave generator out"
        if self.secure:
            yield "sums.secure: generators disclose what masks hide; leave generator out, or secure"
        if self.alignment is not None and self.alignment.schedule.needs.other_clients:
            yield f"alignment.schedule = {self.alignment.schedule.kind}: clients would need each other while generators train; choose another"

    def _problems_of_a_second_exchange(self) -> Iterator[str]:
        """Networks come first, sums of their features after: no upload has both."""
        if not self.trains:
            yield "sums.features = experts: there are no networks; name terms (extends: stacked), or take other features"
        if self.rounds > 1:
            yield f"rounds = {self.rounds}: sums of experts' features follow one training; set rounds: 1, or take other features"
        if not self.fusion[0].needs.experts:
            yield (
                f"fusion: {self.fusion[0].kind} comes first, so it would make the model, which is made after the second exchange; "
                "name stacked first"
            )
        for rule in self.fusion:
            if rule.needs.sums and rule.needs.network:
                yield (
                    f"fusion: {rule.kind} needs networks and sums in one upload, and sums of experts' features come in a second exchange; "
                    f"leave {rule.kind} out, or take other features"
                )

    def _problems_of_masks(self) -> Iterator[str]:
        """Masked sums exclude whatever discloses what masks hide, and whatever leaves out a client."""
        clients = self.partition.clients
        if self.trains and not self.stacked:
            yield "sums.secure: networks disclose what masks hide; train none (extends: ridge), or leave secure out"
        if self.reveal.class_counts is not False:
            yield "sums.secure: class counts are under the masks too; set reveal.class_counts: false"
        if self.rounds > 1:
            yield f"rounds = {self.rounds}: sums.secure is for one round; set rounds: 1"
        if clients is not None and clients < 2:
            yield f"partition.clients = {clients}: sums.secure needs at least two, to mask for each other"
        if self.quorum is not None and (clients is None or self.quorum < clients):
            count = "" if clients is None else f"{clients} "
            yield f"quorum = {self.quorum}: with sums.secure masks cancel only in the sum of all {count}clients; leave quorum out"

    def _problems_without_public_images(self) -> Iterator[str]:
        if self.public:
            return
        users = {
            "sums.features: its patches come from public images": self.sums and self.sums.features.needs.public,
            "validation_from: public: there are no public images": self.validation_from == "public",
            "bank: its features come from public images": self.bank,
            "reference: its features come from public images": self.reference and self.reference.source == "public",
        }
        users |= {f"fusion: {rule.kind} needs public images at the server": rule.needs.public for rule in self.fusion}
        yield from (f"{user}; set public, for example public: 0.1" for user, uses in users.items() if uses)

    def _problems_of_rounds(self) -> Iterator[str]:
        for rule in self.fusion:
            if rule.needs.rounds > self.rounds:
                begins = rule.needs.rounds - 1
                yield (
                    f"rounds = {self.rounds}: fusion rule {rule.kind} begins in round {begins} (start_round) and does nothing after "
                    f"the last, so it would never act; set rounds above {begins}, or every: 0"
                )
        if self.rounds == 1:
            fraction = self.participation.fraction
            if fraction < 1:
                yield f"participation.fraction = {fraction:g}: with one round everybody takes part; set rounds above 1, or fraction: 1"
            return
        rounds, first = f"rounds = {self.rounds}", self.fusion[0]
        if not first.makes_network:
            yield (
                f"{rounds}: {first.kind} makes no network that a next round could start from; "
                "name average, mergenet or taught first in fusion, or set rounds: 1"
            )
        if self.companion is not None:
            yield f"{rounds}: a companion starts over in every round; set rounds: 1, or use fusion: [mergenet]"
        if self.objective.stages:
            yield f"{rounds}: stages are for a single round; leave objective.stages out, or set rounds: 1"
        if self.alignment is not None and self.alignment.schedule.needs.other_clients:
            yield f"{rounds}: alignment.schedule = {self.alignment.schedule.kind} is for one round; choose another"

    def _problems_of_a_shared_base(self) -> Iterator[str]:
        for rule in self.fusion:
            if rule.needs.share and self.share is None:
                yield f"fusion: {rule.kind} with chosen: declared needs a split that clients train under; add share: {{}}"
        if self.share is None:
            return
        if self.share.hold == "frozen" and self.training.weight_decay:
            yield f"training.weight_decay = {self.training.weight_decay:g}: would move frozen blocks (share.hold); set it to 0, or hold: pulled"
        if self.share.surveyed and self.reveal.class_counts is False:
            yield (
                f"share.chosen = {self.share.chosen}: follows from class counts, and they are hidden (reveal.class_counts); send them with "
                "noise ({epsilon: 1}), or set chosen: client"
            )

    def _problems_of_a_linear_head(self) -> Iterator[str]:
        """A linear head excludes everything that compares features with prototypes."""
        if self.alignment is not None:
            yield "model.head = linear: alignment pulls prototypes; leave it out, or set head: prototypes"
        for rule in self.fusion:
            if rule.needs.prototypes:
                yield (
                    f"model.head = linear: fusion rule {rule.kind} compares features with prototypes; set head: prototypes, "
                    "or use average, logit-ensemble or entropy-gated"
                )

    def _problems_of_hidden_counts(self) -> Iterator[str]:
        """Hidden class counts exclude rules and sums that disclose them anyway, and rules that need them."""
        masked = self.secure and self.stacked
        disclosing = [rule.kind for rule in self.fusion if rule.discloses and not (masked and rule.needs.sums)]
        if disclosing:
            yield (
                f"reveal.class_counts: hides nothing while fusion has {disclosing[0]}, which makes sites send statistics of "
                f"every class; leave out {', '.join(disclosing)}"
            )
        if self.sums is not None and not masked:
            yield "reveal.class_counts: hides nothing while sums are sent, which have the counts of every class; leave sums out"
        by_counts = [rule.kind for rule in self.fusion if rule.needs.class_counts]
        if by_counts and self.reveal.class_counts is False:
            yield (
                f"reveal.class_counts: {by_counts[0]} uses class counts, and they are hidden; send them with noise "
                f"(reveal.class_counts: {{epsilon: 1}}), or leave out {', '.join(by_counts)}"
            )

    @property
    def encoder(self) -> Part:
        """The encoder of a recipe that trains a network, once it is resolved for its data."""
        if self.model.encoder is None:
            raise RecipeError("model.encoder: not chosen yet; resolve the recipe for its data first (oneround.resolve)")
        return self.model.encoder

    @property
    def summed(self) -> Sums:
        """The section `sums` of a recipe that has one."""
        if self.sums is None:
            raise RecipeError("sums: this recipe has none; set sums, or start from the preset ridge")
        return self.sums

    @property
    def epochs(self) -> int:
        """Local epochs of all networks, all rounds together."""
        return self.rounds * self.round_epochs

    @property
    def round_epochs(self) -> int:
        """Local epochs of a round: those of the network that classifies come first, then the generator's."""
        if self.generator is None:
            return self.training.epochs
        return self.first_generator_epoch + self.generator.epochs

    @property
    def first_generator_epoch(self) -> int:
        """Number of epochs completed when the generator's training begins."""
        return self.training.epochs if self.trains else 0

    @property
    def training_epochs(self) -> int:
        """Local epochs of the network that classifies, all rounds together."""
        return self.rounds * self.training.epochs

    @property
    def trains(self) -> bool:
        """Whether clients train a network that classifies."""
        return not self.objective.empty

    @property
    def sums_only(self) -> bool:
        """Whether sums are all that clients send."""
        return not self.trains and self.generator is None

    @property
    def stacked(self) -> bool:
        """Whether sums are of the clients' networks' features: after training, in a second exchange."""
        return self.sums is not None and self.sums.features.needs.experts

    @property
    def exchanges(self) -> int:
        """How often a site receives a broadcast and returns an upload."""
        return 2 if self.stacked else self.rounds

    @property
    def secure(self) -> bool:
        """Whether sums travel under masks."""
        return self.sums is not None and self.sums.secure

    @property
    def clients_hold_back(self) -> bool:
        """Whether it is the clients who hold images back for validation."""
        return self.validation > 0 and (self.validation_from == "clients" or not self.public)

    @property
    def digest(self) -> str:
        """SHA-256 of the federated half; the local half does not enter. It has the form that version 0.1.0 gave it."""
        former, plain = {name: former for former, name in FORMER_NAMES.items()}, self.plain()
        for section in ADDED_SECTIONS:
            if plain[section] is None:
                del plain[section]
        for section, keys in ADDED.items():
            options: Any = plain
            for name in section.split("."):
                options = options and options[name]
            for key, default in keys.items():
                if options is not None and options[key] == default:
                    del options[key]
        return digest_of({former.get(key, key): value for key, value in plain.items()})

    def plain(self) -> dict[str, Any]:
        """The federated half as JSON-ready data."""
        return self.model_dump(mode="json", include=set(Federated.model_fields))


def digest_of(plain: dict[str, Any]) -> str:
    """SHA-256 of a federated half in JSON-ready form."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


LocalPath = Annotated[Path | None, Field(strict=False)]


class Local(Strict):
    """The half that stays here: paths, and how this machine computes."""

    data_path: LocalPath = None
    """Folder with the data files, or the .npz file or image folder itself; default: the user's cache, filled by download."""
    initial_weights: LocalPath = None
    """A safetensors file to start from instead of random weights (server)."""
    initial_features: LocalPath = None
    """The folder of a finished run whose clients uploaded features (`feature-vote`): prototypes begin at their class means (server)."""
    teacher_weights: LocalPath = None
    """A safetensors file with the large network of `mergenet` and `taught`, instead of training it on public images (server)."""
    frozen_encoder: LocalPath = None
    """A safetensors file with the encoder whose features are summed, for `sums.features.kind: encoder` (server)."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Training arithmetic; auto: bf16 autocast on a GPU that has it, fp32 elsewhere."""
    compile: bool = False
    """Compile the network with TorchInductor; for encoders that have no fused kernels of their own."""
    record: bool = True
    """Record the training step as a CUDA graph and replay it (GPU only)."""
    batched: Literal["auto", True, False] = "auto"
    """Train clients of a simulation with steps of equal shape together, as one network: equal up to rounding, and many times faster
    on a GPU where steps are small; auto: for eight and more clients with small encoders on a GPU, unless `deterministic`. A run
    goes on as it was begun."""
    deterministic: bool = False
    """Bit-equal repeats on a GPU (slower). On a CPU repeats are bit-equal anyway for a fixed number of threads."""
    threads: Count | None = None
    """CPU threads per client; default: 1 for small encoders (clients run side by side), all for large ones, at
    most 4 beside a GPU."""
    workers: Count | None = None
    """Clients trained at once; default: on a CPU as many as threads per client allow, on a GPU two,
    where its memory has room for both."""
    checkpoint_seconds: NotNegative = 30.0
    """Save a client's state at the end of an epoch when the last save is older than this; on a GPU also between its turns."""
    sinks: list[Literal["tensorboard", "mlflow"]] = Field(default=[])
    """Where metrics go besides metrics.jsonl."""
    plugins: list[str] = Field(default=[])
    """Python modules of yours that register parts."""


class Recipe(Federated):
    """One experiment, both halves."""

    local: Local = Local()

    @model_validator(mode="after")
    def _clients_have_no_teacher(self) -> Recipe:
        for name, term in self.objective.terms.items():
            if term.needs.teacher:
                raise ValueError(
                    f"objective.terms.{name}: copies a teacher, and clients have none; distil at the server, fusion: [{{kind: distilled}}]"
                )
        return self

    @property
    def federated(self) -> Federated:
        return Federated.model_validate(self.plain())

    def with_absolute_paths(self) -> Recipe:
        """The same recipe, readable from any working folder."""
        local = {name: path.absolute() for name, path in self.local if isinstance(path, Path)}
        return self.model_copy(update={"local": self.local.model_copy(update=local)})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
