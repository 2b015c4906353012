"""Sums over images: Σφφᵀ, Σφyᵀ, Σφ and the number of images of each class. They add, they subtract, and they travel.

Exact in float64 here. An upload carries Σφ and, around the client's own mean, the triangle of Σφφᵀ in fp32: rounding there is
small against what counts, the spread, and the server adds the means back in float64. Smaller uploads divide the triangle by its
diagonal and round it to 16 bits, or send only its leading directions and the rest as a diagonal (a sketch).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from oneround.errors import RecipeError
from oneround.recipe import Federated
from oneround.sections import Sums

Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]
TYPES = {"fp32": torch.float32, "int16": torch.int16, "fp16": torch.float16, "bf16": torch.bfloat16}
STEPS = 32767  # of an int16, from 0 to 1
CHECK = "check"
CHECKED = 8  # zeros that are masked along
MATRICES = 3  # as large as Σφφᵀ, in float64: the sums, what is added to them or solved, and what that takes


@dataclass(frozen=True)
class Moments:
    """All float64, on one device."""

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
        moved = self.total - self.samples * centre
        gram = self.gram.clone().addr_(self.total, centre, alpha=-1).addr_(centre, moved, alpha=-1)
        return Moments(gram, torch.addr(self.cross, centre, self.counts, alpha=-1), moved, self.counts)

    def scaled(self, exponent: int) -> Moments:
        """The sums of 2^exponent·φ; exact."""
        factor = 2.0**exponent
        return Moments(self.gram * factor**2, self.cross * factor, self.total * factor, self.counts)

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(mine + its for mine, its in zip(self._all, other._all, strict=True)))

    def __sub__(self, other: Moments) -> Moments:
        """What the sums were without somebody."""
        return Moments(*(mine - its for mine, its in zip(self._all, other._all, strict=True)))

    def include(self, other: Moments) -> None:
        """Add in place: one set of sums in memory, however many clients there are."""
        for mine, its in zip(self._all, other._all, strict=True):
            mine += its.to(mine.device)

    def to(self, device: torch.device) -> Moments:
        return Moments(*(each.to(device) for each in self._all))

    @property
    def samples(self) -> float:
        return float(self.counts.sum())

    @property
    def _all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.gram, self.cross, self.total, self.counts


def exact(device: torch.device) -> torch.device:
    """Where to add: on the device, unless it has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def check_room(size: int) -> None:
    """Refuse features whose sums this machine could not hold."""
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return  # a system that does not say
    needed = MATRICES * torch.float64.itemsize * size**2
    if needed > there:
        fits = int((there / MATRICES / torch.float64.itemsize) ** 0.5) // 1000 * 1000
        raise RecipeError(
            f"sums.features.size = {size}: adding and solving take {needed / 1e9:.3g} GB of memory, this machine has "
            f"{there / 1e9:.3g} GB; take {fits} or less"
        )


def expected(recipe: Federated, size: int, classes: int) -> Expected:
    """Names, shapes and types of the sums in an upload; nothing where the recipe asks for none."""
    if recipe.sums is None:
        return {}
    if recipe.sums.secure:
        return masked_layout(size, classes)
    wanted: Expected = {
        "cross": ((size, classes), torch.float32),
        "total": ((size,), torch.float64),
        "counts": ((classes,), torch.float32),
    }
    kept, dtype = recipe.sums.rank, TYPES[recipe.sums.precision]
    if kept is not None:
        return wanted | {"directions": ((min(kept, size), size), dtype), "rest": ((size,), torch.float32)}
    wanted["triangle"] = ((size * (size + 1) // 2,), dtype)
    return wanted if dtype == torch.float32 else wanted | {"diagonal": ((size,), torch.float32)}


def masked_layout(size: int, classes: int) -> Expected:
    """The same under masks: numbers that are added modulo 2⁶⁴, and zeros that tell whether the masks cancel."""
    shapes = {"triangle": (size * (size + 1) // 2,), "cross": (size, classes), "total": (size,), "counts": (classes,)}
    return {name: (shape, torch.int64) for name, shape in {**shapes, CHECK: (CHECKED,)}.items()}


def packed(moments: Moments, how: Sums) -> dict[str, Tensor]:
    """As an upload carries them, on the CPU."""
    centred = moments.around(moments.total / moments.samples)
    gram, dtype = centred.gram, TYPES[how.precision]
    sent, diagonal = {"cross": centred.cross.float(), "counts": moments.counts.float()}, gram.diagonal().clamp(min=0)
    if how.rank is not None:
        values, vectors = torch.linalg.eigh(gram)
        kept = values.clamp(min=0).sqrt().flip(0)[: how.rank, None] * vectors.T.flip(0)[: how.rank]
        kept = kept.to(dtype)
        sent |= {"directions": kept, "rest": (diagonal - kept.double().square().sum(0)).clamp(min=0).float()}
    elif dtype == torch.float32:
        sent["triangle"] = triangle_of(gram)
    else:
        sent |= {"triangle": triangle_of(gram, dtype, _scale(diagonal)), "diagonal": diagonal.float()}
    return {name: value.cpu().contiguous() for name, value in {**sent, "total": moments.total}.items()}


def unpacked(sent: dict[str, Tensor], device: torch.device | str = "cpu") -> Moments:
    """The sums again, in float64."""
    there = {name: value.to(device).double() for name, value in sent.items() if name != "triangle"}
    if "directions" in there:
        gram = there["directions"].T @ there["directions"]
        gram.diagonal().add_(there["rest"])
    else:
        gram = square_of(sent["triangle"].to(device), len(there["total"]))
        if sent["triangle"].dtype == torch.int16:
            gram /= STEPS
        if "diagonal" in there:
            scale = _scale(there["diagonal"])
            gram.mul_(scale).mul_(scale[:, None])
            gram.diagonal().copy_(there["diagonal"])
    nothing = torch.zeros_like(there["total"])
    back = -there["total"] / there["counts"].sum()
    return Moments(gram, there["cross"], nothing, there["counts"]).around(back)


def _scale(diagonal: Tensor) -> Tensor:
    """(D,) to divide rows and columns by, so that the diagonal becomes 1."""
    return diagonal.clamp(min=1e-30).sqrt()


def triangle_of(gram: Tensor, dtype: torch.dtype = torch.float32, scale: Tensor | None = None) -> Tensor:
    """(D(D+1)/2,): the upper triangle, row by row, divided by `scale` both ways; nothing as large as the matrix is made."""
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


def mirror_(gram: Tensor, block: int = 1024) -> None:
    """Fill the lower triangle from the upper one, in place, a block at a time."""
    for start in range(0, len(gram), block):
        end = start + block
        gram[end:, start:end] = gram[start:end, end:].T
        corner = gram[start:end, start:end].triu()
        gram[start:end, start:end] = corner + corner.triu(1).T
