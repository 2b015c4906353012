"""Random views of images, drawn per sample and computed in batches on the device.

The random numbers are drawn first (`draw`, on the CPU, from a named generator) and the views are a pure function of images
and numbers (`views`): a CPU and a GPU make the same views, and a test can choose the numbers.

A view is two linear maps. The crop, its enlargement and the mirror are an interpolation matrix on either side of the image.
Brightness, contrast, saturation, hue and greyscale are one 3×3 matrix and an offset on its colours: brightness scales all,
contrast scales what differs from the image's mean luminance, saturation scales and hue turns the chroma (the plane of YIQ).
Without clamping to 0…1 in between they commute, so their order does not matter; the result is clamped once.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from oneround import kernels
from oneround.config.recipe import Federated
from oneround.config.sections import Augment

# What each column of a draw decides.
COLUMNS, MORE_COLUMNS = 11, 4
AREA, RATIO, LEFT, TOP, FLIP, JITTER, BRIGHTNESS, CONTRAST, SATURATION, HUE, GREY = range(COLUMNS)
RIGHT, DOWN, HOLE_X, HOLE_Y = range(COLUMNS, COLUMNS + MORE_COLUMNS)  # drawn only where they decide something
MEAN, STD = 0.5, 0.5
MOST_PIXELS = 4096  # of an image, for the kernel that makes a view of it at once
_LUMA = (0.299, 0.587, 0.114)
_YIQ = (_LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def preprocessing(recipe: Federated) -> tuple[float, float]:
    """Mean and deviation that images in 0…1 are normalised with before an encoder sees them at inference."""
    return (0.0, 1.0) if recipe.evaluation.unnormalised else (MEAN, STD)


def columns_of(options: Augment) -> int:
    """Random numbers of a view."""
    return COLUMNS + MORE_COLUMNS * bool(options.shift or options.hole)


def draw(samples: int, generator: torch.Generator, *, per_batch: bool = False, columns: int = COLUMNS) -> Tensor:
    """Uniform numbers for one view of each sample, (samples, columns)."""
    if per_batch:
        return torch.rand(1, columns, generator=generator).expand(samples, columns)
    return torch.rand(samples, columns, generator=generator)


def views(pixels: Tensor, numbers: Tensor, options: Augment, dtype: torch.dtype = torch.float32) -> Tensor:
    """One random view of each image.

    pixels (n, channels, height, width) uint8, numbers (n, columns) in [0, 1) → (n, channels, height, width) normalised; in `dtype`
    where a kernel makes them.
    """
    made = _views(pixels, numbers, options, dtype)
    if options.shift:
        made = shifted(made, numbers, options.shift)
    return punched(made, numbers, options.hole) if options.hole else made


def _views(pixels: Tensor, numbers: Tensor, options: Augment, dtype: torch.dtype) -> Tensor:
    """Views without shifts and holes."""
    if kernels.usable(pixels) and pixels.shape[2] * pixels.shape[3] <= MOST_PIXELS:
        from oneround.kernels import views as kernel

        colours, normal = _colour_matrices(pixels.device), (MEAN, STD)
        made: Tensor = kernel.views(pixels.contiguous(), numbers.contiguous(), options, colours, normal, dtype)
        return made
    images = recolour(crop(pixels.float() / 255, numbers, options), numbers, options)
    return (images - MEAN) / STD


def shifted(images: Tensor, numbers: Tensor, share: float) -> Tensor:
    """Each image moved by up to this share of its sides, both ways; what leaves one edge is filled by what mirrors in it."""
    for axis, column in ((2, DOWN), (3, RIGHT)):
        size = images.shape[axis]
        most = round(share * size)
        offset = (numbers[:, column] * (2 * most + 1)).long() - most
        source = (torch.arange(size, device=images.device) + offset[:, None]).abs()
        source = size - 1 - (size - 1 - source).abs()
        index = source[:, None, :, None] if axis == 2 else source[:, None, None, :]
        images = images.gather(axis, index.expand_as(images))
    return images


def punched(images: Tensor, numbers: Tensor, share: float) -> Tensor:
    """A square of each normalised image replaced by 0; its side is this share of the image's, its centre anywhere in the image."""
    holes = []
    for axis, column in ((2, HOLE_Y), (3, HOLE_X)):
        size = images.shape[axis]
        side = round(share * size)
        start = (numbers[:, column] * size).long() - side // 2
        at = torch.arange(size, device=images.device) - start[:, None]
        holes.append((at >= 0) & (at < side))
    return images.masked_fill((holes[0][:, :, None] & holes[1][:, None, :])[:, None], 0.0)


