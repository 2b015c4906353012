"""A network as a sequence of blocks, so that it can be shared up to some depth."""

from __future__ import annotations

from torch import nn

from oneround.models.prototype import PrototypeNet

BEFORE, WITHIN, AFTER = 0, 1, 2


def blocks(net: PrototypeNet) -> list[list[str]]:
    """Names of the tensors of every block, in order; the prototypes are the last.

    Each repeated part (`blocks`, or parallel lists of layers) is a block; the layers before them are the first block, the
    layers after them the next to last. An encoder without repeated parts has a block for each of its children.
    """
    return [*_blocks(net.encoder, "encoder."), ["prototypes"]]


def _blocks(encoder: nn.Module, prefix: str) -> list[list[str]]:
    children, names = dict(encoder.named_children()), list(encoder.state_dict())
    if "encoder" in children:  # one within another: what follows it is a block
        after = [f"{prefix}{name}" for name in names if not name.startswith("encoder.")]
        return [*_blocks(children["encoder"], f"{prefix}encoder."), after]
    order = list(children)
    repeated = {
        name
        for name, child in children.items()
        if isinstance(child, nn.ModuleList) or (name == "blocks" and isinstance(child, nn.Sequential))
    }
    first = min((order.index(name) for name in repeated), default=len(order))
    by_block: dict[tuple[int, int], list[str]] = {}
    for name in names:
        child, _, rest = name.partition(".")
        if child in repeated:
            key = (WITHIN, int(rest.partition(".")[0]))
        elif not repeated:
            key = (WITHIN, order.index(child) if child in order else 0)
        else:
            key = (BEFORE if child not in order or order.index(child) < first else AFTER, 0)
        by_block.setdefault(key, []).append(f"{prefix}{name}")
    return [by_block[key] for key in sorted(by_block)]
