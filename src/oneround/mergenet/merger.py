"""Mergers fuse a student's matrices with a teacher's by adapters, and train the adapters on the result of later training.

A fusion gives W_out, and training moves it to W_final. An adapter with parameters φ then descends along
(∂W_out/∂φ)ᵀ(W_out − W_final): a vector–Jacobian product, without differentiating through the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oneround.config.sections import Adapter, Pair
from oneround.errors import RecipeError
from oneround.mergenet.adapter import ParameterAttention
from oneround.models.encoders import encoders
from oneround.models.prototype import all_on_cpu
from oneround.protocol.messages import Broadcast, prefixed, split_by_prefix
from oneround.seeds import derive

Weights = Mapping[str, Tensor]
TINY = 1e-12
SHOWN = 8  # names of matrices in an error message
PUBLISHED_PAIR = {"mobilenet-v2": "encoder.blocks.15.layers.6.weight"}
"""Of the paper: the projection 960 → 160 at the end of the 160-channel stage."""


def as_matrix(tensor: Tensor) -> Tensor:
    """A convolution's weight (out, in, …) as (out, in·…)."""
    return tensor.reshape(len(tensor), -1)


def chosen_pairs(named: list[Pair], broadcast: Broadcast) -> list[Pair]:
    """The named pairs; else the published pair, or the last convolution of another encoder."""
    if named:
        return named
    encoder = broadcast.recipe.encoder
    with torch.device("meta"):  # a message does not keep the order of the network's layers
        layers = encoders.of(encoder).build(broadcast.shape[0]).named_parameters()
    convolutions = [f"encoder.{name}" for name, value in layers if value.dim() == 4]
    chosen = PUBLISHED_PAIR.get(encoder.kind, convolutions[-1])
    return [Pair(student=chosen, teacher="prototypes")]


def not_finite(weights: Weights, adapter: Adapter) -> str:
    """Why a fused network must not be sent, if it has values that are not finite; otherwise empty."""
    if all(bool(torch.isfinite(value).all()) for value in weights.values() if value.is_floating_point()):
        return ""
    return f"not finite; is adapter.learning_rate = {adapter.learning_rate:g} too large?"


