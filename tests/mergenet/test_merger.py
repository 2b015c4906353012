"""A merger learns from where training takes what it fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.errors import RecipeError
from oneround.mergenet import Adapter, Merger, Pair

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


def test_its_gradient_is_that_of_half_the_squared_distance_clipped(random: torch.Generator) -> None:
    student, teacher, goal = (torch.randn(8, 12, generator=random) for _ in range(3))
    one = merger(student, teacher, clip_norm=0.5, learning_rate=1e-12)
    one.fuse({"w": student}, {"t": teacher})
    metrics = one.learn({"w": goal})
    given = [each.grad.clone() for each in one.adapters.parameters()]  # type: ignore[union-attr]
    adapter = one.adapters[0]
    adapter.zero_grad()
    (0.5 * (adapter(student, teacher) - goal).square().sum()).backward()
    expected = [each.grad for each in adapter.parameters()]
    norm = torch.stack([each.norm() for each in expected]).norm()  # type: ignore[union-attr]
    assert metrics["gradient_norm"] == pytest.approx(float(norm), rel=1e-3)
    for mine, theirs in zip(given, expected, strict=True):
        assert torch.allclose(mine, theirs * 0.5 / norm, atol=1e-5)  # type: ignore[operator]


@pytest.mark.slow
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


def test_its_effect_is_how_far_it_changes_the_student_and_how_far_the_teacher_does(random: torch.Generator) -> None:
    student, teacher = torch.randn(8, 12, generator=random), torch.randn(10, 16, generator=random)
    one = merger(student, teacher)
    assert one.effect() == {}
    out = {name: one.fuse({"w": student}, {"t": each})["w"] for name, each in (("blank", 0 * teacher), ("t", teacher))}
    metrics, size = one.effect(), student.norm()
    assert metrics["changed"] == pytest.approx(float((out["t"] - student).norm() / size), rel=1e-4)
    assert metrics["by_teacher"] == pytest.approx(float((out["t"] - out["blank"]).norm() / size), rel=1e-4)
    one.fuse({"w": student}, {"t": 0 * teacher})
    assert one.effect()["by_teacher"] == 0 < metrics["by_teacher"]


def test_its_weights_move_at_every_lesson_and_stay_with_a_rate_of_zero(random: torch.Generator) -> None:
    student, teacher, goal = (torch.randn(8, 12, generator=random) for _ in range(3))
    moving, fixed = merger(student, teacher, dropout=0.2), merger(student, teacher, learning_rate=0.0, dropout=0.2)
    first = fixed.fuse({"w": student}, {"t": teacher})["w"]
    for _ in range(3):
        for one in (moving, fixed):
            before = parameters(one)
            one.fuse({"w": student}, {"t": teacher})
            metrics = one.learn({"w": goal})
            moved = float((parameters(one) - before).norm())
            assert metrics["adapter_moved"] == pytest.approx(moved, rel=1e-4) and (moved > 0) == (one is moving)
    assert torch.equal(fixed.fuse({"w": student}, {"t": teacher})["w"], first)


def test_no_lesson_without_a_fusion(random: torch.Generator) -> None:
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
