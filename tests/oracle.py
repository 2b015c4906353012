"""What every client's network answers, written out in float64: the yardstick of the fusion rules."""

from __future__ import annotations

import numpy as np
import torch

from oneround import acts
from oneround.config.recipe import Recipe
from oneround.data import Dataset
from oneround.fusion import rules
from oneround.models.prototype import network_from
from oneround.protocol import Broadcast, Upload
from oneround.seeds import generator

Federation = tuple[Recipe, Broadcast, list[Upload]]
N = 60


class Oracle:
    """What each client's network says about some test images, in float64."""

    def __init__(self, federation: Federation, digits: Dataset) -> None:
        _, self.broadcast, self.uploads = federation
        self.pixels = digits.test.pixels[:N]
        images = (self.pixels.double() / 255 - 0.5) / 0.5
        noise = torch.randn(1, 1, 8, 8, generator=generator(1, "noise image")).double()
        self.f, self.noise, self.p, self.n, self.counts = [], [], [], [], []
        for upload in self.uploads:
            net = network_from(self.broadcast.recipe.model.encoder, 1, 10, upload.weights).double().eval()
            with torch.no_grad():
                self.f.append(net.encoder(images).numpy())
                self.noise.append(net.encoder(noise).numpy()[0])
            self.p.append(upload.weights["prototypes"].double().numpy())
            self.n.append(upload.samples)
            self.counts.append(upload.class_counts.numpy())
        self.z = [f / np.linalg.norm(f, axis=1, keepdims=True) for f in self.f]
        self.logits = [z @ p.T for z, p in zip(self.z, self.p, strict=True)]

    def scores(self, kind: str | dict[str, object]) -> np.ndarray:
        model = acts.fuse(self.uploads, self.broadcast, rule=rules.parse(kind))
        with torch.no_grad():
            return model(self.pixels.float() / 255).numpy()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)
