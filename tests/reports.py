"""An HTML page taken apart, and runs to report on."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

from oneround.config.load import load
from oneround.data import Dataset, dataset_from_arrays
from oneround.simulate import run

HOSTILE = "<script>alert(1)</script>"


VOID = {"meta", "link"}


class Page(HTMLParser):
    """An HTML file taken apart; refuses one whose elements do not close as they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.cell = False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.cell = True

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.cell:
            self.tables[-1][-1][-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def rows(self, *starts: str) -> list[list[str]]:
        """Table rows that begin like this."""
        return [row for table in self.tables for row in table if row[: len(starts)] == list(starts)]

    def row(self, *starts: str) -> list[str]:
        rows = self.rows(*starts)
        assert rows, starts
        return rows[0]


def make_run(run_dir: Path, digits: Dataset) -> Path:
    """A real run with λ, three clients and three snapshots, whose first class has a hostile name."""
    train, test = digits.train, digits.test
    data = dataset_from_arrays(
        "arrays", train.pixels.numpy().transpose(0, 2, 3, 1)[:400], train.labels.numpy()[:400],
        test.pixels.numpy().transpose(0, 2, 3, 1)[:100], test.labels.numpy()[:100], class_names=(HOSTILE, *map(str, range(1, 10))),
    )  # fmt: skip
    changes = {
        "data": "arrays", "model.encoder": {"kind": "cnn", "width": 4}, "partition.clients": 3, "partition.alpha": 0.3,
        "training.epochs": 3, "training.batch_size": 64, "snapshots": 1, "trace.every": 1,
        "fusion": ["iffi", "average", "typicality-gated"], "local.workers": 1,
    }  # fmt: skip
    run(load("v12", changes.items()), run_dir, data=data)
    return run_dir


def copy_of(source: Path, run_dir: Path, method: str, partition: int, gain: float = 0.0) -> Path:
    """The same run under another name, on another partition, a little better."""
    shutil.copytree(source, run_dir)
    recipe = (run_dir / "recipe.yaml").read_text()
    (run_dir / "recipe.yaml").write_text(
        recipe.replace("method: etf-attenuated", f"method: {method}").replace("partition: 1\n", f"partition: {partition}\n")
    )  # fmt: skip
    result = json.loads((run_dir / "result.json").read_text())
    result["partition"] = f"{partition:064d}"
    for each in result["rules"].values():
        each["accuracy"] += gain
    (run_dir / "result.json").write_text(json.dumps(result))
    return run_dir


def make_sweep(folder: Path, source: Path) -> Path:
    """Two methods on four partitions; the second is better by about five points, every time."""
    for partition in range(1, 5):
        copy_of(source, folder / f"a{partition}", "plain", partition, 0.001 * partition)
        copy_of(source, folder / f"b{partition}", "better", partition, 0.05 + 0.002 * partition)
    return folder