def crop(images: Tensor, numbers: Tensor, options: Augment) -> Tensor:
    """Random resized crop and mirror, as two small interpolation matrices per image (bilinear, clamped at the edges)."""
    height, width = images.shape[-2:]
    (low, high), (thin, wide) = options.crop_scale, options.crop_ratio
    area = low + (high - low) * numbers[:, AREA]
    ratio = thin * (wide / thin) ** numbers[:, RATIO]
    crop_width = (area * ratio).sqrt().clamp(max=1) * width
    crop_height = (area / ratio).sqrt().clamp(max=1) * height
    left = (width - crop_width) * numbers[:, LEFT]
    top = (height - crop_height) * numbers[:, TOP]
    flip = numbers[:, FLIP] < (options.flip or 0)
    rows = _interpolation(top, crop_height, torch.zeros_like(flip), height)
    columns = _interpolation(left, crop_width, flip, width)
    return rows[:, None] @ images @ columns[:, None].transpose(-1, -2)


def _interpolation(start: Tensor, length: Tensor, flip: Tensor, size: int) -> Tensor:
    """(n, size, size) matrices that stretch `length` pixels from `start` over `size` pixels."""
    pixel = torch.arange(size, device=start.device, dtype=start.dtype)
    target = torch.where(flip[:, None], size - 1 - pixel, pixel)
    source = start[:, None] + (target + 0.5) * length[:, None] / size - 0.5
    source = source.clamp(min=start[:, None], max=start[:, None] + (length[:, None] - 1).clamp(min=0))
    return (1 - (source[:, :, None] - pixel).abs()).clamp(min=0)


def recolour(images: Tensor, numbers: Tensor, options: Augment) -> Tensor:
    """Brightness, contrast, saturation, hue and greyscale of images in 0…1, as one linear map per image."""
    apply = numbers[:, JITTER] < options.jitter
    strengths = {BRIGHTNESS: options.brightness, CONTRAST: options.contrast, SATURATION: options.saturation}
    brightness, contrast, saturation = (
        torch.where(apply, 1 + strength * (2 * numbers[:, column] - 1), 1.0) for column, strength in strengths.items()
    )
    gain = brightness * contrast
    if images.shape[1] == 1:
        offset = (brightness - gain) * images.mean((1, 2, 3))
        return (gain[:, None, None, None] * images + offset[:, None, None, None]).clamp(0, 1)
    grey = numbers[:, GREY] < options.greyscale
    chroma = torch.where(grey, 0.0, gain * saturation)
    turn = torch.where(apply, 2 * math.pi * options.hue * (2 * numbers[:, HUE] - 1), 0.0)
    along, across = chroma * turn.cos(), chroma * turn.sin()
    # The map is M = gain·(luma part) + along·(chroma part) + across·(chroma turned a quarter): three constant matrices.
    luma, plane, quarter = _colour_matrices(images.device).unbind()
    matrix = gain[:, None, None] * luma + along[:, None, None] * plane + across[:, None, None] * quarter
    mean_luma = images.mean((2, 3)) @ luma[0]
    offset = (brightness - gain) * mean_luma
    return (torch.einsum("nij,njhw->nihw", matrix, images) + offset[:, None, None, None]).clamp(0, 1)


@cache
def _colour_matrices(device: torch.device) -> Tensor:
    """RGB → RGB: the grey part of a colour, its chroma, and its chroma turned by a quarter circle; (3, 3, 3)."""
    yiq = torch.tensor(_YIQ, dtype=torch.float64)
    back = torch.linalg.inv(yiq)
    luma = back @ torch.diag(torch.tensor([1.0, 0, 0]).double()) @ yiq
    plane = torch.eye(3).double() - luma
    quarter = back @ torch.tensor([[0.0, 0, 0], [0, 0, -1], [0, 1, 0]]).double() @ yiq
    return torch.stack([luma, plane, quarter]).float().to(device)
