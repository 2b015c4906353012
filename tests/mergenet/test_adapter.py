"""The adapter: what it makes of matrices, and that it really learns from where training takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.errors import RecipeError
from oneround.mergenet import Adapter, Merger, Pair, ParameterAttention

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"width": 16, "heads": 2, "rescale": False, "dropout": 0.0, "attention_dropout": 0.0}


def merger(student: Tensor, teacher: Tensor, **options: Any) -> Merger:
    pair = Pair(student="w", teacher="t")
    return Merger([pair], Adapter(**{**SMALL, **options}), {"w": student}, {"t": teacher}, seed=1, device=CPU)


def parameters(one: Merger) -> Tensor:
    return torch.cat([each.detach().flatten() for each in one.adapters.parameters()])


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("shape", [(8, 12), (8, 4, 3, 3), (160, 960, 1, 1)])
def test_a_matrix_comes_back_in_its_own_shape(shape: tuple[int, ...], random: torch.Generator) -> None:
    student, teacher = torch.randn(shape, generator=random), torch.randn(10, 16, generator=random)
    fused = merger(student, teacher).fuse({"w": student, "other": teacher}, {"t": teacher})
    assert fused["w"].shape == student.shape and torch.isfinite(fused["w"]).all()
    assert fused["other"] is teacher


def test_rows_keep_their_norm_or_get_that_of_a_layer_norm(random: torch.Generator) -> None:
    student, teacher = 0.01 * torch.randn(8, 12, generator=random), torch.randn(10, 16, generator=random)
    kept = merger(student, teacher, rescale=True).fuse({"w": student}, {"t": teacher})["w"]
    assert torch.allclose(kept.norm(dim=1), student.norm(dim=1), rtol=1e-4)
    plain = merger(student, teacher).fuse({"w": student}, {"t": teacher})["w"]
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


def test_its_gradient_is_that_of_half_the_squared_distance_clipped(random: torch.Generator) -> None:
    student, teacher, goal = (torch.randn(8, 12, generator=random) for _ in range(3))
    one = merger(student, teacher, clip_norm=0.5, learning_rate=1e-12)
    one.fuse({"w": student}, {"t": teacher})
    told = one.learn({"w": goal})
    given = [each.grad.clone() for each in one.adapters.parameters()]  # type: ignore[union-attr]
    adapter = one.adapters[0]
    adapter.zero_grad()
    (0.5 * (adapter(student, teacher) - goal).square().sum()).backward()
    wanted = [each.grad for each in adapter.parameters()]
    norm = torch.stack([each.norm() for each in wanted]).norm()  # type: ignore[union-attr]
    assert told["gradient_norm"] == pytest.approx(float(norm), rel=1e-3)
    for mine, theirs in zip(given, wanted, strict=True):
        assert torch.allclose(mine, theirs * 0.5 / norm, atol=1e-5)  # type: ignore[operator]


def test_it_learns_a_known_function_of_the_teacher(random: torch.Generator) -> None:
    left, right = torch.randn(8, 10, generator=random), torch.randn(16, 12, generator=random)
    student = torch.randn(8, 12, generator=random)
    teachers = [torch.randn(10, 16, generator=random) for _ in range(3)]
    goals = [F.layer_norm(left @ teacher @ right, (12,)) for teacher in teachers]
    one, errors = merger(student, teachers[0], learning_rate=2e-3), []
    for step in range(420):
        teacher = {"t": teachers[step % 3]}
        one.fuse({"w": student}, teacher)
        errors.append(one.learn({"w": goals[step % 3]})["error"])
    assert sum(errors[-3:]) < sum(errors[:3]) / 10
    apart = one.fuse({"w": student}, {"t": teachers[0]})["w"] - one.fuse({"w": student}, {"t": teachers[1]})["w"]
    assert (
        apart.norm() > 0.5 * (goals[0] - goals[1]).norm()
    )  # it looks at the teacher, it does not know the answer by heart


def test_it_tells_how_far_it_changed_the_student_and_how_far_the_teacher_did(random: torch.Generator) -> None:
    student, teacher = torch.randn(8, 12, generator=random), torch.randn(10, 16, generator=random)
    one = merger(student, teacher)
    assert one.effect() == {}
    out = {name: one.fuse({"w": student}, {"t": each})["w"] for name, each in (("blank", 0 * teacher), ("t", teacher))}
    told, size = one.effect(), student.norm()
    assert told["changed"] == pytest.approx(float((out["t"] - student).norm() / size), rel=1e-4)
    assert told["by_teacher"] == pytest.approx(float((out["t"] - out["blank"]).norm() / size), rel=1e-4)
    one.fuse({"w": student}, {"t": 0 * teacher})
    assert one.effect()["by_teacher"] == 0 < told["by_teacher"]


@pytest.mark.parametrize(("size", "share"), [(0.02, 0.018), (0.1, 0.09)])
def test_before_it_has_learned_hardly_any_of_the_change_is_the_teachers(size: float, share: float) -> None:
    """The published pair's sizes, at the scale of trained weights and at five times it; docs/mergenet.md quotes it."""
    random = torch.Generator().manual_seed(1)
    student, teacher = 0.02 * torch.randn(160, 960, generator=random), size * torch.randn(10, 2048, generator=random)
    one = Merger([Pair(student="w", teacher="t")], Adapter(), {"w": student}, {"t": teacher}, seed=1, device=CPU)
    one.fuse({"w": student}, {"t": teacher})
    told = one.effect()
    assert told["changed"] == pytest.approx(0.41, abs=0.01) and told["by_teacher"] == pytest.approx(share, rel=0.05)


