"""MergeNet's fusion as a Flower strategy, for people who have a Flower app of their own and want nothing else of this package.

After the average, before the broadcast: some arrays of the average look at arrays of a large network. examples/mergenet_strategy.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from oneround.mergenet import Adapter, Merger, Pair, check_pairs

log = logging.getLogger("oneround")
Judge = Callable[[dict[str, Tensor]], float]


class MergeNet(FedAvg):
    """FedAvg whose average is fused with a teacher's parameters from `start_round` on, every `every` rounds.

    `pairs`: which of the student's arrays looks at which of the teacher's, by name. `judge`: a network's arrays → how good it is
    (larger is better); with it, a fused network that is worse than the average by more than `accept_if` is not sent.
    """

    def __init__(
        self,
        teacher: Mapping[str, Tensor],
        pairs: Sequence[tuple[str, str]],
        *,
        start_round: int = 2,
        every: int = 1,
        adapter: Adapter | None = None,
        judge: Judge | None = None,
        accept_if: float = 0.0,
        seed: int = 1,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        """`options` are FedAvg's."""
        super().__init__(**options)
        if start_round < 1 or every < 1 or not pairs:
            raise ValueError(
                f"start_round = {start_round}, every = {every}, {len(pairs)} pairs: each must be at least 1"
            )
        self.teacher, self.pairs = dict(teacher), [Pair(student=mine, teacher=theirs) for mine, theirs in pairs]
        self.start_round, self.every, self.judge, self.accept_if = start_round, every, judge, accept_if
        self.adapter, self.seed, self.device = adapter or Adapter(), seed, torch.device(device)
        self.merger: Merger | None = None
        self.last_round: int | None = None
        self.trace: list[dict[str, Any]] = []
        """What every fusion did: its error, how far adapter and student moved, whether the fused network was sent."""

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *more: Any, **options: Any) -> Result:
        """As FedAvg's."""
        check_pairs(self.pairs, initial_arrays.to_torch_state_dict(), self.teacher)
        self.last_round = num_rounds
        return super().start(grid, initial_arrays, num_rounds, *more, **options)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None or server_round < self.start_round:
            return arrays, metrics
        averaged = arrays.to_torch_state_dict()
        if self.merger is None:
            self.merger = Merger(self.pairs, self.adapter, averaged, self.teacher, self.seed, self.device)
        told: dict[str, Any] = {"round": server_round, **self.merger.learn(averaged)}
        if server_round == self.last_round or (server_round - self.start_round) % self.every:
            self.trace.append(told)
            return arrays, metrics  # after the last round nobody trains any more: the result is the average
        fused = {name: value.to(averaged[name].dtype).cpu() for name, value in self.merger.fuse(averaged, self.teacher).items()}  # fmt: skip
        told |= self.merger.effect()
        told["accepted"] = self._accepts(fused, averaged, told)
        self.trace.append(told)
        log.info("mergenet: %s", told)
        return ArrayRecord(fused) if told["accepted"] else arrays, metrics

    def _accepts(self, fused: dict[str, Tensor], averaged: dict[str, Tensor], told: dict[str, Any]) -> bool:
        if not all(bool(torch.isfinite(value).all()) for value in fused.values() if value.is_floating_point()):
            return False
        if self.judge is None:
            return True
        told["fused"], told["average"] = self.judge(fused), self.judge(averaged)
        return bool(told["fused"] >= told["average"] - self.accept_if)
