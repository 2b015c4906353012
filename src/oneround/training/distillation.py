"""Distillation of a fused ensemble into one network: the student matches the teacher's outputs on the same augmented images.

The student uses the clients' training loop with one term. Its images are the server's public ones, or synthetic: noise, or
images optimised by gradient descent for each of the teacher's classes (inversions), and mixes of those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.config.parts import Needs, Part
from oneround.config.sections import Positive
from oneround.data import Images
from oneround.data.augment import MEAN, STD
from oneround.models.prototype import PrototypeNet, initialise
from oneround.protocol import Broadcast
from oneround.seeds import generator
from oneround.site import Site
from oneround.training.objective import Batch, Term, terms
from oneround.training.server_side import OWN_TRAINING, server_recipe, train_on_server

ScoreFunction = Callable[[Tensor], Tensor]
"""Normalised images → scores (n, classes)."""

INVERSION_STEPS = 100
INVERSION_RATE = 0.1
SMOOTHNESS = 0.05  # weight of the mean absolute difference of neighbouring pixels
CALIBRATION_STEPS = 200
CALIBRATION_RATE = 0.05


@terms.register("distillation")
class Distillation(Term):
    """KL(teacher ‖ student) on the same views; used by the server, not by clients."""

    temperature: Positive = 1.0

    @property
    def needs(self) -> Needs:
        return Needs(teacher=True)

    def loss(self, batch: Batch) -> Tensor:
        assert batch.teacher_logits is not None
        student = (batch.logits / self.temperature).log_softmax(1)
        teacher = (batch.teacher_logits / self.temperature).log_softmax(1)
        return self.temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def distil(
    teacher: ScoreFunction,
    broadcast: Broadcast,
    images: Images,
    server: Site,
    *,
    student: Part,
    training: dict[str, Any],
    temperature: float,
    batch_key: str,
    start: dict[str, Tensor] | None = None,
    name: str = "student",
) -> PrototypeNet:
    """A student that matches the teacher's scores on these images, trained from fresh weights or from `start`."""
    seed, head = broadcast.recipe.seeds.initialisation, broadcast.recipe.model.head
    if start is None:
        start = initialise(student, broadcast.shape[0], broadcast.classes, seed, head).weights()
    objective = {"terms": {"distillation": {"temperature": temperature}}}
    model = {"encoder": student.dump(), "head": head}
    recipe = server_recipe(broadcast.recipe, objective, OWN_TRAINING | training, model)
    return train_on_server(broadcast, recipe, start, images, server, name, batch_key, teacher)


def calibrated(teacher: ScoreFunction, images: Images, classes: int, device: torch.device) -> ScoreFunction:
    """The teacher's scores with a scale and a shift per class, fitted on labelled images with balanced class weights.

    Server-side calibration on balanced data (FEDIC: Shang et al., 2022): it corrects the clients' label skew before
    distillation.
    """
    with torch.no_grad():
        scores = torch.cat([teacher(each) for each in images.batches(device, MEAN, STD)]).detach()
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
    return lambda normalised: teacher(normalised) * a + b


def noise_images(shape: tuple[int, int, int], count: int, seed: int) -> Images:
    """Smooth noise of several scales, without any data."""
    random = generator(seed, "noise images")
    total = torch.zeros(count, *shape)
    size = max(shape[1:])
    for scale in (1, 2, 4, size):
        coarse = torch.randn(count, shape[0], max(1, shape[1] // scale), max(1, shape[2] // scale), generator=random)
        total += F.interpolate(coarse, shape[1:], mode="bilinear", align_corners=False)
    return _as_images(torch.sigmoid(total), torch.zeros(count, dtype=torch.int64))


def inversions(
    teacher: ScoreFunction, shape: tuple[int, int, int], classes: int, count: int, seed: int, device: torch.device
) -> Images:
    """Images that the teacher assigns to each class in turn, by gradient descent from noise; half of them mixed in pairs."""
    start = noise_images(shape, count, seed)
    targets = torch.arange(count, device=device) % classes
    pixels = torch.logit(start.pixels.float().to(device) / 255, eps=0.01).requires_grad_()
    optimizer = torch.optim.Adam([pixels], lr=INVERSION_RATE)
    with torch.enable_grad():
        for _ in range(INVERSION_STEPS):
            inputs = torch.sigmoid(pixels)
            roughness = inputs.diff(dim=2).abs().mean() + inputs.diff(dim=3).abs().mean()
            optimizer.zero_grad()
            (F.cross_entropy(teacher((inputs - MEAN) / STD), targets) + SMOOTHNESS * roughness).backward()
            optimizer.step()
    images = torch.sigmoid(pixels).detach().cpu()
    random = generator(seed, "mixes")
    mixed, partner = torch.randperm(count, generator=random)[: count // 2], torch.randperm(count, generator=random)
    share = torch.rand(len(mixed), 1, 1, 1, generator=random)
    images[mixed] = share * images[mixed] + (1 - share) * images[partner[: len(mixed)]]
    return _as_images(images, targets.cpu())


def with_mixes(images: Images, count: int, seed: int) -> Images:
    """The images and `count` mixes of two of them, for small public sets."""
    random = generator(seed, "mixes of public images")
    one, other = (torch.randint(len(images), (count,), generator=random) for _ in range(2))
    share = torch.rand(count, 1, 1, 1, generator=random)
    mixes = share * images.pixels[one].float() + (1 - share) * images.pixels[other].float()
    return Images(
        torch.cat([images.pixels, mixes.round().to(torch.uint8)]), torch.cat([images.labels, images.labels[one]])
    )


def _as_images(values: Tensor, labels: Tensor) -> Images:
    return Images((values * 255).round().to(torch.uint8), labels)
