"""Run by `interpreted` in a process whose Triton interprets kernels on the CPU: largest errors against PyTorch, as JSON."""

from __future__ import annotations

import itertools
import json
import sys
import weakref
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from oneround import kernels
from oneround.config.sections import Augment
from oneround.data.augment import MEAN, STD, _colour_matrices, draw, views
from oneround.kernels import batch_norm, contrastive, stem
from oneround.kernels.views import views as fused_views
from oneround.models.norm import again, normalise
from oneround.training import Batch
from oneround.training.contrastive import SupervisedContrastive

SHAPES = [(4, 64, 5, 5), (16, 16, 1, 1), (3, 96, 4, 4), (3, 32, 9, 11), (5, 24, 6, 6)]
USES = ("once", "twice", "thin", "all", "only thin")
"""How later layers use the output."""
Cases = Iterator[tuple[str, dict[str, float]]]
THEN = {None: lambda x: x, "relu": F.relu, "relu6": F.relu6}


def errors(shape: tuple[int, ...], dtype: torch.dtype, add: str, then: str | None, uses: str) -> dict[str, float]:
    torch.manual_seed(0)
    ours, theirs = torch.nn.BatchNorm2d(shape[1]), torch.nn.BatchNorm2d(shape[1]).double()
    own, their_own = torch.nn.BatchNorm2d(shape[1]), torch.nn.BatchNorm2d(shape[1]).double()  # of the shortcut
    torch.nn.init.uniform_(own.weight, 0.5, 4)
    their_own.load_state_dict(own.state_dict())
    ours.num_batches_tracked = torch.zeros(2, dtype=torch.int64)  # of two clients that train together
    torch.nn.init.uniform_(ours.weight, 0.5, 4)  # so that a part is cut at six
    torch.nn.init.normal_(ours.bias)
    theirs.weight.data.copy_(ours.weight)
    theirs.bias.data.copy_(ours.bias)
    # A mean far from zero: a variance taken as E[x²] − E[x]² would lose its digits.
    x = (torch.randn(shape) + 30).to(dtype).contiguous(memory_format=torch.channels_last)
    r, g, h = (torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(3))
    a, b = (
        [x.clone().requires_grad_(), r.clone().requires_grad_()],
        [x.double().requires_grad_(), r.double().requires_grad_()],
    )
    y, again, thin = batch_norm.batch_norm(
        a[0], ours, a[1] if add else None, then, own if add == "normalised" else None
    )
    z = theirs(b[0]) + (0 if not add else their_own(b[1]) if add == "normalised" else b[1])
    z = THEN[then](z)
    assert torch.equal(batch_norm.pack(thin), thin)
    few = torch.zeros_like(h, dtype=torch.float64)
    few[:, :, ::2, ::2] = h.double()[:, :, ::2, ::2]
    ours_of = {"once": y * g, "twice": y * g + again * h, "thin": y * g, "all": y * g + again * h, "only thin": 0 * g}
    theirs_of = {"once": z * g.double(), "twice": z * (g.double() + h.double()), "thin": z * (g.double() + few)}
    theirs_of |= {"all": z * (g.double() + h.double() + few), "only thin": z * few}
    loss = ours_of[uses].sum()
    if uses in ("thin", "all", "only thin"):
        loss = loss + (batch_norm.pack(thin) * h[:, :, ::2, ::2]).sum()
    loss.backward()
    theirs_of[uses].sum().backward()
    pairs = {"out": (y, z), "dx": (a[0].grad, b[0].grad), "d_weight": (ours.weight.grad, theirs.weight.grad)}
    pairs |= {"d_bias": (ours.bias.grad, theirs.bias.grad), "mean": (ours.running_mean, theirs.running_mean)}
    pairs |= {"var": (ours.running_var, theirs.running_var)}
    pairs |= {"d_added": (a[1].grad, b[1].grad)} if add else {}
    if add == "normalised":
        pairs |= {"d_own_weight": (own.weight.grad, their_own.weight.grad)}
        pairs |= {
            "d_own_bias": (own.bias.grad, their_own.bias.grad),
            "own_mean": (own.running_mean, their_own.running_mean),
        }
    assert ours.num_batches_tracked.tolist() == [1, 1]
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


def contrastive_errors(n: int, features: int, classes: int) -> dict[str, float]:
    torch.manual_seed(0)
    unit, labels = F.normalize(torch.randn(n, features)), torch.arange(n) % classes
    labels[0] = classes  # alone in its class: an anchor without a positive
    ours, theirs = unit.clone().requires_grad_(), unit.double().requires_grad_()
    term = SupervisedContrastive(temperature=0.2)
    one, two = contrastive.supervised_contrastive(ours, labels, 0.2), term.loss(Batch(theirs, labels, theirs[:1]))
    (3 * one).backward()
    (3 * two).backward()
    return {"loss": abs(float(one / two) - 1), "d_unit": float((ours.grad - theirs.grad).norm() / theirs.grad.norm())}


def check_that_nothing_is_kept_alive() -> None:
    """What `normalise` notes on its output forms no cycle: without a garbage collector, it goes with its last use."""
    norm, x = torch.nn.BatchNorm2d(8), torch.randn(2, 8, 4, 4, requires_grad=True)
    kernels.usable = lambda tensor: True
    out = normalise(norm, x.contiguous(memory_format=torch.channels_last))
    notes = [weakref.ref(each) for each in (out, again(out), again(out).thin)]
    del out
    assert [each() for each in notes] == [None, None, None]


def contrastive_cases() -> Cases:
    for sizes in ((12, 5, 3), (50, 16, 40), (64, 8, 1)):
        yield f"{sizes}", contrastive_errors(*sizes)


def batch_norm_cases() -> Cases:
    check_that_nothing_is_kept_alive()
    kinds = [(shape, torch.float32) for shape in SHAPES] + [(SHAPES[0], torch.bfloat16)]
    for (shape, dtype), add, then in itertools.product(kinds, ("", "as it is", "normalised"), THEN):
        for uses in ("thin",) if shape != SHAPES[0] else ("once", "thin") if then == "relu6" else USES:
            yield f"{shape} {dtype} add={add} then={then} uses={uses}", errors(shape, dtype, add, then, uses)


def stem_cases() -> Cases:
    for shape, outputs in (((3, 3, 8, 8), 16), ((5, 1, 7, 9), 32), ((40, 3, 12, 12), 64)):
        yield f"{shape} {outputs}", stem_errors(shape, outputs)


def views_cases() -> Cases:
    still = Augment(crop_scale=[1.0, 1.0], crop_ratio=[1.0, 1.0], flip=0.0, jitter=0.0, greyscale=0.0)
    for options in (Augment(flip=0.5), still, Augment(flip=1.0, greyscale=0.5, jitter=1.0, hue=0.3)):
        for size in ((6, 3, 16, 16), (5, 1, 28, 28), (4, 3, 9, 13)):
            yield f"{size} {options}", view_errors(size, options)


json.dump(dict(globals()[f"{sys.argv[1]}_cases"]()), sys.stdout)
