"""What an upload may say of its samples: their counts, or, where sums are under masks, nothing; and what no sums can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oneround.errors import ProtocolError
from oneround.protocol import blob

if TYPE_CHECKING:
    from oneround.protocol.messages import Broadcast


def counts_of(manifest: blob.Manifest, summed: Tensor | None, broadcast: Broadcast, where: str) -> list[int]:
    """How many samples of each class it says it has; `summed`: how many its sums are over, if it has some."""
    counts = manifest.get("class_counts")
    if not (
        isinstance(counts, list)
        and len(counts) == broadcast.classes
        and all(type(n) is int and 0 <= n < 2**53 for n in counts)
        and sum(counts)
    ):
        raise ProtocolError(f"{where}: refused, class_counts must be {broadcast.classes} counts, at least one above 0")
    sums = broadcast.recipe.sums
    if summed is not None and sums is not None and summed.tolist() != [sums.copies * n for n in counts]:
        raise ProtocolError(f"{where}: refused, its sums are over other numbers of images than its class_counts say")
    return counts


ROUNDING = 1e-3  # of the squares around zero: as much of those around the mean, or more, is no rounding


def check_sums(sums: dict[str, Tensor], where: str) -> None:
    """Sums in the open must be of features that can be: means that a float32 holds, and no squares below zero."""
    samples, total = float(sums["counts"].sum()), sums["total"]
    mean = total / samples
    if float(mean.abs().max()) > torch.finfo(torch.float32).max:
        raise ProtocolError(
            f"{where}: refused, sums.total says features of {float(mean.abs().max()):.2g} on average; no feature is that large"
        )
    squares = _squares(sums)
    if bool((squares < -ROUNDING * (squares.abs() + mean * total)).any()):
        raise ProtocolError(f"{where}: refused, its sums have negative squares ({float(squares.min()):.2g})")


def _squares(sums: dict[str, Tensor]) -> Tensor:
    """(D,) the diagonal of the second moments around the client's mean, or what an upload tells of it."""
    for name in ("diagonal", "rest"):
        if name in sums:
            return sums[name].double()
    size = len(sums["total"])
    rows = torch.arange(size)
    return sums["triangle"][rows * size - rows * (rows - 1) // 2].double()


def check_masks(manifest: blob.Manifest, client: str, broadcast: Broadcast, where: str) -> None:
    """Sums under masks must be masked with all others, for this broadcast, and counts beside them would tell what masks hide."""
    if manifest.get("class_counts") != []:
        raise ProtocolError(f"{where}: refused, it tells class_counts, which belong under its masks")
    names = sorted(broadcast.roster)
    if manifest.get("roster") != names or manifest.get("context") != broadcast.context:
        raise ProtocolError(
            f"{where}: refused, it is masked for another broadcast than this one, or not with {', '.join(names)}"
        )
    if client not in names:
        raise ProtocolError(f"{where}: refused, {client} is not one of {', '.join(names)}, who mask for each other")
