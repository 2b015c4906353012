"""Parameter attention: what it makes of matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.mergenet import Adapter, Merger, Pair, ParameterAttention

SMALL: dict[str, Any] = {"width": 16, "heads": 2, "rescale": False, "dropout": 0.0, "attention_dropout": 0.0}


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@torch.no_grad()
def test_rows_keep_their_norm_or_get_that_of_a_layer_norm(random: torch.Generator) -> None:
    student, teacher = 0.01 * torch.randn(8, 12, generator=random), torch.randn(10, 16, generator=random)
    kept = ParameterAttention((8, 12), (10, 16), Adapter(**{**SMALL, "rescale": True})).eval()(student, teacher)
    assert torch.allclose(kept.norm(dim=1), student.norm(dim=1), rtol=1e-4)
    plain = ParameterAttention((8, 12), (10, 16), Adapter(**SMALL)).eval()(student, teacher)
    assert torch.allclose(plain.norm(dim=1), torch.full((8,), 12**0.5), rtol=1e-2)


@torch.no_grad()
def test_attention_is_the_published_formula(random: torch.Generator) -> None:
    options = Adapter(**{**SMALL, "layers": 1})
    student, teacher = torch.randn(8, 12, generator=random), torch.randn(10, 16, generator=random)
    net = ParameterAttention((8, 12), (10, 16), options).eval()
    layer: Any = net.layers[0]

    def attend(part: Any, tokens: Tensor, others: Tensor) -> Tensor:
        heads = []
        for at in range(2):
            rows = slice(16 * at, 16 * at + 16)
            q, k, v = (
                x @ linear.weight[rows].T + linear.bias[rows]
                for x, linear in ((tokens, part.query), (others, part.key), (others, part.value))
            )
            heads.append(torch.softmax(q @ k.T / 16**0.5, dim=1) @ v)
        out = tokens + torch.cat(heads, 1) @ part.out.weight.T + part.out.bias
        return F.layer_norm(out, out.shape[1:])

    four = [attend(layer.by_row[0], student, teacher), attend(layer.by_row[1], student, teacher.T)]
    four += [attend(layer.by_column[0], student.T, teacher).T, attend(layer.by_column[1], student.T, teacher.T).T]
    mean = torch.stack(four).mean(0)
    wide, narrow = layer.feed[0], layer.feed[2]
    assert torch.linalg.matrix_norm(wide.weight, 2) == pytest.approx(1.0, abs=0.05)
    fed = F.gelu(mean @ wide.weight.T + wide.bias, approximate="tanh") @ narrow.weight.T + narrow.bias
    assert torch.allclose(net(student, teacher), F.layer_norm(mean + fed, (12,)), atol=1e-4)


@pytest.mark.parametrize(("student", "teacher"), [((8, 12), (10, 16)), ((3, 5), (2, 40)), ((6, 6), (6, 6))])
def test_the_output_has_the_students_shape_and_depends_on_both(
    student: tuple[int, int], teacher: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    net = ParameterAttention(student, teacher, Adapter(**SMALL)).eval()
    one, other = torch.randn(student), torch.randn(teacher)
    out = net(one, other)
    assert out.shape == student and torch.isfinite(out).all()
    assert not torch.allclose(out, net(one, -other)) and not torch.allclose(out, net(-one, other))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters()), "no part of it is cut off from learning"


@pytest.mark.parametrize(("size", "share"), [(0.02, 0.018), (0.1, 0.09)])
def test_before_it_has_learned_hardly_any_of_the_change_is_the_teachers(size: float, share: float) -> None:
    """The published pair's sizes, at the scale of trained weights and at five times it; docs/mergenet.md quotes it."""
    random = torch.Generator().manual_seed(1)
    student, teacher = 0.02 * torch.randn(160, 960, generator=random), size * torch.randn(10, 2048, generator=random)
    one = Merger(
        [Pair(student="w", teacher="t")], Adapter(), {"w": student}, {"t": teacher}, seed=1, device=torch.device("cpu")
    )
    one.fuse({"w": student}, {"t": teacher})
    metrics = one.effect()
    assert metrics["changed"] == pytest.approx(0.41, abs=0.01) and metrics["by_teacher"] == pytest.approx(
        share, rel=0.05
    )
