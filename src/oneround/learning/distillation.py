"""Teaching a fused ensemble into one network: the student sees what the teacher sees, augmented alike, and copies its answers.

The student learns in the same loop as every client, on one term. Its images are the server's public ones, or are made up:
noise, or images turned by gradient descent into what the teacher takes for each class (inversions), and mixes of those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.data import Images
from oneround.data.augment import MEAN, STD
from oneround.learning.aside import recipe_aside, train_aside
from oneround.learning.objective import Batch, Term, terms
from oneround.models.prototype import PrototypeNet, initialise
from oneround.parts import Part
from oneround.protocol import Broadcast
from oneround.sections import Positive
from oneround.seeds import generator
from oneround.site import Site

Answers = Callable[[Tensor], Tensor]
"""Normalised images → scores (n, classes)."""

INVERSION_STEPS = 100
INVERSION_RATE = 0.1
SMOOTHNESS = 0.05  # weight of the mean absolute difference of neighbouring pixels
CALIBRATION_STEPS = 200
CALIBRATION_RATE = 0.05


@terms.register("distillation")
class Distillation(Term):
    """KL(teacher ‖ student) on the same views; used by the server to make a student, not by clients."""

    needs: ClassVar[str] = "teacher"

    temperature: Positive = 1.0

    def loss(self, batch: Batch) -> Tensor:
        assert batch.answers is not None
        student = (batch.logits / self.temperature).log_softmax(1)
        teacher = (batch.answers / self.temperature).log_softmax(1)
        return self.temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def distil(
    answers: Answers, broadcast: Broadcast, images: Images, server: Site, *, student: Part, training: dict[str, object], temperature: float,
    batch_key: str, start: dict[str, Tensor] | None = None, name: str = "student",
) -> PrototypeNet:  # fmt: skip
    """A network of that kind which answers as the teacher does on these images; it begins anew, or with `start`."""
    seed, head = broadcast.recipe.seeds.initialisation, broadcast.recipe.model.head
    if start is None:
        start = initialise(student, broadcast.shape[0], broadcast.classes, seed, head).weights()
    objective = {"terms": {"distillation": {"temperature": temperature}}}
    usual = {"milestones": [], "restart_optimizer": False, "sampling": "shuffle"}
    recipe = recipe_aside(broadcast.recipe, objective, usual | training, {"encoder": student.dump(), "head": head})
    return train_aside(broadcast, recipe, start, images, server, name, batch_key, answers)


def calibrated(answers: Answers, images: Images, classes: int, device: torch.device) -> Answers:
    """The teacher's scores, scaled and shifted class by class to be right on labelled images that weigh every class alike.

    Server-side calibration on balanced data (FEDIC: Shang et al., 2022): what the clients' skew tilted is put upright before it
    teaches.
    """
    with torch.no_grad():
        scores = torch.cat([answers(each) for each in images.batches(device, MEAN, STD)]).detach()
    labels = images.labels.to(device)
    counts = torch.bincount(labels, minlength=classes)
    balance = (1 / counts.clamp(min=1).float())[labels]
    scale, shift = (torch.full((classes,), start, device=device, requires_grad=True) for start in (1.0, 0.0))
    optimizer = torch.optim.Adam([scale, shift], lr=CALIBRATION_RATE)
    with torch.enable_grad():
        for _ in range(CALIBRATION_STEPS):
            each = F.cross_entropy(scores * scale + shift, labels, reduction="none")
            optimizer.zero_grad()
            ((each * balance).sum() / balance.sum()).backward()
            optimizer.step()
    a, b = scale.detach(), shift.detach()
    return lambda normalised: answers(normalised) * a + b


def noise_images(shape: tuple[int, int, int], count: int, seed: int) -> Images:
    """Smooth noise of several scales: nobody's data."""
    random = generator(seed, "noise images")
    total = torch.zeros(count, *shape)
    size = max(shape[1:])
    for scale in (1, 2, 4, size):
        coarse = torch.randn(count, shape[0], max(1, shape[1] // scale), max(1, shape[2] // scale), generator=random)
        total += F.interpolate(coarse, shape[1:], mode="bilinear", align_corners=False)
    return _as_images(torch.sigmoid(total), torch.zeros(count, dtype=torch.int64))


def inversions(answers: Answers, shape: tuple[int, int, int], classes: int, count: int, seed: int, device: torch.device) -> Images:  # fmt: skip
    """Images that the teacher takes for each class in turn, found by descent from noise; half of them mixed in pairs."""
    start = noise_images(shape, count, seed)
    wanted = torch.arange(count, device=device) % classes
    pixels = torch.logit(start.pixels.float().to(device) / 255, eps=0.01).requires_grad_()
    optimizer = torch.optim.Adam([pixels], lr=INVERSION_RATE)
    with torch.enable_grad():
        for _ in range(INVERSION_STEPS):
            shown = torch.sigmoid(pixels)
            rough = shown.diff(dim=2).abs().mean() + shown.diff(dim=3).abs().mean()
            optimizer.zero_grad()
            (F.cross_entropy(answers((shown - MEAN) / STD), wanted) + SMOOTHNESS * rough).backward()
            optimizer.step()
    found = torch.sigmoid(pixels).detach().cpu()
    random = generator(seed, "mixes")
    mixed, partner = torch.randperm(count, generator=random)[: count // 2], torch.randperm(count, generator=random)
    share = torch.rand(len(mixed), 1, 1, 1, generator=random)
    found[mixed] = share * found[mixed] + (1 - share) * found[partner[: len(mixed)]]
    return _as_images(found, wanted.cpu())


def with_mixes(images: Images, count: int, seed: int) -> Images:
    """The images and so many mixes of two of them: more for a teacher to answer on where there are few."""
    random = generator(seed, "mixes of public images")
    one, other = (torch.randint(len(images), (count,), generator=random) for _ in range(2))
    share = torch.rand(count, 1, 1, 1, generator=random)
    mixes = share * images.pixels[one].float() + (1 - share) * images.pixels[other].float()
    return Images(
        torch.cat([images.pixels, mixes.round().to(torch.uint8)]), torch.cat([images.labels, images.labels[one]])
    )


def _as_images(shown: Tensor, labels: Tensor) -> Images:
    return Images((shown * 255).round().to(torch.uint8), labels)
