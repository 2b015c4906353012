"""Two clients that hold different classes, and what their networks make of test images."""

from __future__ import annotations

import torch
from torch import Tensor

from conftest import small_recipe
from oneround import acts
from oneround.data import Dataset
from oneround.fusion import Rule
from oneround.fusion.base import expert_of
from oneround.protocol import Broadcast, Upload
from oneround.site import Site


def broadcast_of(digits: Dataset, *fusion: object) -> Broadcast:
    recipe = acts.resolve(small_recipe(training__epochs=8, training__batch_size=16, fusion=list(fusion)), digits)
    return acts.prepare(recipe, digits.class_names, digits.shape)


def uploads_of(digits: Dataset, broadcast: Broadcast) -> list[Upload]:
    """Client a holds classes 0–4, b 3–9; nobody is asked about what it never saw."""
    labels = digits.train.labels
    holds = (torch.nonzero(labels < 5)[:120, 0], torch.nonzero(labels >= 3)[:90, 0])
    return [acts.train(broadcast, Site(name, digits.train.take(mine))) for name, mine in zip("ab", holds, strict=True)]


def scores(rule: Rule, uploads: list[Upload], broadcast: Broadcast, digits: Dataset) -> Tensor:
    return acts.fuse(uploads, broadcast, rule=rule)(digits.test.pixels[:40].float() / 255)


def features_of(upload: Upload, broadcast: Broadcast, digits: Dataset) -> Tensor:
    with torch.no_grad():
        expert = expert_of(upload, broadcast, torch.device("cpu"))
        return expert.net.encoder((digits.test.pixels[:40].float() / 255 - 0.5) / 0.5)
