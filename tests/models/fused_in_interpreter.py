"""Run by test_fused.py in a process whose Triton interprets kernels on the CPU: largest errors against PyTorch, as JSON."""

from __future__ import annotations

import itertools
import json
import sys

import torch
from torch.nn import functional as F

from oneround.models import fused

SHAPES = [(4, 64, 5, 5), (16, 16, 1, 1), (3, 96, 4, 4), (10, 128, 3, 3), (3, 32, 9, 11), (5, 24, 6, 6)]
THEN = {None: lambda x: x, "relu": F.relu, "relu6": F.relu6}


def errors(shape: tuple[int, ...], dtype: torch.dtype, add: bool, then: str | None) -> dict[str, float]:
    torch.manual_seed(0)
    ours, theirs = torch.nn.BatchNorm2d(shape[1]), torch.nn.BatchNorm2d(shape[1]).double()
    torch.nn.init.uniform_(ours.weight, 0.5, 4)  # so that a part is cut at six
    torch.nn.init.normal_(ours.bias)
    theirs.load_state_dict(ours.state_dict())
    # A mean far from zero: a variance taken as E[x²] − E[x]² would lose its digits.
    x = (torch.randn(shape) + 30).to(dtype).contiguous(memory_format=torch.channels_last)
    r, g = (torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(2))
    a, b = (
        [x.clone().requires_grad_(), r.clone().requires_grad_()],
        [x.double().requires_grad_(), r.double().requires_grad_()],
    )
    y = fused.batch_norm(a[0], ours, a[1] if add else None, then)
    z = theirs(b[0]) + (b[1] if add else 0)
    z = THEN[then](z)
    y.backward(g)
    z.backward(g.double())
    pairs = {"out": (y, z), "dx": (a[0].grad, b[0].grad), "d_weight": (ours.weight.grad, theirs.weight.grad)}
    pairs |= {"d_bias": (ours.bias.grad, theirs.bias.grad), "mean": (ours.running_mean, theirs.running_mean)}
    pairs |= {"var": (ours.running_var, theirs.running_var)}
    pairs |= {"d_added": (a[1].grad, b[1].grad)} if add else {}
    assert int(ours.num_batches_tracked) == 1
    return {
        name: float((p.detach().double() - q.detach()).norm() / q.detach().norm().clamp(min=1e-9))
        for name, (p, q) in pairs.items()
    }


table = {}
cases = [(shape, torch.float32) for shape in SHAPES] + [(shape, torch.bfloat16) for shape in SHAPES[::3]]
for (shape, dtype), add, then in itertools.product(cases, (False, True), THEN):
    table[f"{shape} {dtype} add={add} then={then}"] = errors(shape, dtype, add, then)
json.dump(table, sys.stdout)
