"""The experiment as data.

A recipe has two halves. The *federated* half says what everybody does (data, partition, model, training, objective,
fusion, seeds); it is hashed and travels in the Broadcast. The *local* half says how this machine does it (paths, device,
threads); it never leaves the site and never changes what is hashed.

This file is the whole of it and what must fit together; `sections.py` has the sections with every default. `reading.py` turns presets, files and overrides into a `Recipe`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from oneround.parts import In, Part, Strict, slot
from oneround.sections import (
    Alignment,
    Bank,
    Count,
    Evaluation,
    LabelNoise,
    Model,
    NotNegative,
    Objective,
    Participation,
    Positive,
    Queue,
    Rails,
    Reference,
    Reveal,
    Seeds,
    Sending,
    Sums,
    Trace,
    Training,
)


class Federated(Strict):
    """The half every site agrees on: hashed, and sent with the Broadcast."""

    method: str = "custom"
    """Name of the preset or of your own composition; a label."""
    seeds: Seeds = Seeds()
    data: Annotated[Part, In("data")] = Field(default="digits", validate_default=True)
    """The data set: digits, mnist, fashion-mnist, cifar10, cifar100, svhn, tiny-imagenet, gtsrb, images, npz, arrays; sites: each its own."""
    partition: Annotated[Part, In("partition")] = Field(default="dirichlet", validate_default=True)
    """Who holds what."""
    public: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training images the server keeps for itself, taken out of every class before the partition."""
    label_noise: LabelNoise | None = None
    """Left out: every label is as the data has it."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share held back to choose by (snapshots, options of rules) and to judge clients by."""
    validation_from: Literal["public", "clients"] | None = None
    """Whose images are held back; left out: the public ones if there are any, else every client's."""
    model: Model = Model()
    training: Training = Training()
    objective: Objective = Field(default_factory=dict, validate_default=True)
    alignment: Alignment | None = None
    """Left out: none."""
    bank: Bank | None = None
    """Left out: none. Needs public images."""
    queue: Queue | None = None
    """Left out: none."""
    reference: Reference | None = None
    """Left out: none. Needs public images unless its source is a prior."""
    companion: Annotated[Part, In("companion")] | None = None
    """Left out: none. Something that works beside a client's training: `mergenet`, a larger network on the same machine."""
    sums: Sums | None = None
    """Left out: none. With sums and an empty objective no network is trained at all."""
    rails: Rails = Rails()
    trace: Trace = Trace()
    fusion: list[Annotated[Part, In("fusion")]] = Field(default=["iffi"], validate_default=True, min_length=1)
    """Fusion rules: the first makes the global model, the others are scored beside it on the same uploads."""
    rounds: Count = 1
    """Real exchanges. With more than one, the network the first rule makes is where all start in the next; `training` is of one round."""
    participation: Participation = Participation()
    """Who trains in a round; all of them where there is only one."""
    snapshots: Annotated[int, Field(ge=0)] = 10
    """Fuse and score what an upload would give every so many epochs; 0: only at the end. With several rounds: after every round."""
    evaluation: Evaluation = Evaluation()
    upload: Sending = Sending()
    reveal: Reveal = Reveal()
    quorum: Count | None = None
    """Fewest uploads a real federation makes a model of; left out: all (`partition.clients`)."""
    deadline: Positive | None = None
    """Seconds a real federation waits for all, then fuses if the quorum is there; left out: until the quorum is there."""

    @field_validator("fusion")
    @classmethod
    def _rules_once(cls, rules: list[Part]) -> list[Part]:
        labels = [rule.label for rule in rules]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"names {twice} twice")
        return rules

    @model_validator(mode="after")
    def _parts_fit(self) -> Federated:
        if self.objective.empty:
            self._check_without_network()
        if self.secure:
            self._check_secure()
        for part in self.fusion:
            if getattr(part, "needs_sums", False) and self.sums is None:
                raise ValueError(f"fusion: {part.kind} needs sums of fixed features; add sums: {{}}")
        if self.sums is not None and getattr(self.sums.features, "needs_public", False) and not self.public:
            raise ValueError("sums.features: its patches come from public images; set public, for example public: 0.1")
        if self.validation_from == "public" and not self.public:
            raise ValueError("validation_from: public: there are no public images; set public, for example public: 0.1")
        for name, section in (("bank", self.bank), ("reference", self.reference)):
            if section is not None and not self.public and getattr(section, "source", "public") == "public":
                raise ValueError(f"{name}: its features come from public images; set public, for example public: 0.1")
        for part in self.fusion:
            if getattr(part, "needs_validation", False) and not self.validation:
                raise ValueError(
                    f"fusion: {part.kind} chooses on images the server holds back; set validation, for example validation: 0.1"
                )
            if getattr(part, "needs_public", False) and not self.public:
                raise ValueError(
                    f"fusion: {part.kind} needs public images at the server; set public, for example public: 0.1"
                )
        self._check_rounds()
        if self.model.head == "linear":
            self._check_linear()
        shortest = sum(stage.epochs or 1 for stage in self.objective.stages)
        if shortest > self.training.epochs:
            raise ValueError(
                f"training.epochs = {self.training.epochs}: must be ≥ {shortest}, as many as objective.stages name and one for each "
                "that names none"
            )
        for name, term in self.objective.terms.items():
            needed = getattr(term, "needs", "")
            if needed in Federated.model_fields and getattr(self, needed) is None:
                raise ValueError(f"objective.terms.{name}: needs {needed}; add {needed}: {{}} and public: 0.1")
        contrasts = any(
            hasattr(term, "temperature") and hasattr(term, "beta") for term in self.objective.terms.values()
        )
        if self.queue is not None and not contrasts:
            raise ValueError(
                "queue: no term uses it; add supervised-contrastive or bank-contrastive to objective.terms"
            )
        if self.reveal.class_counts is not True and not self.secure:
            self._check_hidden()
        return self

    def _check_secure(self) -> None:
        """What masked sums rule out: all that tells what masks hide, and all that does without one of the clients."""
        clients = getattr(self.partition, "clients", None)  # None: as many as the data have, known later
        if self.trains:
            raise ValueError(
                "sums.secure: networks tell what masks hide; train none (extends: ridge), or leave secure out"
            )
        if self.reveal.class_counts is not False:
            raise ValueError("sums.secure: class counts are under the masks too; set reveal.class_counts: false")
        if self.rounds > 1:
            raise ValueError(f"rounds = {self.rounds}: sums.secure is for one round; set rounds: 1")
        if clients is not None and clients < 2:
            raise ValueError(f"partition.clients = {clients}: sums.secure needs at least two, to mask for each other")
        if self.quorum is not None and (clients is None or self.quorum < clients):
            count = "" if clients is None else f"{clients} "
            raise ValueError(
                f"quorum = {self.quorum}: with sums.secure masks cancel only in the sum of all {count}clients; leave quorum out"
            )

    def _check_hidden(self) -> None:
        """What hidden class counts rule out: rules that tell them all the same, and rules that need them."""
        telling = [rule.kind for rule in self.fusion if getattr(rule, "reveals", "")]
        if telling:
            raise ValueError(
                f"reveal.class_counts: hides nothing while fusion has {telling[0]}, which makes sites send statistics of "
                f"every class; leave out {', '.join(telling)}"
            )
        going_by = [rule.kind for rule in self.fusion if getattr(rule, "needs_counts", False)]
        if going_by and self.reveal.class_counts is False:
            raise ValueError(
                f"reveal.class_counts: {going_by[0]} goes by class counts, and they are hidden; tell them with noise "
                f"(reveal.class_counts: {{epsilon: 1}}), or leave out {', '.join(going_by)}"
            )

    def _check_without_network(self) -> None:
        """What an empty objective rules out."""
        if self.sums is None:
            known = ", ".join(sorted(slot("term").kinds))
            raise ValueError(f"objective.terms is empty: start from a preset (extends: fafi) or name terms ({known})")
        for name in ("alignment", "bank", "queue", "reference", "companion"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: objective.terms is empty, so there is no network it could help; name terms")
        for part in self.fusion:
            if getattr(part, "needs_network", True):
                raise ValueError(
                    f"fusion: {part.kind} needs networks, and objective.terms is empty; name terms, or use ridge"
                )

    def _check_rounds(self) -> None:
        """What several rounds rule out, and what needs them."""
        for part in self.fusion:
            begins = getattr(part, "start_round", 0)
            if begins >= self.rounds and getattr(part, "every", 0):
                raise ValueError(
                    f"rounds = {self.rounds}: fusion rule {part.kind} begins in round {begins} (start_round) and does nothing after "
                    f"the last, so it would never act; set rounds above {begins}, or every: 0"
                )
        if self.rounds == 1:
            if self.participation.fraction < 1:
                raise ValueError(
                    f"participation.fraction = {self.participation.fraction:g}: with one round everybody takes part; set rounds above 1, or fraction: 1"
                )
            return
        first = self.fusion[0]
        if not getattr(first, "continues", False):
            raise ValueError(
                f"rounds = {self.rounds}: {first.kind} makes no network that a next round could start from; "
                "name average, mergenet or taught first in fusion, or set rounds: 1"
            )
        if self.companion is not None:
            raise ValueError(
                f"rounds = {self.rounds}: a companion begins anew in every round; set rounds: 1, or use fusion: [mergenet]"
            )
        if self.objective.stages:
            raise ValueError(
                f"rounds = {self.rounds}: stages are of a training in one round; leave objective.stages out"
            )
        if self.alignment is not None and getattr(self.alignment.schedule, "needs_others", False):
            raise ValueError(
                f"rounds = {self.rounds}: alignment.schedule = {self.alignment.schedule.kind} is for one round; choose another"
            )

    def _check_linear(self) -> None:
        """What a linear head rules out: everything that compares prototypes."""
        if self.alignment is not None:
            raise ValueError("model.head = linear: alignment pulls prototypes; leave it out, or set head: prototypes")
        for part in self.fusion:
            if getattr(part, "needs_prototypes", True):
                raise ValueError(
                    f"model.head = linear: fusion rule {part.kind} compares features with prototypes; set head: prototypes, "
                    "or use average, logit-ensemble or entropy-gated"
                )

    @property
    def epochs(self) -> int:
        """Local epochs of the whole training, all rounds together."""
        return self.rounds * self.training.epochs

    @property
    def trains(self) -> bool:
        """Whether clients train a network; otherwise sums are all they send."""
        return not self.objective.empty

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
        """SHA-256 of the federated half; the local half does not enter."""
        return hashlib.sha256(json.dumps(self.plain(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def plain(self) -> dict[str, Any]:
        """The federated half as JSON-ready data."""
        return self.model_dump(mode="json", include=set(Federated.model_fields))


class Local(Strict):
    """The half that stays here: where things lie and how this machine works."""

    data_path: Annotated[Path | None, Field(strict=False)] = None
    """Folder with the data files, or the .npz file or image folder itself; left out: the user's cache, filled by download."""
    initial_weights: Annotated[Path | None, Field(strict=False)] = None
    """A safetensors file to start from instead of random weights (server)."""
    teacher_weights: Annotated[Path | None, Field(strict=False)] = None
    """A safetensors file with the large network of `mergenet` and `taught`, instead of training it on public images (server)."""
    frozen_encoder: Annotated[Path | None, Field(strict=False)] = None
    """A safetensors file with the encoder whose features are summed, for `sums.features.kind: encoder` (server)."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Training arithmetic; auto: bf16 autocast on a GPU that has it, fp32 elsewhere."""
    compile: bool = False
    """Compile the network with TorchInductor; for encoders that have no fused kernels of their own."""
    record: bool = True
    """Record the training step as a CUDA graph and replay it (GPU only)."""
    deterministic: bool = False
    """Bit-equal repeats on a GPU (slower). On a CPU repeats are bit-equal anyway for a fixed number of threads."""
    threads: Count | None = None
    """CPU threads per client; left out: 1 for small encoders (clients run side by side), all for large ones, at
    most 4 beside a GPU."""
    workers: Count | None = None
    """Clients trained at once on a CPU; left out: as many as threads per client allow."""
    checkpoint_seconds: NotNegative = 30.0
    """Save a client's state at the end of an epoch when the last save is older than this."""
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
            if getattr(term, "needs", "") == "teacher":
                raise ValueError(
                    f"objective.terms.{name}: copies a teacher, and clients have none; distil at the server, fusion: [{{kind: distilled}}]"
                )
        return self

    @property
    def federated(self) -> Federated:
        return Federated.model_validate(self.plain())

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
