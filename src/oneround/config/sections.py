"""The sections of a recipe: what each is about, with every default. `recipe.py` puts them together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from oneround.config.parts import GuardPart, In, Part, Strict, TermPart
from oneround.errors import did_you_mean

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]

SMALLEST_BATCH = 32  # of test images whose statistics batch norm may use
FAFI = ("cross-entropy", "supervised-contrastive", "prototype-feature", "prototype-separation")


class Seeds(Strict):
    """Three independent sources of randomness; `--seed` sets them together."""

    partition: Seed = 1
    """Which client has which samples."""
    initialisation: Seed = 1
    """The initial weights and prototypes, the same for all clients."""
    training: Seed = 1
    """Shuffles and augmentations."""


class Model(Strict):
    """The network every client trains: an encoder and one prototype per class."""

    encoder: Annotated[Part, In("encoder")] | None = None
    """`cnn`, `resnet18`, …; default: `cnn` for images of up to 16 pixels, `resnet18` above."""
    head: Literal["prototypes", "linear"] = "prototypes"
    """Scores are unit features times prototypes, or features times a matrix plus a bias, as networks usually end."""


class Augment(Strict):
    """Random views of every sample, drawn per sample and computed in batches on the device."""

    crop_scale: list[Fraction] = Field(default=[0.2, 1.0], min_length=2, max_length=2)
    """Range of the random resized crop's area."""
    crop_ratio: list[Positive] = Field(default=[0.75, 4 / 3], min_length=2, max_length=2)
    """Range of the crop's width over height."""
    flip: Fraction | None = None
    """Probability of a mirror image; default: 0.5, or 0 for data that a mirror changes (digits, signs)."""
    brightness: Fraction = 0.4
    contrast: Fraction = 0.4
    saturation: Fraction = 0.4
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    jitter: Fraction = 0.8
    """Probability that the four colour changes are applied."""
    greyscale: Fraction = 0.2
    """Probability of a grey image."""
    shift: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest shift, as a share of the image's side; what leaves an edge is filled by what mirrors in it."""
    hole: Fraction = 0.0
    """Side of a square that is blanked out, as a share of the image's."""
    per_batch: bool = False
    """Draw once per batch instead of per sample; only to reproduce code that did so."""

    @model_validator(mode="after")
    def _ranges(self) -> Augment:
        for name, (low, high) in (("crop_scale", self.crop_scale), ("crop_ratio", self.crop_ratio)):
            if not 0 < low <= high:
                raise ValueError(f"{name} must rise from above 0: [low, high]")
        return self


class Training(Strict):
    """How a client trains; the defaults are the reference setting of FAFI and its descendants."""

    epochs: Count = 50
    batch_size: Count = 512
    """Samples per step. A smaller client uses one batch of its own size."""
    views: Literal[1, 2] = 2
    """Random views of every sample in a step; contrastive terms want two."""
    sampling: Literal["shuffle", "balanced"] = "shuffle"
    """Every sample once per epoch, or every class that the client has equally often."""
    last_batch: Literal["wrap", "keep", "drop"] = "wrap"
    """An incomplete last batch is filled from the start of the same shuffle, kept short, or dropped."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Adam: `momentum` is its β₁, β₂ is 0.999."""
    learning_rate: Positive = 0.05
    schedule: Literal["constant", "cosine", "triangular", "steps"] = "constant"
    """Learning rate: constant, falling, or rising for a fifth and then falling over the whole training, all rounds of it; or
    multiplied by `factor` after milestones."""
    milestones: list[Count] = Field(default=[])
    """Of `steps`: local epochs, counted anew in every round, after which the rate falls."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Of `steps`: the factor that the rate is multiplied by."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    """Of `sgd`: descend along what the gradient and the momentum will be after the step."""
    weight_decay: NotNegative = 0.0
    restart_optimizer: bool = True
    """Forget momentum at the start of every epoch, as in the reference setting."""
    clip_norm: NotNegative = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    augment: Augment = Augment()

    @model_validator(mode="after")
    def _steps_have_milestones(self) -> Training:
        if (self.schedule == "steps") != bool(self.milestones):
            fix = (
                "name milestones, for example [3, 8]"
                if not self.milestones
                else "set schedule: steps, or leave milestones out"
            )
            raise ValueError(f"schedule = {self.schedule} with milestones = {self.milestones}: {fix}")
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise ValueError("nesterov: needs optimizer: sgd and a momentum above 0; leave it out, or set them")
        if self.milestones != sorted(set(self.milestones)):
            raise ValueError(f"milestones = {self.milestones}: must rise, each once")
        return self


class Generator(Strict):
    """A network that learns to make images like a client's own (flow matching), for fusion rules that train on such images."""

    network: Annotated[Part, In("generator")] = Field(default="unet", validate_default=True)
    """Its architecture."""
    epochs: Count = 200
    """Local epochs, after those of the other network if a client trains one."""
    batch_size: Count = 512
    """Images per step. A smaller client uses one batch of its own size."""
    learning_rate: Positive = 6e-4
    """Of AdamW: constant after the warm-up, until it falls."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.99], min_length=2, max_length=2)
    """Decay of AdamW's two running means, of gradients and of their squares."""
    weight_decay: NotNegative = 0.01
    warm_up: Annotated[int, Field(ge=0)] = 200
    """Steps over which the rate rises from 0; at most a fifth of all steps."""
    fall: Fraction = 0.4
    """Share of the steps, the last ones, over which the rate falls."""
    lowest: Fraction = 0.02
    """Where it falls to, as a share of the learning rate."""
    clip_norm: NotNegative = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    average: Annotated[float, Field(ge=0, lt=1)] = 0.9995
    """Decay of the moving average of the weights, which is what is sent; smaller at first, so that it forgets where they began."""
    drop_label: Fraction = 0.1
    """Probability that an image's class is withheld."""
    flip: Fraction | None = None
    """Probability of a mirror image; default: 0.5, or 0 for data that a mirror changes (digits, signs)."""

    @property
    def batching(self) -> Training:
        """How an epoch is cut into batches."""
        return Training(epochs=self.epochs, batch_size=self.batch_size, views=1, restart_optimizer=False)