def test_its_weights_move_at_every_lesson_and_stay_with_a_rate_of_zero(random: torch.Generator) -> None:
    student, teacher, goal = (torch.randn(8, 12, generator=random) for _ in range(3))
    moving, fixed = merger(student, teacher, dropout=0.2), merger(student, teacher, learning_rate=0.0, dropout=0.2)
    first = fixed.fuse({"w": student}, {"t": teacher})["w"]
    for _ in range(3):
        for one in (moving, fixed):
            before = parameters(one)
            one.fuse({"w": student}, {"t": teacher})
            told = one.learn({"w": goal})
            moved = float((parameters(one) - before).norm())
            assert told["adapter_moved"] == pytest.approx(moved, rel=1e-4) and (moved > 0) == (one is moving)
    assert torch.equal(fixed.fuse({"w": student}, {"t": teacher})["w"], first)


def test_without_a_fusion_there_is_no_lesson(random: torch.Generator) -> None:
    student, teacher = torch.randn(8, 12, generator=random), torch.randn(10, 16, generator=random)
    assert merger(student, teacher).learn({"w": student}) == {}


def test_it_learns_of_the_teacher_it_looked_at_then(random: torch.Generator) -> None:
    student, teacher = torch.randn(8, 12, generator=random), torch.randn(10, 16, generator=random)
    one = merger(student, teacher, dropout=0.2)
    handed_out = one.fuse({"w": student}, {"t": teacher})["w"]
    teacher.mul_(2)
    assert one.learn({"w": handed_out})["error"] == 0


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([("nope", "t")], "the student has no matrix nope"),
        ([("w", "nope")], "the teacher has no matrix nope"),
        ([("b", "t")], "the student has no matrix b"),
        ([("w", "t"), ("w", "t")], "w of the student is named twice"),
    ],
)
def test_pairs_that_mean_nothing_are_refused(pairs: list[tuple[str, str]], text: str) -> None:
    named = [Pair(student=mine, teacher=theirs) for mine, theirs in pairs]
    tensors = {"w": torch.zeros(3, 4), "b": torch.zeros(3), "t": torch.zeros(2, 2)}
    with pytest.raises(RecipeError, match=text):
        Merger(named, Adapter(), tensors, tensors, seed=1, device=CPU)


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_been(random: torch.Generator) -> None:
    student, teacher, goal = (torch.randn(8, 12, generator=random) for _ in range(3))
    whole = merger(student, teacher, dropout=0.2, attention_dropout=0.1)

    def lesson(one: Merger) -> None:
        one.learn({"w": goal})
        one.fuse({"w": student}, {"t": teacher})

    for _ in range(3):
        lesson(whole)
    parted = merger(student, teacher, dropout=0.2, attention_dropout=0.1)
    parted.load(whole.state())
    for one in (whole, parted):
        lesson(one)
        lesson(one)
    assert torch.equal(parameters(whole), parameters(parted))


def test_a_cosine_schedule_ends_at_rest(random: torch.Generator) -> None:
    student, teacher, goal = (torch.randn(8, 12, generator=random) for _ in range(3))
    one = merger(student, teacher, schedule="cosine")
    moved = []
    for progress in (0.0, 0.5, 1.0):
        one.fuse({"w": student}, {"t": teacher})
        moved.append(one.learn({"w": goal}, progress)["adapter_moved"])
    assert moved[0] > 0 and moved[2] == 0
