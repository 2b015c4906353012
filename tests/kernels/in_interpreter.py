"""Run by test_kernels.py in a process whose Triton interprets kernels on the CPU: largest errors against PyTorch, as JSON."""

from __future__ import annotations

import itertools
import json
import sys

import torch
from torch.nn import functional as F

from oneround.config.sections import Augment
from oneround.data.augment import MEAN, STD, _colour_matrices, draw, views
from oneround.kernels import batch_norm, stem
from oneround.kernels.views import views as fused_views

SHAPES = [(4, 64, 5, 5), (16, 16, 1, 1), (3, 96, 4, 4), (10, 128, 3, 3), (3, 32, 9, 11), (5, 24, 6, 6)]
THEN = {None: lambda x: x, "relu": F.relu, "relu6": F.relu6}


def errors(shape: tuple[int, ...], dtype: torch.dtype, add: bool, then: str | None, twice: bool) -> dict[str, float]:
    torch.manual_seed(0)
    ours, theirs = torch.nn.BatchNorm2d(shape[1]), torch.nn.BatchNorm2d(shape[1]).double()
    torch.nn.init.uniform_(ours.weight, 0.5, 4)  # so that a part is cut at six
    torch.nn.init.normal_(ours.bias)
    theirs.load_state_dict(ours.state_dict())
    # A mean far from zero: a variance taken as E[x²] − E[x]² would lose its digits.
    x = (torch.randn(shape) + 30).to(dtype).contiguous(memory_format=torch.channels_last)
    r, g, h = (torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(3))
    a, b = (
        [x.clone().requires_grad_(), r.clone().requires_grad_()],
        [x.double().requires_grad_(), r.double().requires_grad_()],
    )
    y, again = batch_norm.batch_norm(a[0], ours, a[1] if add else None, then)
    z = theirs(b[0]) + (b[1] if add else 0)
    z = THEN[then](z)
    if twice:
        (y * g + again * h).sum().backward()
        (z * (g.double() + h.double())).sum().backward()
    else:
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


def stem_errors(shape: tuple[int, ...], outputs: int) -> dict[str, float]:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(shape[1], outputs, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    y, z = stem.convolve(x, layer.weight), layer(x)
    g = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(out, layer.weight, g)[0] for out in (y, z))
    return {"out": float((y - z).norm() / z.norm()), "d_weight": float((ours - theirs).norm() / theirs.norm())}


def view_errors(shape: tuple[int, ...], options: Augment) -> dict[str, float]:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    numbers, matrices = draw(len(pixels), random), _colour_matrices(torch.device("cpu"))
    ours = fused_views(pixels, numbers, options, matrices, (MEAN, STD), torch.float32)
    return {"views": float((ours - views(pixels, numbers, options)).abs().max())}


table = {}
cases = [(shape, torch.float32) for shape in SHAPES] + [(shape, torch.bfloat16) for shape in SHAPES[::3]]
for (shape, dtype), add, then, twice in itertools.product(cases, (False, True), THEN, (False, True)):
    table[f"{shape} {dtype} add={add} then={then} twice={twice}"] = errors(shape, dtype, add, then, twice)
for shape, outputs in (((3, 3, 8, 8), 16), ((5, 1, 7, 9), 32), ((40, 3, 12, 12), 64)):
    table[f"stem {shape} {outputs}"] = stem_errors(shape, outputs)
STILL = Augment(crop_scale=[1.0, 1.0], crop_ratio=[1.0, 1.0], flip=0.0, jitter=0.0, greyscale=0.0)
for options in (Augment(flip=0.5), STILL, Augment(flip=1.0, greyscale=0.5, jitter=1.0, hue=0.3)):
    for size in ((6, 3, 16, 16), (5, 1, 28, 28), (4, 3, 9, 13)):
        table[f"views {size} {options}"] = view_errors(size, options)
json.dump(table, sys.stdout)
