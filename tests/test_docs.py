"""The documentation is true: what it shows is executed."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import bad, good
from oneround.federate.sites import SiteFile
from oneround.finished import find_runs, keys_of
from oneround.reading import checked, load, merge, parse, read_yaml
from test_readme import BLOCK, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import tables

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_links_to_is_there(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_worked_example_of_a_new_weight(tmp_path: Path) -> None:
    found = BLOCK.findall((ROOT / "docs/adding-a-method.md").read_text(encoding="utf-8"))
    for _, title, code in found:
        if title:
            (tmp_path / title).write_text(code)
    assert {title for _, title, _ in found} >= {"my_weights.py", "ratio.yaml", "read_trace.py"}

    (command,) = [code.split() for kind, _, code in found if kind == "sh"]
    good(*command[1:], cwd=tmp_path)
    told = [json.loads(line) for line in (tmp_path / "runs/ratio/metrics.jsonl").read_text().splitlines()]
    weights = [event["lambda_raw"] for event in told if event["event"] == "epoch"]
    assert len(set(weights)) > 10 and min(weights) > 0 and max(weights) <= 20
    done = subprocess.run([sys.executable, "read_trace.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(weights)
    refused = bad("run", "ratio.yaml", "--set", "alignment.weight.share=lots", cwd=tmp_path)
    assert 'alignment.weight.share = "lots": must be a number' in refused
    guard = "alignment.guard={kind: clamp, most: 0.01}"
    good("run", "ratio.yaml", "--set", guard, "--out", "runs/held", cwd=tmp_path)
    told = [json.loads(line) for line in (tmp_path / "runs/held/metrics.jsonl").read_text().splitlines()]
    assert max(event["lambda_effective"] for event in told if event["event"] == "epoch") <= 0.01


def test_the_recorded_explosion_has_the_settings_of_the_example() -> None:
    spec = importlib.util.spec_from_file_location("explosion", ROOT / "examples/explosion.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for run in find_runs([ROOT / "results/digits_explosion.json"]):
        asked = keys_of(load(run.method, example.overrides(run.method, run.partition_seed).items()).plain())
        shared = (run.keys.keys() & asked.keys()) - {"training.augment.flip"}  # follows from the data
        assert len(shared) > 50 and {key: run.keys[key] for key in shared} == {key: asked[key] for key in shared}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_are_what_the_command_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, "run python benchmarks/tables.py"


def test_the_page_on_federation_shows_recipes_that_load() -> None:
    page = (ROOT / "docs/federation.md").read_text(encoding="utf-8")
    shown_files = {title: code for _, title, code in BLOCK.findall(page)}
    assert parse(merge(load("fafi").model_dump(mode="json"), _yaml(shown_files["lungs.yaml"]))).quorum == 2
    assert checked(SiteFile, _yaml(shown_files["hospital-b.yaml"])).labels == {"lung infection": "pneumonia"}


def _yaml(text: str) -> dict[str, Any]:
    return {key: value for key, value in read_yaml(text, "docs").items() if key != "extends"}
