"""What only a GPU can show: repeats are bit-equal when asked, recording a step changes nothing, a part that cannot be
recorded still trains, clients train together as they do one by one, a CPU and a GPU agree on training, fixed features and
ridges, and a batch that does not fit is answered with one that does.

    python benchmarks/gpu_checks.py
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from oneround import acts
from oneround.config.load import change, load
from oneround.config.recipe import Local
from oneround.config.sections import Augment
from oneround.data import dataset_from_arrays
from oneround.data.augment import draw, views
from oneround.errors import RunError
from oneround.models.patches import Patches
from oneround.protocol import Broadcast, Upload
from oneround.simulate import run
from oneround.site import Site
from oneround.training import Batch, Term, terms

random = torch.Generator().manual_seed(0)
images = torch.randint(0, 256, (2000, 3, 32, 32), dtype=torch.uint8, generator=random)
labels = torch.randint(0, 10, (2000,), generator=random)
data = dataset_from_arrays("noise", images, labels, images[:64], labels[:64])


@terms.register("impatient")
class Impatient(Term):
    """A term that reads a value back from the device, which no recording allows."""

    def loss(self, batch: Batch) -> torch.Tensor:
        return batch.unit.square().sum() * (0.0 if math.isfinite(batch.unit.sum().item()) else 1.0)


def broadcast(**changes: Any) -> Broadcast:
    recipe = load("fafi", [("model.encoder", "resnet18"), ("training.epochs", 2), ("training.batch_size", 128)])
    recipe = acts.resolve(change(recipe, {key.replace("__", "."): value for key, value in changes.items()}), data)
    return acts.prepare(recipe, data.class_names, data.shape)


def train(sent: Broadcast, folder: Path | None = None, until: int | None = None, **local: Any) -> Upload:
    return acts.train(sent, Site("site", data.train, folder, Local(**local)), until)


def difference(a: Upload, b: Upload) -> float:
    """Relative distance of the weights."""
    names = [name for name, value in a.weights.items() if value.is_floating_point()]
    apart = sum(float((a.weights[name] - b.weights[name]).double().square().sum()) for name in names)
    return math.sqrt(apart / sum(float(a.weights[name].double().square().sum()) for name in names))


def check(name: str, holds: bool, figure: object) -> None:
    print(f"{'ok  ' if holds else 'FAIL'} {name}: {figure}", flush=True)
    if not holds:
        raise SystemExit(1)


def fused_error(shape: tuple[int, int, int, int], *, add: bool, then: str | None) -> float:
    """Largest relative error of the fused kernels in bf16 against PyTorch in float64, over outputs and all gradients.

    Where a value within bf16's rounding of 0 or 6 is cut is decided on the rounded value, as PyTorch's own layers do in bf16.
    """
    from oneround.kernels.batch_norm import batch_norm

    norm, exact = torch.nn.BatchNorm2d(shape[1]).cuda(), torch.nn.BatchNorm2d(shape[1]).cuda().double()
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    exact.load_state_dict(norm.state_dict())
    x, r, g = (
        torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last) for _ in range(3)
    )
    ours = [x.requires_grad_(), r.requires_grad_()]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    y, _, _ = batch_norm(ours[0], norm, ours[1] if add else None, then)
    reference = exact(theirs[0]) + (theirs[1] if add else 0)
    reference = reference + (reference.bfloat16().double() - reference).detach()
    reference = {None: reference, "relu": reference.relu(), "relu6": torch.nn.functional.relu6(reference)}[then]
    y.backward(g)
    reference.backward(g.double())
    pairs = [
        (y, reference),
        (ours[0].grad, theirs[0].grad),
        (norm.weight.grad, exact.weight.grad),
        (norm.bias.grad, exact.bias.grad),
    ]
    pairs += [(norm.running_mean, exact.running_mean), (norm.running_var, exact.running_var)]
    pairs += [(ours[1].grad, theirs[1].grad)] if add else []
    return max(float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)


def stem_error(shape: tuple[int, int, int, int], outputs: int) -> float:
    """Largest relative error of the kernels of the first convolution in bf16 against PyTorch in float64 on the same numbers."""
    from oneround.kernels.stem import convolve

    layer = torch.nn.Conv2d(shape[1], outputs, 3, padding=1, bias=False).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(shape, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
    weight = layer.weight.detach().bfloat16().double().requires_grad_()
    y, z = convolve(x, layer.weight), torch.nn.functional.conv2d(x.double(), weight, padding=1)
    g = torch.randn_like(y)
    ours, theirs = torch.autograd.grad(y, layer.weight, g)[0], torch.autograd.grad(z, weight, g.double())[0]
    pairs = ((y.detach(), z.detach()), (ours, theirs))
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


def views_apart(shape: tuple[int, ...]) -> float:
    """Largest difference between views made on the devices, of normalised pixels."""
    pixels, numbers = torch.randint(0, 256, shape, dtype=torch.uint8), draw(shape[0], torch.Generator().manual_seed(0))
    options = Augment(flip=0.5)
    return float((views(pixels.cuda(), numbers.cuda(), options).cpu() - views(pixels, numbers, options)).abs().max())


def features_apart(layers: int = 2) -> float:
    """Largest difference of a feature between the devices, over one and two layers."""
    part = Patches(size=800, layers=layers)
    built = part.build(data.shape, part.make(data.shape, 1, None))
    images = (data.test.pixels.float() / 255 - 0.5) / 0.5
    with torch.inference_mode():
        return float((built(images) - built.cuda()(images.cuda()).cpu()).abs().max())


def ridges_apart() -> float:
    """Largest difference of a score between a ridge summed and solved on the CPU and one on the GPU."""
    recipe = acts.resolve(load("ridge", [("sums.features", {"kind": "patches", "size": 800})]), data)
    sent = acts.prepare(recipe, data.class_names, data.shape)
    scores = []
    for device in ("cpu", "cuda"):
        site = Site("site", data.train, local=Local(device=device))
        model = acts.fuse([acts.train(sent, site)], sent, site).to(device)
        with torch.inference_mode():
            scores.append(model((data.test.pixels.float() / 255).to(device)).cpu())
    return float((scores[0] - scores[1]).abs().max())


def uploads_of_a_run(folder: Path, **local: Any) -> list[str]:
    """What the clients of a simulation upload, their states going to and fro between two snapshots."""
    overrides = [
        ("model.encoder", "resnet18"),
        ("training.epochs", 3),
        ("training.batch_size", 128),
        ("snapshots", [1, 2]),
    ]
    recipe = load("fafi", [*overrides, ("partition.clients", 4)])
    run(change(recipe, {f"local.{key}": value for key, value in local.items()}), folder, data=data)
    return [Upload.content_of(path) for path in sorted((folder / "uploads").iterdir())]


def clients_apart() -> dict[str, float]:
    """Largest relative distance between weights made one by one and together in fp32, with steps recorded and not."""
    sent = broadcast(model__encoder={"kind": "cnn", "width": 16}, training__batch_size=32, training__epochs=3)
    apart = {}
    for name, record in (("eager", False), ("recorded", True)):
        local = Local(precision="fp32", record=record)
        sites = {
            slot: Site(f"c{slot}", data.train.take(torch.arange(96) + 96 * slot), local=local) for slot in range(8)
        }
        uploads = acts.train_group(sent, sites, 9, sent.last_epoch)
        pairs = zip((acts.train(sent, site) for site in sites.values()), uploads, strict=True)
        apart[name] = max(difference(one, other) for one, other in pairs)
    return apart


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for shape, outputs in (((1024, 3, 32, 32), 64), ((100, 1, 28, 28), 32), ((7, 3, 9, 13), 16)):
        error = stem_error(shape, outputs)
        check(f"first convolution, {shape}", error < 1e-2, f"relative error {error:.1e}")
    for shape in ((1024, 3, 32, 32), (100, 1, 28, 28), (50, 3, 64, 64), (4, 3, 70, 70)):
        apart = views_apart(shape)
        check(f"views, {shape}", apart < 1e-3, f"largest difference {apart:.1e}")
    for shape in ((1024, 64, 32, 32), (1024, 512, 4, 4), (128, 144, 32, 32), (6, 24, 7, 7), (2, 16, 1, 1)):
        worst = max(fused_error(shape, add=add, then=then) for add in (False, True) for then in (None, "relu", "relu6"))
        check(f"fused batch norm, {shape}", worst < 1e-2, f"relative error {worst:.1e}")
    sent = broadcast()
    exact = train(sent, deterministic=True)
    check(
        "deterministic repeats are bit-equal",
        train(sent, deterministic=True).content == exact.content,
        exact.content[:16],
    )
    with tempfile.TemporaryDirectory() as folder:
        train(sent, Path(folder), until=1, deterministic=True)
        check(
            "stopped and resumed is bit-equal",
            train(sent, Path(folder), deterministic=True).content == exact.content,
            "",
        )
    with tempfile.TemporaryDirectory() as folder:
        ways = {f"{workers} at a time": uploads_of_a_run(Path(folder) / str(workers), deterministic=True, workers=workers) for workers in (1, 2)}  # fmt: skip
    check("two clients at a time are one after another", len({*map(tuple, ways.values())}) == 1, ways)
    plain = difference(exact, train(sent, deterministic=True, record=False))
    check("recorded steps are the plain steps", plain < 1e-6, plain)
    few = broadcast(training__batch_size=32, training__epochs=1)
    small = Site("site", data.train.take(torch.arange(64)))
    both = [
        acts.train(few, Site("site", small.data, local=Local(device=device, precision="fp32")))
        for device in ("cpu", "cuda")
    ]
    check("a CPU and a GPU agree after two steps", difference(*both) < 5e-3, difference(*both))
    for name, apart in clients_apart().items():
        check(f"clients trained together, {name}", apart < 1e-3, f"relative distance to one by one {apart:.1e}")
    check("fixed features on a CPU and a GPU", (apart := features_apart()) < 1e-3, f"largest difference {apart:.1e}")
    check("ridge scores from a CPU and from a GPU", (apart := ridges_apart()) < 1e-2, f"largest difference {apart:.1e}")

    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(3e9 / total)
    try:
        train(broadcast(training__batch_size=2048))
        check("a batch that does not fit is refused", False, "it fitted")
    except RunError as error:
        fits = int(str(error).rsplit("=", 1)[1].rstrip(")"))
        check("a batch that does not fit is refused", 1 <= fits < 2048, error)
    torch.cuda.empty_cache()
    print(f"     {torch.cuda.memory_allocated() / 1e9:.2f} GB in use before the next run")
    check("the batch size it names fits", train(broadcast(training__batch_size=fits)).epoch == 2, fits)
    torch.cuda.set_per_process_memory_fraction(1.0)

    # Last, since PyTorch never gives back the memory of a recording that failed.
    odd = broadcast(objective__terms={**load("fafi").plain()["objective"]["terms"], "impatient": {}})
    check("a part that cannot be recorded still trains", difference(train(odd, deterministic=True), exact) < 1e-2, "")


if __name__ == "__main__":
    main()