class Participation(Strict):
    """Which clients train in a round."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the clients, drawn anew every round."""
    minimum: Count = 2
    """Minimum number of clients per round (all, if there are fewer)."""


class Stage(Strict):
    """A stretch of the training with its own choice of terms."""

    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Its share of the local epochs (at least one epoch); the last stage takes the rest."""
    epochs: Count | None = None
    """Alternatively, its number of epochs."""
    terms: dict[str, NotNegative] | None = None
    """The terms of this stage, with their weights; default: all terms."""
    align: bool = True
    """Whether the loss includes the alignment."""


class Objective(Strict):
    """What a client minimises: a weighted sum of terms, all the time or stage by stage."""

    terms: dict[str, Annotated[TermPart, In("term")]] = Field(default_factory=dict)
    """By name, each with its options: `supervised-contrastive: {temperature: 0.07, weight: 1}`."""
    stages: list[Stage] = Field(default=[])
    """Default: one stage with every term."""

    @model_validator(mode="before")
    @classmethod
    def _name_is_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("terms"), dict):
            return value
        named = {
            name: {"kind": name, **(options or {})} if isinstance(options, dict | None) else options
            for name, options in value["terms"].items()
        }
        return {**value, "terms": named}

    @property
    def empty(self) -> bool:
        """Whether there is nothing to minimise."""
        return not any(term.weight for term in self.terms.values())

    @model_validator(mode="after")
    def _stages_follow(self) -> Objective:
        for number, stage in enumerate(self.stages):
            where, last = f"stages.{number}", number == len(self.stages) - 1
            if (stage.share is None) + (stage.epochs is None) != (2 if last else 1):
                rule = (
                    "the last stage takes the rest: no share, no epochs"
                    if last
                    else "give share or epochs, one of both"
                )
                raise ValueError(f"{where}: {rule}")
            for name in stage.terms or {}:
                if name not in self.terms:
                    hint = did_you_mean(name, self.terms)
                    raise ValueError(f"{where}.terms.{name}: no such term{hint} (terms: {', '.join(self.terms)})")
            if stage.terms is not None and not any(stage.terms.values()):
                raise ValueError(f"{where}.terms: no term counts; give at least one a weight above 0")
        return self


class Alignment(Strict):
    """A pull towards fixed anchors that the server sends to all: L = L_base + λ·L_align."""

    anchors: Annotated[Part, In("anchors")] = Field(default="etf", validate_default=True)
    """`etf` (a simplex equiangular tight frame) or `random` unit vectors."""
    target: Literal["prototypes", "features"] = "prototypes"
    """What is pulled to the anchors."""
    classes: Literal["all", "present"] = "all"
    """Prototypes of all classes, or of those in the batch."""
    distance: Literal["squared", "cosine"] = "squared"
    """Mean squared difference over all entries, or 1 − cos."""
    initial: Literal["random", "anchors", "fixed"] = "random"
    """Where prototypes begin: as the network is initialised, or on their anchors; `fixed`: on their anchors, where they stay."""
    path: Literal["direct", "progressive"] = "direct"
    """Pull to the anchors from the start, or to a point that moves from the initial prototypes to them."""
    weight: Annotated[Part, In("weight")] = Field(default="fixed", validate_default=True)
    """λ: `fixed`, `entropy`, `uncertainty`, `equilibrium`."""
    schedule: Annotated[Part, In("schedule")] = Field(default="constant", validate_default=True)
    """s(p) over the whole training: `constant`, `linear`, `cosine`, `consensus`."""
    guard: Annotated[GuardPart, In("guard")] = Field(default="none", validate_default=True)
    """What keeps a learned λ in bounds: `none`, `inverse-variance`, `hinge`, `clamp`."""
    one_class: Literal["all", "alignment"] = "all"
    """What a client minimises whose images are all of one class: the whole loss, or the alignment alone."""

    @model_validator(mode="after")
    def _guard_fits(self) -> Alignment:
        self.guard.check(self.weight)
        return self

    @model_validator(mode="after")
    def _path_leads_somewhere(self) -> Alignment:
        if self.path == "progressive" and self.initial != "random":
            raise ValueError(
                "path = progressive: prototypes begin on their anchors already; set initial: random, or path: direct"
            )
        if self.target == "prototypes" and self.initial == "fixed":
            raise ValueError(
                "initial = fixed: prototypes stay on their anchors, there is nothing to pull; set target: features, or initial: anchors"
            )
        return self


class Share(Strict):
    """A split that clients train under: the first blocks of the network are a shared base, which training holds at the broadcast's."""

    chosen: Literal["all", "each", "client"] = "all"
    """Number of shared blocks: one for all or one for each client, by the server from class histograms that the sites send before
    training; or by each client from its own labels."""
    hold: Literal["pulled", "frozen"] = "pulled"
    """Pull the shared blocks to the broadcast's weights w₀, or leave them as they are; norm statistics are the client's in any case."""
    strength: Positive = 0.1
    """μ of `pulled`: + μ/2·‖w − w₀‖²."""

    @property
    def surveyed(self) -> bool:
        """Whether histograms are exchanged before training."""
        return self.chosen != "client"


