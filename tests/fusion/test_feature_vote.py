"""Uploaded features vote for their class."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from oneround.data import Dataset
from oneround.fusion import rules
from two_clients import broadcast_of, features_of, scores, uploads_of


def test_features_vote_for_their_class(digits: Dataset) -> None:
    rule = rules.parse({"kind": "feature-vote", "per_class": 3, "temperature": 0.5})
    broadcast = broadcast_of(digits, rule.dump())
    uploads = uploads_of(digits, broadcast)
    assert uploads[0].statistics["features"].shape[:2] == (10, 3)
    assert (uploads[0].statistics["features"][5:] == 0).all() and (
        uploads[0].statistics["features_weight"][5:] == 0
    ).all()
    votes = torch.zeros(40, 10).double()
    for upload in uploads:
        unit = F.normalize(features_of(upload, broadcast, digits), dim=1).double()
        for label in range(10):
            sent = upload.statistics["features"][label].double()
            sent = sent[sent.norm(dim=1) > 0]
            if len(sent):
                share = float(upload.class_counts[label]) / len(sent)
                votes[:, label] += share * (unit @ sent.T / 0.5).exp().sum(1)
    assert torch.allclose(scores(rule, uploads, broadcast, digits).double(), votes.log(), atol=1e-4)