class Merger:
    """One adapter per pair, their optimiser, and the inputs of the last fusion."""

    def __init__(
        self, pairs: list[Pair], options: Adapter, student: Weights, teacher: Weights, seed: int, device: torch.device
    ) -> None:
        check_pairs(pairs, student, teacher)
        self.pairs, self.options, self.device, self.seed = pairs, options, device, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "adapter"))
            adapters = nn.ModuleList(
                ParameterAttention(_shape(student[pair.student]), _shape(teacher[pair.teacher]), options)
                for pair in pairs
            )
        self.adapters = adapters.to(device).eval()
        matrices = [each for each in adapters.parameters() if each.dim() > 1]
        others = [each for each in adapters.parameters() if each.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, weight_decay=options.weight_decay)
        self.inputs: dict[str, Tensor] = {}
        """The student's tensors of the last fusion, until `learn` uses them; then empty."""
        self.teacher_inputs: dict[str, Tensor] = {}
        """The teacher's tensors of that fusion, since a teacher may train on."""
        self.fusions = 0

    @torch.no_grad()
    def fuse(self, student: Weights, teacher: Weights) -> dict[str, Tensor]:
        """The student's weights with the paired tensors fused; deterministic, without dropout."""
        self.adapters.eval()
        self.inputs = {pair.student: student[pair.student].detach().clone() for pair in self.pairs}
        self.teacher_inputs = {pair.teacher: teacher[pair.teacher].detach().clone() for pair in self.pairs}
        self.fusions += 1
        return dict(student) | self._outputs(self.inputs, teacher)

    @torch.no_grad()
    def effect(self) -> dict[str, float]:
        """Relative change of the student's tensors by the last fusion, and relative difference to a teacher of zeros."""
        if not self.inputs:
            return {}
        out = self._outputs(self.inputs, self.teacher_inputs)
        zeros = {name: torch.zeros_like(value) for name, value in self.teacher_inputs.items()}
        blank = self._outputs(self.inputs, zeros)
        inputs = {name: value.to(self.device).float() for name, value in self.inputs.items()}
        size = max(_size(inputs), TINY)
        return {"changed": _distance(out, inputs) / size, "by_teacher": _distance(out, blank) / size}

    def learn(self, trained: Weights, progress: float = 0.0) -> dict[str, float]:
        """One step towards the weights that training reached after the last fusion; returns metrics.

        `progress`: share of all fusions that are done, for the learning rate schedule.
        """
        if not self.inputs:
            return {}
        targets = {pair.student: trained[pair.student].detach().to(self.device).float() for pair in self.pairs}
        with torch.no_grad():
            out = self._outputs(self.inputs, self.teacher_inputs)
        metrics = {"error": _distance(out, targets) / max(_size(targets), TINY), "adapter_moved": 0.0}
        rate = self.options.learning_rate
        if self.options.schedule == "cosine":
            rate *= (1 + math.cos(math.pi * progress)) / 2
        if rate:
            metrics |= self._step(targets, rate)
        self.inputs, self.teacher_inputs = {}, {}
        return metrics

    def _step(self, targets: Weights, rate: float) -> dict[str, float]:
        """One step along the vector–Jacobian product, with dropout; skipped if the gradient is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        devices = [self.device] if self.device.type == "cuda" else []
        self.adapters.train()
        with torch.enable_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive(self.seed, "dropout", self.fusions))
            out = self._outputs(self.inputs, self.teacher_inputs)
        self.adapters.eval()
        torch.autograd.backward(list(out.values()), [(out[name] - targets[name]).detach() for name in out])
        norm = float(nn.utils.clip_grad_norm_(self.adapters.parameters(), self.options.clip_norm))
        before = {name: value.clone() for name, value in self.adapters.state_dict().items()}
        if math.isfinite(norm):
            self.optimizer.step()
        return {"gradient_norm": norm, "adapter_moved": _distance(self.adapters.state_dict(), before)}

    def _outputs(self, student: Weights, teacher: Weights) -> dict[str, Tensor]:
        outputs = {}
        for pair, adapter in zip(self.pairs, self.adapters, strict=True):
            source, other = student[pair.student], teacher[pair.teacher]
            mine, others = (as_matrix(each.detach().to(self.device).float()) for each in (source, other))
            outputs[pair.student] = adapter(mine, others).reshape(source.shape)
        return outputs

    # --- state that survives a kill ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Its state as named tensors on the CPU."""
        tensors = prefixed(adapter=self.adapters.state_dict(), inputs=self.inputs, looked_at=self.teacher_inputs)
        for name, parameter in self.adapters.named_parameters():
            moments = self.optimizer.state[parameter]
            tensors |= {f"optimizer.{key}.{name}": value for key, value in moments.items()}
        return all_on_cpu(tensors) | {"fusions": torch.tensor(self.fusions)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned."""
        parts = split_by_prefix(state, "adapter", "inputs", "given", "looked_at", "optimizer")
        self.adapters.load_state_dict(parts["adapter"])
        self.inputs = parts["inputs"] or parts["given"]  # its name in version 0.1.0
        self.teacher_inputs, self.fusions = parts["looked_at"], int(state["fusions"])
        moments = split_by_prefix(parts["optimizer"], "step", "exp_avg", "exp_avg_sq")
        for name, parameter in self.adapters.named_parameters():
            if name in moments["step"]:
                self.optimizer.state[parameter] = {
                    key: by_name[name].to("cpu" if key == "step" else self.device, copy=True)
                    for key, by_name in moments.items()
                }


def check_pairs(pairs: list[Pair], student: Weights, teacher: Weights) -> None:
    """Refuse pairs that name a missing matrix, or a matrix of the student twice."""
    for pair in pairs:
        for name, weights, network in ((pair.student, student, "student"), (pair.teacher, teacher, "teacher")):
            matrices = [each for each, value in weights.items() if value.dim() > 1]
            if name not in matrices:
                some = "… " if len(matrices) > SHOWN else ""
                raise RecipeError(
                    f"pairs: the {network} has no matrix {name}; it has {some}{', '.join(matrices[-SHOWN:])}"
                )
    names = [pair.student for pair in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RecipeError(
            f"pairs: {twice} of the student is named twice; each of its matrices attends to one of the teacher's"
        )


def _shape(tensor: Tensor) -> tuple[int, int]:
    rows, columns = as_matrix(tensor).shape
    return rows, columns


def _size(weights: Weights) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in weights.values()))


def _distance(one: Weights, other: Weights) -> float:
    return _size({name: one[name] - other[name] for name in one})
