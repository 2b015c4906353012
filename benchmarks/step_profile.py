"""Where the time of a training step goes on a GPU: seconds of every kernel of a recorded step, and of every convolution by itself.

    python benchmarks/step_profile.py --out results/step_profile_h200.json

The step is that of the reference setting: ResNet-18, 512 images of 32 × 32 pixels in two views, FAFI's objective. Convolutions are timed
one by one in each direction, with their share of the matrix-product rate of the same run.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from common import parser_of, write_json
from epoch_time import matrix_product_rate
from oneround import acts
from oneround.config.load import load, parse_override
from oneround.data import dataset_from_arrays
from oneround.data.augment import COLUMNS
from oneround.models.prototype import build
from oneround.runs.environment import environment
from oneround.site import Site
from oneround.training import Trainer

GROUPS = {
    "first convolution": ("_convolve",),
    "convolution and matrix product": ("gemm", "conv", "cutlass", "sm90", "sm80", "xmma", "cudnn", "wgrad", "dgrad", "fprop", "nhwc"),
    "batch norm, shortcut, rectifier": ("_sums", "_statistics", "_apply", "_gradient", "batch_norm"),
    "views": ("_views",),
    "optimiser and clipping": ("multi_tensor", "sgd", "norm_kernel", "lpnorm"),
}  # fmt: skip
"""Kernels by parts of their names; the first group that fits counts."""


def group_of(kernel: str) -> str:
    return next((group for group, parts in GROUPS.items() if any(part in kernel.lower() for part in parts)), "other")


def kernels_of_a_step(overrides: list[tuple[str, Any]], steps: int) -> dict[str, tuple[int, float]]:
    """Kernel → calls and microseconds, both per step."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4096, 3, 32, 32), dtype=torch.uint8, generator=random)
    data = dataset_from_arrays("noise", images, torch.arange(4096) % 10, images[:10], torch.arange(10))
    recipe = acts.resolve(load("fafi", [("model.encoder", "resnet18"), *overrides]), data)
    broadcast, site = acts.prepare(recipe, data.class_names, data.shape), Site("client", data.train, local=recipe.local)
    with site.arithmetic(broadcast.parameters, search=True):
        stepper = Trainer().bind(broadcast, site)
        stepper.begin_client(data.train.class_counts(10))
        stepper.begin_epoch(0, 1.0)
        size, device = stepper.full, site.device
        pixels, labels = (each.to(device)[:size] for each in (images, torch.arange(4096) % 10))
        numbers = torch.rand(size, COLUMNS, generator=random).to(device)
        with stepper.stream_context():
            for _ in range(6):
                stepper(pixels, labels, numbers, 0.01)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(steps):
                    stepper(pixels, labels, numbers, 0.01)
                torch.cuda.synchronize()
    calls, micros = Counter[str](), Counter[str]()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls[event.name] += 1
            micros[event.name] += event.device_time
    return {name: (round(calls[name] / steps), micros[name] / steps) for name, _ in micros.most_common()}


def timed(work: Any, repeats: int = 10) -> float:
    """Median microseconds."""
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2]


def convolutions(batch: int, rate: float) -> list[dict[str, Any]]:
    """Every convolution of a ResNet-18 at 32 pixels, by itself."""
    encoder, seen = build(load("fafi", [("model.encoder", "resnet18")]).encoder, 3, 10).encoder, Counter[Any]()

    def note(layer: nn.Conv2d, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        seen[tuple(inputs[0].shape[1:]), layer.out_channels, layer.kernel_size, layer.stride, layer.padding] += 1

    for layer in encoder.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(note)  # type: ignore[arg-type]
    encoder.eval()(torch.zeros(1, 3, 32, 32))
    rows = []
    for ((channels, height, width), outputs, kernel, stride, padding), count in seen.items():
        x = torch.randn(batch, channels, height, width, device="cuda", dtype=torch.bfloat16)
        x = x.contiguous(memory_format=torch.channels_last)
        weight = torch.randn(outputs, channels, *kernel, device="cuda", dtype=torch.bfloat16)
        weight = weight.contiguous(memory_format=torch.channels_last)
        y = torch.nn.functional.conv2d(x, weight, stride=stride, padding=padding)
        g = torch.randn_like(y)

        def backward(mask: list[bool], x=x, weight=weight, g=g, stride=stride, padding=padding) -> None:  # type: ignore[no-untyped-def]
            torch.ops.aten.convolution_backward(g, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, mask)

        flops = 2 * y.numel() * channels * kernel[0] * kernel[1]
        micros = {
            "forward": timed(lambda x=x, w=weight, s=stride, p=padding: torch.nn.functional.conv2d(x, w, stride=s, padding=p)),
            "inputs": timed(lambda backward=backward: backward([True, False, False])) if channels > 3 else 0.0,
            "weights": timed(lambda backward=backward: backward([False, True, False])),
        }  # fmt: skip
        shares = {way: flops / (1e-6 * each) / rate if each else 0.0 for way, each in micros.items()}
        rows.append({
            "shape": f"{channels}x{height}x{width} -> {outputs}, {kernel[0]}x{kernel[1]}/{stride[0]}", "count": count,
            "microseconds": micros, "share_of_matrix_product_rate": shares,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--top", type=int, default=45, help="kernels to print")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    torch.backends.cudnn.benchmark = True
    rate = matrix_product_rate(torch.device("cuda"), torch)
    rows = convolutions(1024, rate)
    for row in rows:
        each = "  ".join(
            f"{way} {row['microseconds'][way]:7.0f} µs {100 * row['share_of_matrix_product_rate'][way]:4.0f} %"
            for way in row["microseconds"]
        )
        print(f"{row['count']} x {row['shape']:32} {each}")
    alone = sum(row["count"] * sum(row["microseconds"].values()) for row in rows)
    kernels = kernels_of_a_step([parse_override(text) for text in options.sets], options.steps)
    for name, (calls, micros) in list(kernels.items())[: options.top]:
        print(f"{micros:8.0f} µs {calls:4} x  {group_of(name):12.12} {name[:150]}")
    groups = Counter[str]()
    for name, (_, micros) in kernels.items():
        groups[group_of(name)] += micros  # type: ignore[assignment]
    figures = {
        "microseconds_of_a_step": sum(groups.values()), "by_group": dict(groups.most_common()),
        "kernels_per_step": sum(calls for calls, _ in kernels.values()),
        "matrix_product_tflops": rate / 1e12, "convolutions_alone_microseconds": alone, "convolutions": rows,
        "kernels": {name[:200]: each for name, each in kernels.items()}, "environment": environment(torch.device("cuda")),
    }  # fmt: skip
    shown = (
        "microseconds_of_a_step",
        "by_group",
        "kernels_per_step",
        "matrix_product_tflops",
        "convolutions_alone_microseconds",
    )
    print(json.dumps({key: figures[key] for key in shown}, indent=1))
    if options.out:
        write_json(options.out, figures)


if __name__ == "__main__":
    main()
