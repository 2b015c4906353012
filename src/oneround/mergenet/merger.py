"""Adapters at work: they fuse a student's matrices with a teacher's, and learn from where training takes them.

After fusing gave W_out and training moved it to W_final, an adapter with parameters φ descends along
(∂W_out/∂φ)ᵀ(W_out − W_final): a vector–Jacobian product, nothing of the training is differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oneround.errors import RecipeError
from oneround.mergenet.adapter import Adapter, ParameterAttention
from oneround.models.encoders import encoders
from oneround.models.prototype import on_cpu
from oneround.parts import Strict
from oneround.protocol import Broadcast
from oneround.seeds import derive

Weights = Mapping[str, Tensor]
TINY = 1e-12
SHOWN = 8  # names of matrices in a message


class Pair(Strict):
    """A student's tensor and the teacher's tensor it looks at, by name."""

    student: str
    teacher: str


def as_matrix(tensor: Tensor) -> Tensor:
    """A convolution's weight (out, in, …) as (out, in·…)."""
    return tensor.reshape(len(tensor), -1)


SEED_PAIR = {"mobilenet-v2": "encoder.blocks.15.layers.6.weight"}
"""The projection 960 → 160 at the end of the 160-channel stage."""


def chosen_pairs(named: list[Pair], broadcast: Broadcast) -> list[Pair]:
    """Those that are named; else the published pair, or the nearest thing another encoder has."""
    if named:
        return named
    encoder = broadcast.recipe.model.encoder
    assert encoder is not None
    with torch.device("meta"):  # in the network's own order; a message keeps another
        layers = encoders.of(encoder).build(broadcast.shape[0]).named_parameters()
    convolutions = [f"encoder.{name}" for name, value in layers if value.dim() == 4]
    chosen = SEED_PAIR.get(encoder.kind, convolutions[-1])
    return [Pair(student=chosen, teacher="prototypes")]


