"""The documentation is true: what it shows is executed."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import tables
from commands import bad, good
from oneround.cli.options import app
from oneround.config.load import checked, load, merge, parse, read_yaml
from oneround.federate.sites import SiteFile
from oneround.runs.archive import find_runs
from oneround.runs.record import keys_of
from test_readme import BLOCK, ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_links_to_is_there(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_picture_in_the_repository_is_one_that_a_page_shows() -> None:
    """What commands draw (`partition.png`) is nobody's to commit. Without git, the pictures below docs are looked at."""
    done = subprocess.run(["git", "ls-files", "*.png", "*.html"], cwd=ROOT, capture_output=True, text=True)
    below_docs = (str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.png"))
    names = list(below_docs) if done.returncode else done.stdout.splitlines()
    kept = [name for name in names if not name.startswith(("src/", "tests/"))]
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in ["README.md", *PAGES])
    assert kept and not [name for name in kept if name.removeprefix("docs/") not in text]


# --- the traces of the design page: "1. `file.py` · `name`, `Class.method` — what happens" -----------------------------

SOURCE = ROOT / "src/oneround"
TRACE = re.compile(r"^## (Trace: .+?)\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
STEP = re.compile(r"^\d+\. (.+?) — (.+?)(?=^\d+\. |^\n|\Z)", re.MULTILINE | re.DOTALL)


def traces() -> dict[str, list[tuple[str, list[str]]]]:
    """Title → for each step the file and the names in it."""
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    found = {}
    for title, text in TRACE.findall(page):
        ticked = [re.findall(r"`([^`]+)`", what) for what, _ in STEP.findall(text)]
        assert len(ticked) == len(re.findall(r"^\d+\. ", text, re.MULTILINE)), f"{title}: a step of another form"
        found[title] = [(path, names) for path, *names in ticked]
    return found


def defined_in(path: Path) -> set[str]:
    """Functions and classes of a module, and methods and fields of its classes as `Class.name`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if not isinstance(node, ast.ClassDef):
            continue
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(f"{node.name}.{inner.name}")
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                names.add(f"{node.name}.{inner.target.id}")
    return names


def test_the_traces_name_what_is_there() -> None:
    known = traces()
    assert len(known) == 3 and all(known.values())
    for title, steps in known.items():
        for file, names in steps:
            path = SOURCE / file
            assert path.is_file(), f"{title}: {file}"
            if path.suffix == ".py":
                assert names, f"{title}: {file} without a name"
                assert set(names) <= defined_in(path), f"{title}: {file} has no {set(names) - defined_in(path)}"


def test_a_method_is_read_in_five_files() -> None:
    assert len({file for file, _ in traces()["Trace: V9 from YAML to loss"]}) <= 5


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_are_there(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    for path in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page):
        assert (SOURCE / path).is_file() or (ROOT / path).is_file(), path


def test_the_layers_of_the_design_page_are_those_of_the_contract() -> None:
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    table = page.partition("## Layers")[2].partition("`methods/`")[0]
    rows = [
        re.findall(r"`([a-z_]+)(?:/|\.py)`", row.split("|")[1]) for row in re.findall(r"^\| `.+$", table, re.MULTILINE)
    ]
    (layers,) = re.findall(r"^layers = (\[.+?\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert rows == [layer.split(" | ") for layer in ast.literal_eval(layers)]


def test_the_worked_example_of_a_new_weight(tmp_path: Path) -> None:
    found = BLOCK.findall((ROOT / "docs/adding-a-method.md").read_text(encoding="utf-8"))
    for _, title, code in found:
        if title:
            (tmp_path / title).write_text(code)
    assert {title for _, title, _ in found} >= {"my_weights.py", "ratio.yaml", "my_fusion.py", "read_trace.py"}

    command, with_rule = (shlex.split(code) for kind, _, code in found if kind == "sh")
    good(*command[1:], cwd=tmp_path)
    assert "nearest-mean" in good(*with_rule[1:], cwd=tmp_path)
    hidden = bad(*with_rule[1:-1], "runs/hidden", "--set", "reveal.class_counts=false", cwd=tmp_path)
    assert "reveal.class_counts" in hidden and "nearest-mean" in hidden
    events = [json.loads(line) for line in (tmp_path / "runs/ratio/metrics.jsonl").read_text().splitlines()]
    weights = [event["lambda_raw"] for event in events if event["event"] == "epoch"]
    assert len(set(weights)) > 10 and min(weights) > 0 and max(weights) <= 20
    done = subprocess.run([sys.executable, "read_trace.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(weights)
    refused = bad("run", "ratio.yaml", "--set", "alignment.weight.share=lots", cwd=tmp_path)
    assert 'alignment.weight.share = "lots": must be a number' in refused
    guard = "alignment.guard={kind: clamp, most: 0.01}"
    good("run", "ratio.yaml", "--set", guard, "--out", "runs/held", cwd=tmp_path)
    events = [json.loads(line) for line in (tmp_path / "runs/held/metrics.jsonl").read_text().splitlines()]
    assert max(event["lambda_effective"] for event in events if event["event"] == "epoch") <= 0.01


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


# --- the page on scaling -----------------------------------------------------------------------------------------------

SMALL = {
    "model.encoder": {"kind": "cnn", "width": 4},
    "training.epochs": 1,
    "training.batch_size": 64,
    "fusion": ["iffi"],
}


def called(script: str, folder: Path, environment: dict[str, str]) -> Iterator[list[str]]:
    """The arguments with which a shell script calls oneround, each when the calls before it have been carried out."""
    for number, line in enumerate(script.splitlines()):
        if line.startswith("oneround "):
            shim = f"oneround() {{ printf '%s\\0' \"$@\" > {number}.call; }}\n"
            subprocess.run(["bash", "-euc", shim + line], cwd=folder, env={**os.environ, **environment}, check=True)
            yield (folder / f"{number}.call").read_text().split("\0")[:-1]


@pytest.mark.release
def test_the_commands_on_scaling_run(tmp_path: Path) -> None:
    """Those that need no cluster, in order; of the others, the options."""
    blocks = BLOCK.findall((ROOT / "docs/scaling.md").read_text(encoding="utf-8"))
    files = {title: code for _, title, code in blocks if title}
    sweep = _yaml(files["sweep.yaml"])
    assert sweep["set"] == {"data": "cifar10"}
    sweep |= {"partitions": "1-2", "set": {**SMALL, "data": "digits", "partition.clients": 2}}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    ran: list[str] = []
    for code in [code for kind, title, code in blocks if kind == "sh" and not title]:
        if "sbatch sweep.sbatch" in code:
            for task in range(1, 6):
                for words in called(files["sweep.sbatch"], tmp_path, {"SLURM_ARRAY_TASK_ID": str(task)}):
                    good(*words, cwd=tmp_path)
        for words in called(code, tmp_path, {}):
            command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
            command.make_context(words[0], words[1:])
            if "--ray" not in words:
                small = (
                    [*sets, "--set", "local.workers=1", "--set", "partition.clients=2"]
                    if words[0] in ("run", "sweep")
                    else []
                )
                shorter = [{"cifar10": "digits", "1-5": "1-2"}.get(word, word) for word in words]
                ran.append(good(*shorter, *small, cwd=tmp_path))
    merged = [text for text in ran if "added" in text]
    assert [text.split(":")[0] for text in merged] == ["4 run(s) in sweeps/all", "2 run(s) in all.json"]
    assert len(list((tmp_path / "sweeps" / "all").rglob("result.json"))) == 4


def _yaml(text: str) -> dict[str, Any]:
    return {key: value for key, value in read_yaml(text, "docs").items() if key != "extends"}
