"""A client's training of its generator, by the one loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oneround.config.sections import Generator, Training
from oneround.training import safeguards
from oneround.training.flow_matching import COLUMNS, FlowStep
from oneround.training.loop import Learner, Trainer


class GeneratorLearner(Learner):
    """The training of a generator; it begins when that of the network that classifies is over."""

    network = "generator"

    @property
    def options(self) -> Generator:
        assert self.broadcast.recipe.generator is not None
        return self.broadcast.recipe.generator

    @property
    def average(self) -> dict[str, Tensor]:
        """The moving average of its weights: what is sent; live, not a copy."""
        assert isinstance(self.state, FlowStep)
        return self.state.average.live

    @property
    def _training(self) -> Training:
        return self.options.batching

    @property
    def _epochs_before(self) -> int:
        return self.broadcast.recipe.first_generator_epoch

    def _bind(self, trainer: Trainer, teacher: Callable[[Tensor], Tensor] | None) -> FlowStep:
        return trainer.bind_generator(self.broadcast, self.site)

    def _numbers(self, samples: int, random: torch.Generator) -> Tensor:
        return torch.rand(samples, COLUMNS, generator=random)

    def _rate(self, step: int, steps: int) -> float:
        return flow_rate(self.options, (self.epoch - self.first) * steps + step, self.options.epochs * steps)

    def _check_epoch(self, metrics: dict[str, Any]) -> safeguards.Trouble | None:
        return safeguards.check_generator(self.options, metrics)

    def traced(self, steps: int) -> bool:
        return False


def flow_rate(options: Generator, step: int, steps: int) -> float:
    """The learning rate of a step (from 0) of so many: it rises from 0, is constant, and falls at the end."""
    warm_up = min(options.warm_up, steps // 5)
    risen = min(1.0, (step + 1) / (warm_up + 1))
    left = (steps - step) / (options.fall * steps) if options.fall else 1.0
    return options.learning_rate * risen * (options.lowest + (1 - options.lowest) * min(1.0, left))