class TeacherFeatures(Strict):
    """Base of sections whose features come from a teacher trained on the server's public images."""

    teacher_epochs: Count = 20
    teacher: Objective = Field(default={"terms": {name: {} for name in FAFI}}, validate_default=True)
    """What the teacher minimises; FAFI's four terms unless others are named."""

    @model_validator(mode="after")
    def _teacher_learns(self) -> TeacherFeatures:
        if self.teacher.empty:
            raise ValueError("teacher.terms is empty: leave teacher out, or name terms")
        for name, term in self.teacher.terms.items():
            for need in ("bank", "reference", "teacher"):
                if getattr(term.needs, need):
                    raise ValueError(
                        f"teacher.terms.{name}: needs a {need}, which a teacher does not have; leave it out"
                    )
        return self


class Bank(TeacherFeatures):
    """Features of public images, made by a teacher that the server trains on them, sent to every site."""

    size: Count = 4096
    """How many features; all public images if there are fewer."""


class Queue(Strict):
    """A client's own past features, as more negatives of its contrastive terms."""

    size: Count = 4096
    warm_up: Annotated[int, Field(ge=0)] = 1
    """Epochs whose features are not kept."""


class Reference(TeacherFeatures):
    """A distribution of features that the server sends to all, for the term `reference` to pull towards."""

    source: Literal["public", "sphere", "simplex"] = "public"
    """Features of public images by the server's teacher; unit vectors in all directions; or one point per class."""
    size: Count = 1024
    """How many features stand for the distribution."""


class Adapter(Strict):
    """Size and training of MergeNet's adapter."""

    width: Count = 64
    """Of every attention head (d_attention)."""
    heads: Count = 8
    layers: Count = 2
    attention_dropout: Fraction = 0.1
    dropout: Fraction = 0.2
    """In the feed-forward part. Dropout acts while the adapter learns, never in its output."""
    rescale: bool = True
    """Give every row the norm it had: the last layer norm makes rows of norm √columns, which batch norm hides but which slows
    learning. False: as published."""
    learning_rate: Annotated[NotNegative, Field(le=1e6)] = 0.001
    schedule: Literal["constant", "cosine"] = "constant"
    """Of the learning rate, over all fusions."""
    weight_decay: NotNegative = 0.01
    """Not on biases and norms."""
    clip_norm: Positive = 50.0
    """Largest norm of the adapter's gradient."""


class LargerNetwork(Strict):
    """The teacher: the network that the students learn from."""

    encoder: Annotated[Part, In("encoder")] = Field(default="resnet50", validate_default=True)
    learning_rate: Positive = 0.05


class Pair(Strict):
    """A student's tensor and the teacher's tensor it attends to, by name."""

    student: str
    teacher: str


