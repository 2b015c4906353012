"""Anchors, the targets of alignment: one fixed point per class, made by the server and the same for all clients.

The simplex equiangular tight frame is the arrangement to which features and prototypes of a well-trained classifier
converge (neural collapse: Papyan, Han & Donoho, 2020): equal lengths, all angles equal and as wide as possible.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.config.parts import Part, Slot
from oneround.errors import RecipeError
from oneround.seeds import generator


class Anchors(Part):
    """One point per class."""

    norm: Literal["one", "sqrt-features"] = "one"
    """Length of each anchor; √features is the expected length of initial prototypes."""

    def unit(self, classes: int, features: int, random: torch.Generator) -> Tensor:
        """(classes, features), rows of length 1"""
        raise NotImplementedError

    def make(self, classes: int, features: int, seed: int) -> Tensor:
        """(classes, features); depends only on the sizes and the seed."""
        length = 1.0 if self.norm == "one" else math.sqrt(features)
        return length * self.unit(classes, features, generator(seed, "anchors"))


anchors: Slot[Anchors] = Slot("anchors", Anchors)


@anchors.register("etf")
class SimplexETF(Anchors):
    """A = √(C/(C−1))·E·Vᵀ: E an orthonormal basis of the complement of 1, V orthonormal columns from the seed."""

    def unit(self, classes: int, features: int, random: torch.Generator) -> Tensor:
        if features < classes - 1:
            raise RecipeError(
                f"alignment.anchors = etf: {classes} classes need at least {classes - 1} features, this encoder has {features}; "
                "take an encoder with more, or anchors: random"
            )
        # The last C−1 columns of an orthonormal basis that begins with 1/√C are a basis of the complement of 1.
        start = torch.cat([torch.ones(classes, 1), torch.eye(classes)[:, : classes - 1]], 1).double()
        across = torch.linalg.qr(start).Q[:, 1:]
        along = torch.linalg.qr(torch.randn(features, classes - 1, generator=random, dtype=torch.float64)).Q
        frame: Tensor = math.sqrt(classes / (classes - 1)) * across @ along.T
        return frame.float()


@anchors.register("random")
class RandomAnchors(Anchors):
    """Uniformly random directions; nearly orthogonal when there are many features."""

    def unit(self, classes: int, features: int, random: torch.Generator) -> Tensor:
        return F.normalize(torch.randn(classes, features, generator=random), dim=1)
