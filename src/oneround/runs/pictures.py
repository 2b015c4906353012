"""Pictures of a run: the partition, and accuracy over local training."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from oneround.data import Split
from oneround.errors import OneroundError
from oneround.files import write_durably

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LABELS = 30  # with more clients, a label for each cannot be read
LEGEND_WIDTH = 36  # characters; the name of a rule with its options can be long


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # here: importing it takes half a second

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=150)
    write_durably(path, content.getvalue())


def picture_file(path: Path, name: str) -> Path:
    """The file for a picture: `name` in a folder, .png without a suffix; OneroundError for an unknown format."""
    if path.is_dir():
        return path / name
    if not path.suffix:
        return path.with_name(f"{path.name}.png")
    formats = sorted(_figure(1, 1).canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        raise OneroundError(f"{path}: no picture format '{path.suffix[1:]}'; use one of {', '.join(formats)}")
    return path


def draw_partition(split: Split, class_names: Sequence[str], path: Path, title: str) -> None:
    """Class × client: circles whose area is the number of samples, with the numbers; a heat map for many clients."""
    clients, classes = split.counts.shape
    many = clients > MOST_LABELS
    figure = _figure(min(2.4 + 0.42 * classes, 40), 10.0 if many else 1.6 + 0.42 * clients)
    axes = figure.subplots()
    largest = max(int(split.counts.max()), 1)
    if many:
        counts = np.ma.masked_equal(split.counts, 0)
        shades = axes.imshow(
            counts, aspect="auto", interpolation="nearest", cmap="viridis_r", norm="log", vmin=1, vmax=largest
        )
        figure.colorbar(shades, label="samples (white: none)")
        axes.set(xlabel="class", ylabel=f"client ({min(split.sizes):,} to {max(split.sizes):,} samples)")
    else:
        client, label = np.nonzero(split.counts)
        count = split.counts[client, label]
        axes.scatter(label, client, s=420 * count / largest + 4, color="#3b6ea5", alpha=0.75, linewidths=0)
        for y, x, n in zip(client, label, count, strict=True) if clients * classes <= 600 else ():
            size = 6 if n > largest / 20 else 5
            axes.text(float(x), float(y), str(n), ha="center", va="center", fontsize=size, in_layout=False)
        names = [f"{number} ({size})" if size else f"{number} (empty)" for number, size in enumerate(split.sizes)]
        axes.set_yticks(range(clients), names, fontsize=7)
        axes.set(xlabel="class", ylabel="client (samples)", xlim=(-0.7, classes - 0.3), ylim=(clients - 0.3, -0.7))
    axes.set_xticks(
        range(classes),
        class_names if classes <= 50 else [str(label) for label in range(classes)],
        rotation=90 if classes > 10 else 30,
        fontsize=7,
    )
    axes.set_title(title, fontsize=9)
    _save(figure, path)


def draw_accuracy(
    curves: Mapping[str, Sequence[Mapping[int, float]]],
    path: Path,
    title: str,
    reference: Mapping[str, float] | None = None,
) -> None:
    """Accuracy over local epochs: for each rule a thick line for the mean and a thin one for each run."""
    figure = _figure(8.4, 4.2)
    axes = figure.subplots()
    for name, runs in curves.items():
        epochs = sorted(set.intersection(*(set(run) for run in runs)))
        mean = [100 * float(np.mean([run[epoch] for run in runs])) for epoch in epochs]
        (line,) = axes.plot(epochs, mean, marker="o", markersize=3, linewidth=2, label=fill(name, LEGEND_WIDTH))
        if len(runs) > 1:
            for run in runs:
                axes.plot(
                    epochs, [100 * run[epoch] for epoch in epochs], color=line.get_color(), linewidth=0.6, alpha=0.4
                )
    for name, value in (reference or {}).items():
        axes.axhline(100 * value, color="black", linestyle="--", linewidth=1, label=fill(name, LEGEND_WIDTH))
    axes.set(xlabel="local epochs before the one upload", ylabel="test accuracy, %", ylim=(0, 100))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    axes.set_title(title, fontsize=9)
    _save(figure, path)
