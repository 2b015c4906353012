"""MergeNet's fusion as a Flower strategy, for any Flower app.

Before the average is sent, some of its arrays attend to arrays of a large network. See examples/mergenet_strategy.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor

from oneround.mergenet import Adapter, Merger, Pair, check_pairs, not_finite

log = logging.getLogger("oneround")
Judge = Callable[[dict[str, Tensor]], float]


class MergeNet(FedAvg):
    """FedAvg whose average is fused with a teacher's parameters from `start_round` on, every `every` rounds.

    `pairs`: names of a student's array and the teacher's array it attends to. `judge`: a network's arrays → its score
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
        if int(start_round) != start_round or int(every) != every or start_round < 1 or every < 1 or not pairs:
            raise ValueError(
                f"start_round = {start_round}, every = {every}, {len(pairs)} pairs: each must be a whole number, at least 1"
            )
        wrong = next((pair for pair in pairs if isinstance(pair, str) or len(pair) != 2), None)
        if wrong is not None:
            raise ValueError(f"pairs: {wrong!r} must be (student's array, teacher's array)")
        if judge is None and accept_if:
            raise ValueError(f"accept_if = {accept_if}: needs judge; give judge too, or leave accept_if out")
        if not math.isfinite(accept_if):
            raise ValueError(
                f"accept_if = {accept_if}: must be a number, in the unit of judge's scores (0.02: two points)"
            )
        self.teacher, self.pairs = dict(teacher), [Pair(student=name, teacher=other) for name, other in pairs]
        self.start_round, self.every, self.judge, self.accept_if = start_round, every, judge, accept_if
        self.adapter, self.seed, self.device = adapter or Adapter(), seed, torch.device(device)
        self.merger: Merger | None = None
        self.last_round: int | None = None
        self.trace: list[dict[str, Any]] = []
        """Metrics of every fusion: the adapter's error, how far adapter and student moved, whether the fused network was sent."""

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *more: Any, **options: Any) -> Result:
        """As FedAvg's."""
        check_pairs(self.pairs, initial_arrays.to_torch_state_dict(), self.teacher)
        if self.start_round >= num_rounds:
            log.warning(
                "mergenet: start_round = %d of %d rounds, and after the last round nothing is fused: this is plain averaging",
                self.start_round,
                num_rounds,
            )
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
        entry: dict[str, Any] = {"round": server_round, **self.merger.learn(averaged)}
        if server_round == self.last_round or (server_round - self.start_round) % self.every:
            self.trace.append(entry)
            return arrays, metrics  # after the last round nobody trains any more: the result is the average
        merged = self.merger.fuse(averaged, self.teacher)
        fused = {name: value.to(averaged[name].dtype).cpu() for name, value in merged.items()}
        entry |= {name: value for name, value in self.merger.effect().items() if math.isfinite(value)}
        entry["accepted"] = self._accepts(fused, averaged, entry)
        self.trace.append(entry)
        log.log(logging.INFO if entry["accepted"] else logging.WARNING, "mergenet: %s", entry)
        return ArrayRecord(fused) if entry["accepted"] else arrays, metrics

    def _accepts(self, fused: dict[str, Tensor], averaged: dict[str, Tensor], entry: dict[str, Any]) -> bool:
        """Whether the fused network is sent; if not, adds the reason to `entry`."""
        if reason := not_finite(fused, self.adapter):
            entry["reason"] = reason
        elif self.judge is not None:
            entry["fused"], entry["average"] = self.judge(fused), self.judge(averaged)
            if not entry["fused"] >= entry["average"] - self.accept_if:
                entry["reason"] = f"judged {entry['fused']:.4g}, the average {entry['average']:.4g}"
        return "reason" not in entry
