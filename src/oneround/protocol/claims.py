"""What an upload's manifest may say of its samples: their counts, or, where sums are under masks, nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