class Companion(Strict):
    """MergeNet on one machine: a larger network learns from the same batches and transfers its knowledge through an adapter."""

    kind: Literal["mergenet"] = "mergenet"
    teacher: LargerNetwork = Field(default_factory=LargerNetwork)
    """Its encoder and learning rate; its initial weights are random."""
    adapter: Adapter = Adapter()
    pairs: list[Pair] = Field(default=[])
    """As in the fusion rule `mergenet`."""
    every: Count = 10
    """Batches between two fusions."""

    @model_validator(mode="before")
    @classmethod
    def _name_is_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class Sums(Strict):
    """Sums over every client's images of fixed features: they add up to the sums of pooled data, however it is split."""

    features: Annotated[Part, In("features")] = Field(default="patches", validate_default=True)
    """φ: `patches` (from a seed, no real data) or `encoder` (a frozen network, sent with the broadcast)."""
    mirror: Literal["none", "copies", "features"] | None = None
    """Mirror images: `features` averages the features of an image and its mirror image (half as many say as much), `copies`
    counts mirror images as images of their own, `none`; default: features, or none for data that a mirror changes (digits, signs)."""
    precision: Literal["fp32", "int16", "fp16", "bf16"] = "fp32"
    """Of the second moments in the upload; the 16-bit ones divide by the diagonal first and halve the upload. The quotients lie
    between -1 and 1, where 65,535 even steps (int16) round less than either kind of float."""
    rank: Count | None = None
    """Number of leading directions of the second moments to send, the rest as a diagonal; default: all, exactly."""
    shift: Annotated[int, Field(ge=0, le=8)] = 0
    """Every image counts five times: as it is, and moved by so many pixels towards each corner; 0: once."""
    held_back: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often an image counts that a client holds back (`validation_from: clients`), beside those that its network was trained on; 0:
    not at all. The features of trained images fit better than those of new ones."""
    secure: bool = False
    """Send the sums under pairwise masks that cancel in their total, which is all the server then sees; all clients must arrive."""

    @model_validator(mode="after")
    def _precision_fits(self) -> Sums:
        if self.secure and (self.precision != "fp32" or self.rank is not None):
            short = f"precision = {self.precision}" if self.precision != "fp32" else f"rank = {self.rank}"
            raise ValueError(f"{short}: sums under masks are whole numbers of 64 bits; leave it out, or secure")
        if self.rank is not None and self.precision == "int16":
            raise ValueError(
                "precision = int16: directions (rank) have no common scale; use fp16 with rank, or leave rank out"
            )
        return self

    @property
    def copies(self) -> int:
        """How often every image is counted."""
        return (2 if self.mirror == "copies" else 1) * (5 if self.shift else 1)


class Safeguards(Strict):
    """What training does about λ out of range, a loss that is not finite, or collapsed features."""

    largest_weight: Positive = 1000.0
    """The effective λ above which alignment counts as exploding."""
    on_explosion: Literal["warn", "clamp", "stop"] = "warn"
    """Warn and go on; hold λ at the limit (and drop the alignment of a client that diverges or collapses); or stop."""


class Trace(Strict):
    """How often the gradients of the terms are recorded."""

    every: Annotated[int, Field(ge=0)] = 50
    """Interval in steps, recorded at the end of an epoch; 0: never."""


class UploadOptions(Strict):
    """How an upload is encoded, and how large its tensors may be."""

    encoding: Literal["fp32", "fp16", "int8"] = "fp32"
    """As trained; half precision; or one byte per value with a scale per channel (one-dimensional tensors stay fp32)."""
    largest_norm: Positive = 10.0
    """The largest norm of an upload's tensor, relative to the broadcast's; a server refuses more."""


class Noise(Strict):
    """Laplace noise on counts: ε-differential privacy for one sample more or less."""

    epsilon: Positive
    """The scale of the noise is 1/ε; smaller is more private."""


class Reveal(Strict):
    """What a site discloses besides what it learned."""

    class_counts: bool | Noise = True
    """How many samples of each class it has: as they are; false: only how many in all; `{epsilon: 1}`: with noise."""


class Evaluation(Strict):
    """How models are scored on test images."""

    unnormalised: bool = False
    """Feed test images as they are; only to reproduce code that normalised training images alone."""
    batch_norm: Literal["running", "batch"] = "running"
    """`batch`: score every network a second time with batch norm on the statistics of the test batch, as code whose networks
    stayed in training mode did. Such a score is transductive and called so: it depends on which images share a batch."""
    batch_size: Annotated[int, Field(ge=SMALLEST_BATCH)] = 256
    """Of `batch`: shuffled test images per batch; a short last batch joins the one before."""

    @property
    def transductive(self) -> int | None:
        """Images per batch of the transductive scores; None: there are none."""
        return self.batch_size if self.batch_norm == "batch" else None


class LabelNoise(Strict):
    """Wrong labels at some clients, to test how clients are judged."""

    clients: Count = 1
    """How many, drawn at random among those with data."""
    share: Fraction = 0.4
    """Of their labels, replaced by another class at random; those held back for validation as well."""
