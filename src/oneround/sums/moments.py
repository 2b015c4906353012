"""Sums over images: Σφφᵀ, Σφyᵀ, Σφ and the number of images of each class. They add, subtract and are packed for uploads.

In memory they are float64. An upload carries Σφ in float64 and, around the client's own mean, the triangle of Σφφᵀ in fp32: its rounding
error is small relative to the variance, and the server adds the means back in float64. Smaller uploads divide the triangle by its
diagonal and round it to 16 bits, or send only its leading directions and the rest as a diagonal (a sketch).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from oneround.config.recipe import Federated
from oneround.config.sections import Sums
from oneround.errors import RecipeError
from oneround.models.prototype import Layout

TYPES = {"fp32": torch.float32, "int16": torch.int16, "fp16": torch.float16, "bf16": torch.bfloat16}
STEPS = 32767  # of an int16, from 0 to 1
BLOCK = 1024  # rows of Σφφᵀ handled at once
CHECK = "check"
CHECKED = 8  # zeros that are masked too, to check that masks cancel
MATRICES = 3  # as large as Σφφᵀ, in float64: the sums, an addend or a solution, and workspace


@dataclass(frozen=True)
class Moments:
    """The sums over some images, all float64 and on one device."""

    gram: Tensor
    """(D, D) Σφφᵀ"""
    cross: Tensor
    """(D, classes) Σφyᵀ, y one-hot"""
    total: Tensor
    """(D,) Σφ"""
    counts: Tensor
    """(classes,) images of each class"""

    @staticmethod
    def zero(size: int, classes: int, device: torch.device | str = "cpu") -> Moments:
        shapes = (size, size), (size, classes), (size,), (classes,)
        return Moments(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def around(self, centre: Tensor) -> Moments:
        """The sums of φ − centre."""
        total = self.total - self.samples * centre
        gram = self.gram.clone().addr_(self.total, centre, alpha=-1).addr_(centre, total, alpha=-1)
        return Moments(gram, torch.addr(self.cross, centre, self.counts, alpha=-1), total, self.counts)

    def scaled(self, exponent: int) -> Moments:
        """The sums of 2^exponent·φ; exact."""
        factor = 2.0**exponent
        return Moments(self.gram * factor**2, self.cross * factor, self.total * factor, self.counts)

    def times(self, count: int) -> Moments:
        """The sums with every image counted so often."""
        return Moments(*(each * count for each in self._all))

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(own + others for own, others in zip(self._all, other._all, strict=True)))

    def __sub__(self, other: Moments) -> Moments:
        """The sums without another client's."""
        return Moments(*(own - others for own, others in zip(self._all, other._all, strict=True)))

    def include(self, other: Moments) -> None:
        """Add in place: one set of sums in memory for any number of clients."""
        for own, others in zip(self._all, other._all, strict=True):
            own += others.to(own.device)

    def to(self, device: torch.device) -> Moments:
        return Moments(*(each.to(device) for each in self._all))

    @property
    def samples(self) -> float:
        return float(self.counts.sum())

    @property
    def _all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.gram, self.cross, self.total, self.counts


def float64_device(device: torch.device) -> torch.device:
    """This device, or the CPU where it has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def check_memory(size: int) -> None:
    """Refuse features whose sums do not fit into this machine's memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return  # the system does not report its memory
    needed = MATRICES * torch.float64.itemsize * size**2
    if needed > memory:
        fits = int((memory / MATRICES / torch.float64.itemsize) ** 0.5) // 1000 * 1000
        raise RecipeError(
            f"sums.features.size = {size}: adding and solving take {needed / 1e9:.3g} GB of memory, this machine has "
            f"{memory / 1e9:.3g} GB; take {fits} or less"
        )