class Merger:
    """One adapter per pair, their optimiser, and what they were last given to fuse."""

    def __init__(
        self, pairs: list[Pair], options: Adapter, student: Weights, teacher: Weights, seed: int, device: torch.device
    ) -> None:
        check_pairs(pairs, student, teacher)
        self.pairs, self.options, self.device, self.seed = pairs, options, device, seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "adapter"))
            made = [
                ParameterAttention(_shape(student[pair.student]), _shape(teacher[pair.teacher]), options)
                for pair in pairs
            ]
        self.adapters = nn.ModuleList(made).to(device).eval()
        matrices = [each for each in self.adapters.parameters() if each.dim() > 1]
        others = [each for each in self.adapters.parameters() if each.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, weight_decay=options.weight_decay)
        self.given: dict[str, Tensor] = {}
        """The student's tensors of the last fusion whose outcome is not known yet; empty if there is none."""
        self.looked_at: dict[str, Tensor] = {}
        """The teacher's tensors of that fusion: a teacher may learn on."""
        self.fusions = 0

    @torch.no_grad()
    def fuse(self, student: Weights, teacher: Weights) -> dict[str, Tensor]:
        """The student's tensors, changed; everything else of the student is as it was. Without dropout: the same again for the same."""
        self.adapters.eval()
        self.given = {pair.student: student[pair.student].detach().clone() for pair in self.pairs}
        self.looked_at = {pair.teacher: teacher[pair.teacher].detach().clone() for pair in self.pairs}
        self.fusions += 1
        return dict(student) | self._outputs(self.given, teacher)

    @torch.no_grad()
    def effect(self) -> dict[str, float]:
        """How far the last fusion took the student's tensors, and how far from what it had made of a teacher of zeros."""
        if not self.given:
            return {}
        out = self._outputs(self.given, self.looked_at)
        blank = self._outputs(self.given, {name: torch.zeros_like(value) for name, value in self.looked_at.items()})
        given = {name: value.to(self.device).float() for name, value in self.given.items()}
        size = max(_size(given), TINY)
        return {"changed": _distance(out, given) / size, "by_teacher": _distance(out, blank) / size}

    def learn(self, reached: Weights, progress: float = 0.0) -> dict[str, float]:
        """One step towards what training made of the last fusion; `progress` (0…1) of all fusions. What it saw, in numbers."""
        if not self.given:
            return {}
        goals = {pair.student: reached[pair.student].detach().to(self.device).float() for pair in self.pairs}
        with torch.no_grad():
            out = self._outputs(self.given, self.looked_at)
        told = {"error": _distance(out, goals) / max(_size(goals), TINY), "adapter_moved": 0.0}
        rate = self.options.learning_rate
        if self.options.schedule == "cosine":
            rate *= (1 + math.cos(math.pi * progress)) / 2
        if rate:
            told |= self._step(goals, rate)
        self.given, self.looked_at = {}, {}
        return told

    def _step(self, goals: Weights, rate: float) -> dict[str, float]:
        """Descend along the vector–Jacobian product, with dropout; one whose gradient is not finite is left out."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        devices = [self.device] if self.device.type == "cuda" else []
        self.adapters.train()
        with torch.enable_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive(self.seed, "dropout", self.fusions))
            out = self._outputs(self.given, self.looked_at)
        self.adapters.eval()
        torch.autograd.backward(list(out.values()), [(out[name] - goals[name]).detach() for name in out])
        norm = float(nn.utils.clip_grad_norm_(self.adapters.parameters(), self.options.clip_norm))
        before = [parameter.detach().clone() for parameter in self.adapters.parameters()]
        if math.isfinite(norm):
            self.optimizer.step()
        now = self.adapters.parameters()
        moved = sum(float((each.detach() - was).square().sum()) for each, was in zip(now, before, strict=True))
        return {"gradient_norm": norm, "adapter_moved": math.sqrt(moved)}

    def _outputs(self, student: Weights, teacher: Weights) -> dict[str, Tensor]:
        found = {}
        for pair, adapter in zip(self.pairs, self.adapters, strict=True):
            mine, other = (as_matrix(each.detach().to(self.device).float()) for each in (student[pair.student], teacher[pair.teacher]))  # fmt: skip
            found[pair.student] = adapter(mine, other).reshape(student[pair.student].shape)
        return found

    # --- state that survives a kill ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All of it, as a file holds it."""
        told = {f"adapter.{name}": on_cpu(value) for name, value in self.adapters.state_dict().items()}
        told |= {f"given.{name}": on_cpu(value) for name, value in self.given.items()}
        told |= {f"looked_at.{name}": on_cpu(value) for name, value in self.looked_at.items()}
        for name, parameter in self.adapters.named_parameters():
            told |= {f"optimizer.{key}.{name}": on_cpu(value) for key, value in self.optimizer.state[parameter].items()}
        return told | {"fusions": torch.tensor(self.fusions)}

    def load(self, told: Mapping[str, Tensor]) -> None:
        """What `state` gave."""
        parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "given": {}, "looked_at": {}, "optimizer": {}}
        for name, value in told.items():
            part, _, key = name.partition(".")
            if key:
                parts[part][key] = value
        self.adapters.load_state_dict(parts["adapter"])
        self.given, self.looked_at, self.fusions = parts["given"], parts["looked_at"], int(told["fusions"])
        for name, parameter in self.adapters.named_parameters():
            kept = {key.partition(".")[0]: value for key, value in parts["optimizer"].items() if key.partition(".")[2] == name}  # fmt: skip
            if kept:
                self.optimizer.state[parameter] = {
                    key: value.clone() if key == "step" else value.to(self.device, copy=True)
                    for key, value in kept.items()
                }


def check_pairs(pairs: list[Pair], student: Weights, teacher: Weights) -> None:
    """Every pair names a matrix on either side, and no matrix of the student's twice."""
    for pair in pairs:
        for name, whose, what in ((pair.student, student, "student"), (pair.teacher, teacher, "teacher")):
            matrices = [each for each, value in whose.items() if value.dim() > 1]
            if name not in matrices:
                some = "… " if len(matrices) > SHOWN else ""
                raise RecipeError(
                    f"pairs: the {what} has no matrix {name}; it has {some}{', '.join(matrices[-SHOWN:])}"
                )
    names = [pair.student for pair in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RecipeError(
            f"pairs: {twice} of the student is named twice; each of its matrices looks at one of the teacher's"
        )


def _shape(tensor: Tensor) -> tuple[int, int]:
    rows, columns = as_matrix(tensor).shape
    return rows, columns


def _size(weights: Weights) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in weights.values()))


def _distance(one: Weights, other: Weights) -> float:
    return _size({name: one[name] - other[name] for name in one})
