"""Weights cast to bf16 at once are what autocast makes of them one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oneround.models.encoders import Cnn, EncoderPart, MobileNetV2, ResNet18
from oneround.models.precision import with_cast_weights


@pytest.mark.parametrize("part", [Cnn(), ResNet18(), MobileNetV2()])
def test_features_and_gradients_are_those_of_autocast(part: EncoderPart, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[torch.dtype] = []
    copy = torch._foreach_copy_

    def noted(into: list[Tensor], values: list[Tensor]) -> None:
        passes.append(into[0].dtype)
        copy(into, values)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    torch.manual_seed(0)
    encoder = part.build(3).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    images = torch.randn(2, 3, 8, 8)

    def run(encode: nn.Module) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            features = encode(images).float()
        return features, list(torch.autograd.grad(features.square().sum(), list(encoder.parameters())))

    cast = with_cast_weights(encoder)
    assert cast is not encoder
    (one, ones), (two, twos) = run(encoder), run(cast)  # type: ignore[arg-type]
    assert passes == [torch.bfloat16, torch.float32], "all weights at once, and all their gradients"
    assert torch.equal(one, two)
    assert all(torch.equal(a, b) and a.dtype == b.dtype == torch.float32 for a, b in zip(ones, twos, strict=True))
    assert all(weight.dtype == torch.float32 for weight in encoder.parameters())