def sums_layout(recipe: Federated, size: int, classes: int) -> Layout:
    """Names, shapes and types of the sums in an upload; empty where the recipe asks for none."""
    if recipe.sums is None:
        return {}
    triangle = (size * (size + 1) // 2,)
    if recipe.sums.secure:  # integers modulo 2⁶⁴, and zeros to check that the masks cancel
        shapes = {"triangle": triangle, "cross": (size, classes), "total": (size,), "counts": (classes,)}
        return {name: (shape, torch.int64) for name, shape in {**shapes, CHECK: (CHECKED,)}.items()}
    layout: Layout = {
        "cross": ((size, classes), torch.float32),
        "total": ((size,), torch.float64),
        "counts": ((classes,), torch.float32),
    }
    rank, dtype = recipe.sums.rank, TYPES[recipe.sums.precision]
    if rank is not None:
        return layout | {"directions": ((min(rank, size), size), dtype), "rest": ((size,), torch.float32)}
    layout["triangle"] = (triangle, dtype)
    return layout if dtype == torch.float32 else layout | {"diagonal": ((size,), torch.float32)}


def packed(moments: Moments, options: Sums) -> dict[str, Tensor]:
    """The sums as an upload carries them, on the CPU."""
    centred = moments.around(moments.total / moments.samples)
    gram, dtype = centred.gram, TYPES[options.precision]
    sent, diagonal = {"cross": centred.cross.float(), "counts": moments.counts.float()}, gram.diagonal().clamp(min=0)
    if options.rank is not None:
        values, vectors = torch.linalg.eigh(gram)
        directions = values.clamp(min=0).sqrt().flip(0)[: options.rank, None] * vectors.T.flip(0)[: options.rank]
        sent["directions"] = directions.to(dtype)
        sent["rest"] = (diagonal - sent["directions"].double().square().sum(0)).clamp(min=0).float()
    elif dtype == torch.float32:
        sent["triangle"] = triangle_of(gram)
    else:
        sent |= {"triangle": triangle_of(gram, dtype, _scale(diagonal)), "diagonal": diagonal.float()}
    return {name: value.cpu().contiguous() for name, value in {**sent, "total": moments.total}.items()}


def unpacked(sent: dict[str, Tensor], device: torch.device | str = "cpu") -> Moments:
    """The sums of an upload, in float64."""
    decoded = {name: value.to(device).double() for name, value in sent.items() if name != "triangle"}
    if "directions" in decoded:
        gram = decoded["directions"].T @ decoded["directions"]
        gram.diagonal().add_(decoded["rest"])
    else:
        gram = square_of(sent["triangle"].to(device), len(decoded["total"]))
        if sent["triangle"].dtype == torch.int16:
            gram /= STEPS
        if "diagonal" in decoded:
            scale = _scale(decoded["diagonal"])
            gram.mul_(scale).mul_(scale[:, None])
            gram.diagonal().copy_(decoded["diagonal"])
    zero = torch.zeros_like(decoded["total"])
    back = -decoded["total"] / decoded["counts"].sum()
    return Moments(gram, decoded["cross"], zero, decoded["counts"]).around(back)


def _scale(diagonal: Tensor) -> Tensor:
    """(D,) to divide rows and columns by, so that the diagonal becomes 1."""
    return diagonal.clamp(min=1e-30).sqrt()


def triangle_of(gram: Tensor, dtype: torch.dtype = torch.float32, scale: Tensor | None = None) -> Tensor:
    """(D(D+1)/2,): the upper triangle, row by row, divided by `scale` both ways; without a copy of the matrix."""
    out = torch.empty(len(gram) * (len(gram) + 1) // 2, dtype=dtype, device=gram.device)
    at = 0
    for row in range(len(gram)):
        part = gram[row, row:] if scale is None else gram[row, row:] / scale[row] / scale[row:]
        out[at : at + len(gram) - row] = (part.clamp(-1, 1) * STEPS).round() if dtype == torch.int16 else part
        at += len(gram) - row
    return out


def square_of(triangle: Tensor, size: int) -> Tensor:
    """(D, D) float64 from its upper triangle."""
    gram = torch.zeros(size, size, dtype=torch.float64, device=triangle.device)
    at = 0
    for row in range(size):
        gram[row, row:] = triangle[at : at + size - row]
        at += size - row
    mirror_(gram)
    return gram


def mirror_(gram: Tensor) -> None:
    """Fill the lower triangle from the upper one, in place, a block at a time."""
    for start in range(0, len(gram), BLOCK):
        end = start + BLOCK
        gram[end:, start:end] = gram[start:end, end:].T
        corner = gram[start:end, start:end].triu()
        gram[start:end, start:end] = corner + corner.triu(1).T
