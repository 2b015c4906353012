"""A network as a row of blocks, from the image to the answer: what can be shared up to some depth."""

from __future__ import annotations

from torch import nn

from oneround.models.prototype import PrototypeNet

BEFORE, WITHIN, AFTER = 0, 1, 2


def blocks(net: PrototypeNet) -> list[list[str]]:
    """Names of the tensors of every block, in order; the prototypes are the last.

    Repeated parts (`blocks`, or lists of layers that go side by side) are a block each; what comes before them is the first,
    what comes after them one more. An encoder without repeated parts has a block for each of its children.
    """
    repeated = {name for name, child in net.encoder.named_children() if _is_repeated(name, child)}
    order = [name for name, _ in net.encoder.named_children()]
    first = min((order.index(name) for name in repeated), default=len(order))
    found: dict[tuple[int, int], list[str]] = {}
    for name in net.encoder.state_dict():
        child, _, rest = name.partition(".")
        if child in repeated:
            key = (WITHIN, int(rest.partition(".")[0]))
        elif not repeated:
            key = (WITHIN, order.index(child) if child in order else 0)
        else:
            key = (BEFORE if child not in order or order.index(child) < first else AFTER, 0)
        found.setdefault(key, []).append(f"encoder.{name}")
    return [*(found[key] for key in sorted(found)), ["prototypes"]]


def _is_repeated(name: str, child: nn.Module) -> bool:
    return isinstance(child, nn.ModuleList) or (name == "blocks" and isinstance(child, nn.Sequential))
