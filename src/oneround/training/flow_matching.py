"""The step of a generator: conditional flow matching (Lipman et al., 2023; Liu et al., 2023).

    x_t = (1 − t)·x + t·ε,  min ‖v(x_t, t, y) − (ε − x)‖²,  t = sigmoid(N(0, 1)) as in Esser et al. (2024)

x is an image in [−1, 1]; its class y is withheld from time to time, and it is mirrored where the data allow it. A generator's weights
move a lot from step to step; what is sent is their moving average.

Five numbers are drawn for an image, on the CPU. Two of them seed its noise, which a hash makes where the step runs: thousands of
numbers per image need not be drawn one by one and moved to a GPU, and every device makes the same noise up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from oneround.models.precision import with_cast_weights
from oneround.models.unet import generators
from oneround.protocol.messages import Broadcast, prefixed
from oneround.site import Site
from oneround.training.averaging import MovingAverage
from oneround.training.optimizers import AdamW
from oneround.training.step import RecordedStep, StageSteps

COLUMNS = 5
TIME, LABEL, FLIP, HIGH, LOW = range(COLUMNS)
NAMES = ("loss", "gradient_norm")
BITS = 2**24
"""Whole numbers that a float32 in 0…1 tells apart."""
WORD = 2**32 - 1


def times(numbers: Tensor) -> Tensor:
    """(n,) sigmoid(N(0, 1)) from uniform numbers (n, COLUMNS)."""
    return torch.sigmoid(math.sqrt(2) * torch.erfinv(2 * numbers[:, TIME] - 1))


def noise(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(n, *shape) N(0, 1), a function of the seeds in each image's numbers: pairs by Box and Muller's formula."""
    size = math.prod(shape)
    pairs = (size + 1) // 2
    high, low = ((numbers[:, column, None] * BITS).long() for column in (HIGH, LOW))
    counter = torch.arange(2 * pairs, device=numbers.device) * 0x9E3779B9 & WORD
    uniform = (_hash(_hash(counter ^ low) ^ high << 8) >> 8).float().add(0.5) / BITS
    length, turn = (-2 * uniform[:, :pairs].log()).sqrt(), 2 * math.pi * uniform[:, pairs:]
    return torch.cat([length * turn.cos(), length * turn.sin()], 1)[:, :size].view(-1, *shape)


def _hash(words: Tensor) -> Tensor:
    """The last steps of MurmurHash3, on words of 32 bits in 64."""
    words = (words ^ words >> 16) * 0x85EBCA6B & WORD
    words = (words ^ words >> 13) * 0xC2B2AE35 & WORD
    return words ^ words >> 16


class FlowStep(RecordedStep):
    """A generator, its optimiser, the moving average of its weights and its step."""

    def __init__(self, broadcast: Broadcast, site: Site) -> None:
        super().__init__(broadcast.shape, site, COLUMNS)
        options = broadcast.recipe.generator
        assert options is not None
        self.options = options
        net = generators.of(options.network).build(broadcast.shape, broadcast.classes)
        self.no_class = net.no_class
        self.net = net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.predict = with_cast_weights(self.net) if self.bf16 else self.net
        parameters = dict(self.net.named_parameters())
        self.optimizer = AdamW(*options.betas)
        self.optimizer.add(list(parameters.values()), self.rate, options.weight_decay)
        self.steps = next(iter(self.optimizer.steps.values()))
        self.average = MovingAverage(parameters, options.average)
        self._begin_batches(options.batch_size)
        self.stage = StageSteps({}, False, list(NAMES), torch.zeros(len(NAMES), device=self.device), self.records)

    @property
    def learned(self) -> dict[str, Tensor]:
        return prefixed(net=self.net.state_dict(), average=self.average.live)

    def bind(self, broadcast: Broadcast) -> None:
        self.net.load_state_dict(broadcast.generator)
        for name, average in self.average.live.items():
            average.copy_(broadcast.generator[name])

    def begin_client(self, counts: Tensor) -> None:
        super().begin_client(counts)
        self.stage.sums.zero_()  # the client before may have failed within an epoch

    def begin_epoch(self, epoch: int, consensus: float) -> None:
        self.net.train()

    def means(self, steps: int) -> dict[str, float]:
        measured = (self.stage.sums / steps).tolist()
        self.stage.sums.zero_()
        return dict(zip(self.stage.names, measured, strict=True))

    def _step(self, pixels: Tensor, labels: Tensor, numbers: Tensor) -> None:
        with torch.no_grad():
            images = pixels.float() / 127.5 - 1
            flipped = numbers[:, FLIP] < (self.options.flip or 0)
            images = torch.where(flipped[:, None, None, None], images.flip(3), images)
            drawn, at = noise(numbers, self.shape), times(numbers)
            share = at[:, None, None, None]
            noisy = ((1 - share) * images + share * drawn).contiguous(memory_format=torch.channels_last)
            classes = torch.where(numbers[:, LABEL] < self.options.drop_label, self.no_class, labels)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            velocity = self.predict(noisy, at, classes)
        loss = (velocity.float() - (drawn - images)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(self.net.parameters(), self.options.clip_norm or math.inf)
        self.optimizer.step()
        self.average.update(self.steps)
        self.stage.sums += torch.stack([loss, norm]).detach()
