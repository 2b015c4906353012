"""Validation of messages: a schema for every kind of manifest, and checks of counts, histories and sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from oneround.errors import refused

if TYPE_CHECKING:
    from oneround.protocol import blob
    from oneround.protocol.messages import Broadcast

MAX_DEPTH = 24  # levels of a manifest; a recipe, its deepest part, has about ten
RESERVED = ("event", "client", "rule")  # keys that the log itself adds to an entry


def _at_most_64_bits(value: Any) -> Any:
    """Integers of at most 64 bits: JSON allows any length."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of more than 64 bits")
    return value


Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, Field(max_length=10_000)]
Short = Annotated[str, Field(max_length=200)]
Key = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]  # no control characters
Digest = Annotated[str, Field(max_length=128)]
Number = Annotated[int | float, BeforeValidator(_at_most_64_bits)]
Metrics = Annotated[dict[Key, Number | None], Field(max_length=500)]


class Schema(BaseModel):
    """A strict schema: known keys, exact types, no conversion."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Trace(Schema):
    """Gradients at one tensor: every term's norm, and the cosines between terms."""

    norm: Metrics
    cosine: Metrics


class HistoryEntry(Schema):
    """Training metrics of one epoch. Terms and companions add metrics of their own, so any short key is allowed."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, Number | bool | Short | Annotated[list[Short], Field(max_length=100)] | None]

    epoch: Annotated[int, Field(ge=1, lt=2**31)]
    gradients: Annotated[dict[Key, Trace], Field(max_length=20)] | None = None
    trouble: Annotated[list[Short], Field(max_length=100)] | None = None

    @model_validator(mode="after")
    def _few_short_keys(self) -> HistoryEntry:
        keys = list(self.model_extra or {})
        if len(keys) > 500 or not all(0 < len(key) <= 200 and key.isprintable() for key in keys):
            raise ValueError("at most 500 keys of 200 printable characters")
        return self


History = Annotated[list[HistoryEntry], Field(max_length=1_000_000)]


class Manifest(Schema):
    """Keys of every manifest."""

    format: int
    kind: str
    shapes: dict[Text, Annotated[list[Int], Field(max_length=64)]]
    sha256: Digest


class UploadManifest(Manifest):
    client: Key
    recipe_digest: Digest
    epoch: Int
    class_counts: list[Int]
    history: History
    stopped: Text = ""
    roster: list[Short] | None = None
    context: Digest | None = None


class BroadcastManifest(Manifest):
    recipe: dict[str, Any]
    """As `parse_federated` checks it."""
    recipe_digest: Digest | None = None
    """Missing in broadcasts of the first version, where it follows from the recipe."""
    class_names: list[Text]
    shape: Annotated[list[Int], Field(min_length=3, max_length=3)]
    round: Int
    roster: list[Annotated[list[Short], Field(min_length=2, max_length=2)]] = []
    depths: dict[Short, Int] = {}
    experts: list[Short] = []


class StateManifest(Manifest):
    client: Short
    recipe_digest: Digest
    epoch: Int
    history: History


SCHEMAS: dict[str, type[Manifest]] = {
    "upload": UploadManifest,
    "broadcast": BroadcastManifest,
    "state": StateManifest,
    "shard": Manifest,
}
"""Other kinds are read only by the site that wrote them."""


def check_manifest(manifest: blob.Manifest, kind: str, where: str) -> None:
    """Refuse a manifest that violates its kind's schema: keys, types, depth, sizes."""
    if not is_shallow(manifest):
        raise refused(where, f"damaged manifest (more than {MAX_DEPTH} levels deep)")
    schema = SCHEMAS.get(kind)
    if schema is None:
        return
    try:
        schema.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
        raise refused(where, f"damaged manifest ({reason})") from None


def is_shallow(value: object) -> bool:
    """Whether nested lists and mappings have at most `MAX_DEPTH` levels."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return True
    return False


def check_history(history: list[dict[str, Any]], broadcast: Broadcast, where: str) -> None:
    """Refuse entries outside this round's epochs, out of order, or with keys reserved for the log."""
    before = broadcast.first_epoch
    for entry in history:
        if not before < entry["epoch"] <= broadcast.last_epoch:
            raise refused(
                where, f"its history has epoch {entry['epoch']}; expected {before + 1} to {broadcast.last_epoch} here"
            )
        before = entry["epoch"]
        reserved = next((key for key in RESERVED if key in entry), None)
        if reserved is not None:
            raise refused(where, f"its history has the key {reserved}, which is reserved for the log")


