"""Small runs to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oneround.analysis.comparison import Group
from oneround.config.load import load
from oneround.data import Dataset
from oneround.simulate import run

SMALL: dict[str, Any] = {
    "model.encoder": {"kind": "cnn", "width": 4}, "training.batch_size": 64, "training.epochs": 2, "snapshots": 1, "partition.clients": 3,
    "partition.alpha": 0.3, "fusion": ["iffi", "average"], "local.workers": 1, "trace.every": 1,
}  # fmt: skip


def made(folder: Path, digits: Dataset, method: str, partition: int, seed: int = 1, **changes: Any) -> None:
    seeds = {"seeds.partition": partition, "seeds.initialisation": seed, "seeds.training": seed}
    given = {**SMALL, **seeds, **{key.replace("__", "."): value for key, value in changes.items()}}
    run(load(method, given.items()), folder / f"{method}-{partition}-{seed}-{len(list(folder.iterdir()))}", data=digits)


def make_grid(folder: Path, digits: Dataset) -> Path:
    """fafi and v9 on partitions 1 and 2, fafi twice on each."""
    for partition in (1, 2):
        made(folder, digits, "fafi", partition, 1)
        made(folder, digits, "fafi", partition, 2)
        made(folder, digits, "v9", partition, 1)
    return folder


def only(groups: list[Group]) -> Group:
    (group,) = groups
    return group
