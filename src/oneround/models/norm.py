"""An encoder's first convolution; norm, shortcut and rectifier after a convolution; batch norm on the statistics of test batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneround import kernels

Rectifier = Literal["relu", "relu6"] | None


def first_convolution(layer: nn.Module, images: Tensor) -> Tensor:
    """layer(images); on a GPU, training in bf16 uses kernels that do not pad the few channels of an image."""
    if kernels.usable(images) and _is_stem(layer, images):
        from oneround.kernels.stem import convolve

        assert isinstance(layer, nn.Conv2d)
        return convolve(images.bfloat16().contiguous(memory_format=torch.channels_last), layer.weight)
    out: Tensor = layer(images)
    return out


def _is_stem(layer: nn.Module, images: Tensor) -> bool:
    """Whether the kernels cover this case: 3×3 from few channels, trained in bf16, on images that get no gradient."""
    return (
        isinstance(layer, nn.Conv2d)
        and (layer.kernel_size, layer.stride, layer.padding, layer.groups) == ((3, 3), (1, 1), (1, 1), 1)
        and layer.bias is None
        and layer.in_channels <= 3
        and layer.out_channels in (16, 32, 64, 128)
        and not images.requires_grad
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") == torch.bfloat16
    )


def normalise(
    norm: nn.Module,
    x: Tensor,
    added: Tensor | None = None,
    then: Rectifier = "relu",
    added_norm: nn.Module | None = None,
) -> Tensor:
    """then(norm(x) + added), added normalised first if it has a norm; on a GPU, batch norm in training mode is few kernels for all."""
    if (
        added is not None
        and added_norm is not None
        and not (kernels.usable(x) and _fits(norm, x) and _fits(added_norm, added))
    ):
        added, added_norm = added_norm(added), None
    if kernels.usable(x) and _fits(norm, x):
        from oneround.kernels.batch_norm import batch_norm

        assert isinstance(norm, nn.BatchNorm2d) and isinstance(added_norm, nn.BatchNorm2d | None)
        out, second, thin = batch_norm(x, norm, added, then, added_norm)
        out.again, second.thin = second, thin  # type: ignore[attr-defined]
        return out
    plain: Tensor = norm(x)
    if added is not None:
        plain = plain + added
    return plain if then is None else F.relu(plain) if then == "relu" else F.relu6(plain)


def again(x: Tensor) -> Tensor:
    """What `normalise` made, for the second layer that uses it: its kernel adds the two gradients on the way."""
    second: Tensor = getattr(x, "again", x)
    return second


def pointwise(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """layer(x) of a 1×1 convolution; with stride 2 on what `again` gave, only the pixels that it reads get a gradient."""
    thin: Tensor | None = getattr(x, "thin", None)
    if thin is None or layer.stride != (2, 2):
        out: Tensor = layer(x)
        return out
    from oneround.kernels.batch_norm import pack

    return F.conv2d(pack(thin), layer.weight)


def _fits(norm: nn.Module, x: Tensor) -> bool:
    """Whether the kernel covers this case."""
    return (
        isinstance(norm, nn.BatchNorm2d)
        and norm.training
        and norm.momentum is not None
        and x.shape[1] % 8 == 0
        and x.is_contiguous(memory_format=torch.channels_last)
    )


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Let batch norm normalise by the batch it sees within the context; running statistics are neither used nor changed."""
    norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm2d)]
    kept = [(norm.running_mean, norm.running_var) for norm in norms]
    try:
        for norm in norms:
            norm.running_mean = norm.running_var = None
        yield
    finally:
        for norm, (mean, variance) in zip(norms, kept, strict=True):
            norm.running_mean, norm.running_var = mean, variance


def has_batch_norm(module: nn.Module) -> bool:
    """Whether `batch_statistics` makes a difference to a module."""
    return any(isinstance(each, nn.BatchNorm2d) for each in module.modules())
