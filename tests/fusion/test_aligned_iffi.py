"""Feature spaces are brought together before they are averaged."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from oneround.data import Dataset
from oneround.fusion import rules
from oneround.fusion.aligned_iffi import matching, rotation
from oneround.protocol import Upload
from two_clients import broadcast_of, scores, uploads_of


@pytest.mark.parametrize("by", ["match", "procrustes"])
def test_spaces_are_brought_together(by: str, digits: Dataset) -> None:
    """A client whose feature units are renamed (or turned) answers as before; plain IFFI does not."""
    random = torch.Generator().manual_seed(3)
    source = torch.randn(10, 16, generator=random)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=random)).Q
    if by == "match":
        turn = torch.eye(16)[torch.randperm(16, generator=random)]
    found = (matching if by == "match" else rotation)(source @ turn, source)
    assert torch.allclose(source @ turn @ found, source, atol=1e-3)
    assert torch.allclose(found @ found.T, torch.eye(16), atol=1e-4)
    rule = rules.parse({"kind": "aligned-iffi", "by": by})
    broadcast = broadcast_of(digits, rule.dump())
    uploads = uploads_of(digits, broadcast)
    one = Upload(**{**vars(uploads[0]), "class_counts": torch.ones(10, dtype=torch.int64)})  # all prototypes count
    plain = rules.parse("iffi")
    alone, together, lost = (
        F.normalize(scores(each, given, broadcast, digits), dim=1)
        for each, given in ((plain, [one]), (rule, [one, renamed(one)]), (plain, [one, renamed(one)]))
    )
    assert torch.allclose(together, alone, atol=1e-3) and not torch.allclose(lost, alone, atol=0.05)


def renamed(upload: Upload) -> Upload:
    """The same network with its feature units in another order."""
    weights = dict(upload.weights)
    features = weights["prototypes"].shape[1]
    order = torch.randperm(features, generator=torch.Generator().manual_seed(4))
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.norms"))
    for name, value in upload.weights.items():
        if name.startswith((f"encoder.convolutions.{last}.", f"encoder.norms.{last}.")) and value.ndim:
            assert len(value) == features
            weights[name] = value[order]
    weights["prototypes"] = weights["prototypes"][:, order]
    return Upload(**{**vars(upload), "client": "renamed", "weights": weights})
