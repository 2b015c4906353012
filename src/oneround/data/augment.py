"""Random views of images, drawn per sample and computed in batches on the device.

The random numbers are drawn first (`draw`, on the CPU, from a named generator) and the views are a pure function of images
and numbers (`views`): a CPU and a GPU make the same views, a test can choose the numbers, and the function compiles.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from oneround.recipe import Augment

# What each column of a draw decides.
AREA, RATIO, LEFT, TOP, FLIP, JITTER, BRIGHTNESS, CONTRAST, SATURATION, HUE, ORDER, GREY = range(12)
COLUMNS = 12
_GREY = (0.299, 0.587, 0.114)
_ORDERS = list(itertools.permutations(range(4)))
MEAN, STD = 0.5, 0.5


def draw(samples: int, generator: torch.Generator, *, per_batch: bool = False) -> Tensor:
    """Uniform numbers for one view of each sample, (samples, COLUMNS)."""
    if per_batch:
        return torch.rand(1, COLUMNS, generator=generator).expand(samples, COLUMNS)
    return torch.rand(samples, COLUMNS, generator=generator)


def views(pixels: Tensor, numbers: Tensor, options: Augment) -> Tensor:
    """One random view of each image.

    pixels (n, channels, height, width) uint8, numbers (n, COLUMNS) in [0, 1) → (n, channels, height, width) normalised.
    """
    images = crop(pixels.float() / 255, numbers, options)
    jittered = _jitter(images, numbers, options)
    images = torch.where(_column(numbers, JITTER) < options.jitter, jittered, images)
    if images.shape[1] == 3:
        images = torch.where(_column(numbers, GREY) < options.greyscale, _grey(images), images)
    return (images - MEAN) / STD


def crop(images: Tensor, numbers: Tensor, options: Augment) -> Tensor:
    """Random resized crop and mirror, as two small interpolation matrices per image (bilinear, edges held)."""
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
    place = torch.where(flip[:, None], size - 1 - pixel, pixel)
    source = start[:, None] + (place + 0.5) * length[:, None] / size - 0.5
    source = source.clamp(min=start[:, None], max=start[:, None] + (length[:, None] - 1).clamp(min=0))
    return (1 - (source[:, :, None] - pixel).abs()).clamp(min=0)


def _jitter(images: Tensor, numbers: Tensor, options: Augment) -> Tensor:
    """Brightness, contrast, saturation and hue, each sample with its own strengths in its own order."""
    colour = images.shape[1] == 3
    strengths = torch.tensor([options.brightness, options.contrast, options.saturation], device=images.device)
    factors = 1 + (2 * numbers[:, BRIGHTNESS : SATURATION + 1] - 1) * strengths
    turn = _column(numbers, HUE, ndim=3) * (2 * options.hue) - options.hue
    orders = torch.tensor(_ORDERS, device=images.device)[(numbers[:, ORDER] * len(_ORDERS)).long().clamp(max=23)]
    for place in range(4):
        step = orders[:, place, None, None, None]
        grey = _grey(images)
        mean = grey.mean((1, 2, 3), keepdim=True)
        other = torch.where(step == 0, torch.zeros_like(mean), torch.where(step == 1, mean, grey))
        factor = factors.gather(1, orders[:, place, None].clamp(max=2))[:, :, None, None]
        blended = (other + factor * (images - other)).clamp(0, 1)
        turned = _turn_hue(images, turn) if colour and options.hue else images
        images = torch.where(step == 3, turned, blended)
    return images


def _grey(images: Tensor) -> Tensor:
    """Luminance, in as many channels as the image has."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (_GREY[0] * red + _GREY[1] * green + _GREY[2] * blue)[:, None].expand_as(images)


def _turn_hue(images: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue by `turn` (a fraction of the circle), keeping saturation and value of the HSV model."""
    red, green, blue = images.unbind(1)
    value, low = images.amax(1), images.amin(1)
    spread = value - low
    safe = torch.where(spread == 0, torch.ones_like(spread), spread)
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue + 6 * turn
    channels = []
    for offset in (5, 3, 1):
        phase = torch.remainder(offset + hue, 6)
        channels.append(value - spread * torch.minimum(phase, 4 - phase).clamp(0, 1))
    return torch.stack(channels, 1)


def _column(numbers: Tensor, column: int, ndim: int = 4) -> Tensor:
    return numbers[:, column].reshape(-1, *[1] * (ndim - 1))