def counts_of(manifest: blob.Manifest, summed: Tensor | None, broadcast: Broadcast, where: str) -> list[int]:
    """The declared class counts; they must agree with `summed`, the counts in the upload's sums, if it has sums."""
    counts: list[int] = manifest["class_counts"]
    if len(counts) != broadcast.classes or not all(0 <= n < 2**53 for n in counts) or not any(counts):
        raise refused(where, f"class_counts must be {broadcast.classes} counts, at least one above 0")
    sums = broadcast.recipe.sums
    if summed is not None and sums is not None and summed.tolist() != [sums.copies * n for n in counts]:
        raise refused(where, "its sums and its class_counts are over different numbers of images")
    return counts


def check_weights(weights: dict[str, Tensor], where: str) -> None:
    """Refuse impossible norm statistics: negative variances or batch counts."""
    for name, tensor in weights.items():
        if name.endswith(("running_var", "num_batches_tracked")) and bool((tensor < 0).any()):
            raise refused(where, f"{name} holds {float(tensor.min()):.3g}, and it cannot be below 0")


ROUNDING = 1e-3  # relative to the squares around zero: larger negative squares are no rounding error


def check_sums(sums: dict[str, Tensor], where: str) -> None:
    """Refuse unmasked sums that no features can have: means beyond float32, negative squares, or products that violate
    Cauchy–Schwarz: |Σφᵢφⱼ|² ≤ Σφᵢ²·Σφⱼ² and, for the n_c images of a class, |Σφᵢy_c|² ≤ Σφᵢ²·n_c.
    """
    samples, total = float(sums["counts"].sum()), sums["total"]
    mean = total / samples
    if float(mean.abs().max()) > torch.finfo(torch.float32).max:
        raise refused(
            where,
            f"its sums.total implies features of {float(mean.abs().max()):.2g} on average; no feature is that large",
        )
    squares = _squares(sums)
    if bool((squares < -ROUNDING * (squares.abs() + mean * total)).any()):
        raise refused(where, f"its sums have negative squares ({float(squares.min()):.2g})")
    if "directions" in sums:
        squares = squares + sums["directions"].double().square().sum(0)
    bound = (squares.clamp(min=0) + ROUNDING * (mean * total).abs()).sqrt()  # (D,) with a margin for rounding
    _check_products(sums, squares, bound, where)
    cross, counts = sums["cross"].double(), sums["counts"].double()
    if bool((cross.abs() > TOLERANCE * bound[:, None] * counts.clamp(min=0).sqrt()).any()):
        raise refused(where, "its sums by class are larger than its squares and counts allow")
    if bool((cross.sum(1).abs() > ROUNDING * bound * samples**0.5).any()):
        raise refused(where, "its sums by class do not add up to the sum over all its images")


TOLERANCE = 1.02  # tolerance: sums are rounded to 32 or 16 bits
TINY = 1e-300


def _check_products(sums: dict[str, Tensor], squares: Tensor, bound: Tensor, where: str) -> None:
    """Refuse a triangle with an entry that its diagonal forbids; row by row, without building the matrix."""
    triangle = sums.get("triangle")
    if triangle is None:
        return  # a sketch is a sum of squares by construction
    scale = squares.clamp(min=1e-30).sqrt() if "diagonal" in sums else torch.ones_like(squares)
    if triangle.dtype == torch.int16:
        scale = scale / torch.iinfo(torch.int16).max ** 0.5
    allowed = (bound / scale).numpy()  # of row i and column j: their product
    per_column = 1 / np.maximum(allowed, TINY)
    values, start = (triangle.float() if triangle.dtype == torch.bfloat16 else triangle).numpy(), 0
    with np.errstate(over="ignore"):
        for row in range(len(allowed)):
            part = values[start : start + len(allowed) - row].astype(np.float64)
            start += len(part)
            if (np.abs(part) * per_column[row:]).max() > TOLERANCE * allowed[row]:
                raise refused(where, f"its sums have products larger than their squares allow (row {row})")


def _squares(sums: dict[str, Tensor]) -> Tensor:
    """(D,) the diagonal of the second moments around the client's mean; the residual diagonal of a sketch."""
    for name in ("diagonal", "rest"):
        if name in sums:
            return sums[name].double()
    size = len(sums["total"])
    rows = torch.arange(size)
    return sums["triangle"][rows * size - rows * (rows - 1) // 2].double()


def check_masks(manifest: blob.Manifest, client: str, broadcast: Broadcast, where: str) -> None:
    """Refuse masked sums of another broadcast or other clients, and class counts beside them, which masks should hide."""
    if manifest["class_counts"]:
        raise refused(where, "it has class_counts, which the masks should hide")
    names = sorted(broadcast.roster)
    if manifest.get("roster") != names or manifest.get("context") != broadcast.context:
        raise refused(where, f"it is masked for another broadcast than this one, or not with {', '.join(names)}")
    if client not in names:
        raise refused(where, f"{client} is not one of {', '.join(names)}, who mask for each other")
