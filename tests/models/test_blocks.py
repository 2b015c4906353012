"""A network as a row of blocks."""

from __future__ import annotations

import pytest

from oneround.models.blocks import blocks
from oneround.models.encoders import encoders
from oneround.models.prototype import build


@pytest.mark.parametrize("kind", sorted(encoders.kinds))
def test_blocks_hold_every_tensor_once_and_in_order(kind: str) -> None:
    net = build(encoders.parse(kind), 3, 10)
    by_depth = blocks(net)
    assert sorted(name for block in by_depth for name in block) == sorted(net.state_dict())
    assert by_depth[-1] == ["prototypes"] and len(by_depth) >= 4
    names = list(net.state_dict())
    if kind != "cnn":  # its layers are kept in two lists side by side
        depth = {name: number for number, block in enumerate(by_depth) for name in block}
        order = [depth[name] for name in names if name != "prototypes"]
        assert order == sorted(order)
