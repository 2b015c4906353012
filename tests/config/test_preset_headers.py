"""Every preset opens with the command that runs it, where it comes from, and a figure that is what the record says."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import oneround.cli  # noqa: F401 — registers the commands
from oneround.analysis.statistics import Summary
from oneround.cli.options import app
from oneround.config.load import load, read_yaml
from oneround.runs.archive import find_runs
from oneround.runs.record import keys_of

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "src/oneround/methods").glob("*.yaml"))
MEASURED = re.compile(
    r"^# Measured: (?P<rule>\S.*?) (?P<mean>[\d.]+)(?: ± (?P<margin>[\d.]+))? % on (?P<data>\S+) at alpha (?P<alpha>[\d.]+), "
    r"(?:partitions?|seeds?) (?P<seeds>\d+(?:, \d+)*), (?P<device>.+): (?P<file>results/\S+\.json)$",
    re.MULTILINE,
)
NOT_YET = "# Measured: not measured yet"
CELLS = {
    "fedavg": "fedavg", "fedavg+taught": "taught", "mergenet": "fused", "mergenet-single": "single",
    "ridge": "fafi", "routed": "fafi", "routed-ce": "cross-entropy", "routed-entropy": "entropy-λ",
}  # fmt: skip
"""What a benchmark's record calls a preset: a method, or how the experts beside the ridge are trained."""


@dataclass(frozen=True)
class Recorded:
    """Accuracy of one preset under one fusion rule."""

    data: str
    device: str
    percent: dict[int, float]
    """By seed of the partition."""


def recorded(preset: str, file: Path, rule: str, alpha: float) -> Recorded:
    """What a record has of a preset as it stands: variants of it in the same record do not count."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if "cells" in content:
        return _of_cells(content, CELLS[preset], rule, alpha)
    own = {
        key: value
        for key, value in keys_of(load(preset).plain()).items()
        if key.startswith(("objective.", "alignment."))
    }
    runs = [
        run
        for run in find_runs([file])
        if (run.method, run.keys.get("partition.alpha")) == (preset, alpha)
        and all(run.keys.get(key, value) == value for key, value in own.items())
    ]
    (data,) = {str(run.keys["data.kind"]) for run in runs}
    (device,) = {str(run.measured_on["device"]) for run in runs}
    return Recorded(data, device, {run.partition_seed: 100 * run.accuracy[rule] for run in runs})


def _of_cells(content: dict[str, Any], name: str, rule: str, alpha: float) -> Recorded:
    cells = [
        cell
        for cell in content["cells"]
        if cell["alpha"] == alpha and name in (cell.get("experts"), cell.get("method"))
    ]
    percent = {}
    for cell in cells:
        assert "rules" in cell or rule == "average", "benchmarks/mergenet.py records the last average"
        value = cell["rules"][rule] if "rules" in cell else cell["accuracy"]
        percent[cell["partition"] if "partition" in cell else cell["seed"]] = 100 * value
    return Recorded(content["data"], content["environment"]["device"], percent)


def header(path: Path) -> str:
    """The comment a preset begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def preset_about(path: Path) -> dict[str, str]:
    about: dict[str, str] = read_yaml(path.read_text(encoding="utf-8"), path.name)["about"]
    return about


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_header_of_a_preset(path: Path) -> None:
    text = header(path)
    command, _, rest = text.partition("\n")
    words = shlex.split(command.removeprefix("# "))
    assert words == ["oneround", "demo"] if path.stem == "demo" else words[:3] == ["oneround", "run", path.stem]
    assert re.search(r"^# Origin: \S.+", rest, re.MULTILINE), "say where it comes from: # Origin: …"
    assert (NOT_YET in rest) != bool(MEASURED.search(rest)), "one line: # Measured: …, or not measured yet"
    assert text.count("# Measured:") == 1
    about = preset_about(path)
    assert about.get("idea") and about.get("formula"), "about: say the idea and the formula"


@pytest.mark.parametrize("path", [path for path in PRESETS if NOT_YET not in header(path)], ids=lambda path: path.stem)
def test_the_quoted_figure_is_what_the_record_says(path: Path) -> None:
    quoted = MEASURED.search(header(path))
    assert quoted is not None
    rule, alpha = quoted["rule"], float(quoted["alpha"])
    assert rule in [part.label for part in load(path.stem).fusion]
    known = recorded(path.stem, ROOT / quoted["file"], rule, alpha)
    seeds = [int(seed) for seed in quoted["seeds"].split(", ")]
    assert (quoted["data"], quoted["device"], seeds) == (known.data, known.device, sorted(known.percent))
    summary = Summary(tuple(known.percent.values()))
    margin = None if summary.margin is None else f"{summary.margin:.1f}"
    assert (quoted["mean"], quoted["margin"]) == (f"{summary.mean:.1f}", margin)


@pytest.mark.parametrize("path", [path for path in PRESETS if path.stem != "demo"], ids=lambda path: path.stem)
def test_the_command_names_options_that_exist(path: Path) -> None:
    """`--help` behind them: they are read, nothing runs."""
    words = shlex.split(header(path).splitlines()[0].removeprefix("# "))
    done = CliRunner().invoke(app, [*words[1:], "--help"])
    assert done.exit_code == 0, done.output
    sets = [words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "--set"]
    load(path.stem, [(key, json.loads(value) if value[0].isdigit() else value) for key, value in sets])
