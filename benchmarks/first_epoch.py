"""What passes between the start of a process and the end of its first epoch over all clients, item by item.

    python benchmarks/first_epoch.py --data cifar10 --data-dir data --out results/first_epoch_h200.json

A run by the program's own `simulate.run`, stopped after the first epoch of its last client. Run it twice: on a machine just started
nothing is in the file cache and no kernel has been compiled.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import parser_of, write_json
from epoch_time import seconds_since_process_start

IMPORTS = ("torch", "oneround.simulate", "oneround.training.step")


def main() -> None:
    marks: list[tuple[str, float]] = [("the interpreter", seconds_since_process_start())]
    parser = parser_of(__doc__)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--preset", default="fafi")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def mark(name: str) -> None:
        marks.append((name, seconds_since_process_start()))

    import torch

    mark("import torch")
    from oneround import kernels
    from oneround.config.load import load
    from oneround.data import load_dataset
    from oneround.simulate import simulation
    from oneround.training import step

    mark("import oneround")
    recipe = load(options.preset, [
        ("data.kind", options.data), ("local.data_path", options.data_dir), ("model.encoder.kind", options.model),
        ("training.batch_size", options.batch_size), ("training.epochs", 1), ("fusion", ["iffi"]),
    ])  # fmt: skip
    data = load_dataset(recipe.data, recipe.local.data_path)
    mark("the images")
    make, call, steps = step.Stepper.__init__, step.Stepper.__call__, 0
    done: dict[str, float] = {}

    def timed_make(self: step.Stepper, *arguments: object, **named: object) -> None:
        mark("partition, broadcast, folder")
        make(self, *arguments, **named)  # type: ignore[arg-type]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        mark("the network and its buffers on the device")

    def timed_call(self: step.Stepper, *batch: object) -> None:
        nonlocal steps
        call(self, *batch)  # type: ignore[arg-type]
        steps += 1
        if steps <= 6:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            mark(f"step {steps}")

    def emit(event: dict[str, object]) -> None:
        if event["event"] == "epoch":
            name = str(event["client"])
            done[name] = seconds_since_process_start()
            mark(f"the first epoch of {name}")

    rehearse = kernels.rehearse

    def timed_rehearsal(work: Callable[[], None]) -> bool:
        done = rehearse(work)
        if done:
            mark("kernels compiled, libraries loaded, convolutions chosen")
        return done

    kernels.rehearse = timed_rehearsal
    step.Stepper.__init__, step.Stepper.__call__ = timed_make, timed_call  # type: ignore[assignment, method-assign]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        simulation.run(recipe, Path(folder) / "run", data=data, emit=emit)
        mark("uploads, fusion, scores, pictures")
    items: dict[str, float] = {}
    for (name, at), (_, before) in zip(marks, [("", 0.0), *marks], strict=False):
        items[name] = round(items.get(name, 0.0) + at - before, 3)
    figures = {
        "seconds_to_first_epoch": max(done.values()),
        "seconds_of_the_run": time.perf_counter() - started,
        "items": items,
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if options.out:
        from oneround.runs.environment import environment
        from oneround.site import choose_device

        write_json(options.out, {**figures, "environment": environment(choose_device("auto"))})


if __name__ == "__main__":
    main()
