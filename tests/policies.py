"""Weight policies of the alignment in float64, and where their variables come to rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from oneround.training.alignment.guards import Guard
from oneround.training.alignment.weights import StepInputs, Weight


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def now(
    state: dict[str, Tensor] | None = None,
    base: float = 4.0,
    align: float = 0.01,
    s: float = 1.0,
    entropy: float = 0.5,
    floor: float = 0.0,
) -> StepInputs:
    return StepInputs(number(base), number(floor), number(align), number(s), number(entropy), state or {})


def rest(policy: Weight, guard: Guard, base: float, align: float, s: float) -> dict[str, float]:
    """Where gradient descent on the variables comes to rest under constant losses; also the memory of a policy that has one."""
    variables = {name: nn.Parameter(number(value)) for name, value in policy.variables(0.5).items()}
    memory = {name: number(value) for name, value in policy.memory().items()}
    descent = torch.optim.SGD(variables.values(), lr=0.05, momentum=0.9) if variables else None
    raw, seen_raw = number(0), []
    for _ in range(600):
        seen = now({**variables, **memory}, base, align, s)
        raw, loss = policy.raw(seen), policy.loss(seen)
        memory = policy.remember(seen)
        seen_raw.append(float(raw))
        if descent is not None and loss is not None:
            descent.zero_grad()
            (loss + guard.penalty(seen.state)).backward()
            descent.step()
    return {name: math.exp(value.item()) for name, value in variables.items()} | {
        "raw": float(raw),
        "most": max(seen_raw),
    }
