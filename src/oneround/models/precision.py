"""An encoder's weights in bf16 for one step: all cast in one pass, and their gradients back in another.

Autocast casts every weight by itself, forward and backward: two small kernels per layer. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        cast = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in weights]
        torch._foreach_copy_(cast, list(weights))
        return tuple(cast)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        full = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        torch._foreach_copy_(full, list(gradients))
        return tuple(full)


def with_cast_weights(encoder: nn.Module) -> Callable[..., Tensor]:
    """The network, to be called under autocast to bf16.

    A convolution of an image's few channels is left to autocast: its own kernels give its gradient in fp32.
    """
    names = [
        f"{name}.weight"
        for name, layer in encoder.named_modules()
        if isinstance(layer, nn.Conv2d) and layer.weight.shape[1] > 3
    ]

    def encode(*inputs: Tensor) -> Tensor:
        parameters = dict(encoder.named_parameters())
        cast = _Cast.apply(*(parameters[name] for name in names))  # type: ignore[no-untyped-call]
        features: Tensor = functional_call(encoder, dict(zip(names, cast, strict=True)), inputs)
        return features

    return encode if names else encoder
