"""Every `oneround …` command of the README runs, in order and in one working folder, on digits and with networks that train at once.

So do those of the README of version 0.1.0, as far as today's has others.

Real servers and clients (`federate server`, `client`, `keys`) are in federate/test_deployment.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import good

README = next(folder / "README.md" for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
BLOCK = re.compile(r"```(\w+)(?: title=(\S+))?\n(.*?)```", re.DOTALL)
BLOCKS = BLOCK.findall(README.read_text(encoding="utf-8"))

SMALL = ["model.encoder={kind: cnn, width: 4}", "training.epochs=1", "training.batch_size=64"]
HERE = ["local.workers=1"]  # train in the command's own process: starting others takes longer than training
FEATURES = "sums.features={kind: patches, size: 48, patch: 4}"
TEACHER = "{encoder: {kind: cnn, width: 6}, epochs: 1}"
ADAPTER = "{width: 4, heads: 2, layers: 1}"
OVERRIDES = {
    "demo": [*SMALL, *HERE],
    "run": [*SMALL, *HERE],
    "run ridge": [*HERE, FEATURES],
    "run routed": [*SMALL, *HERE, FEATURES],
    "run mergenet": [
        *SMALL,
        *HERE,
        "rounds=3",
        "training.schedule=constant",
        "training.milestones=[]",
        f"fusion=[{{kind: mergenet, teacher: {TEACHER}, adapter: {ADAPTER}}}, average]",
    ],
    "sweep": [*SMALL, "partition.clients=3", "fusion=[iffi]", "trace.every=0"],
    "federate local": [*SMALL, "partition.clients=2"],
}
"""`--set` by command and, where that matters, by its first argument."""
SHORTER = {"cifar10": "digits", "1-5": "1-2"}
OPTIONS = {"demo": ["--partitions", "1"]}
FILES = {
    "run": ["result.json", "model/manifest.json"],
    "fuse runs/x --rule typicality-gated": ["runs/x/fused/typicality-gated/manifest.json"],
    "export": ["model.onnx"],
    "partition": ["partition.png"],
    "sweep": [f"sweeps/a/{method}_alpha={alpha}" for method in ("v4", "v7", "v9") for alpha in (0.05, 0.5)],
    "compare sweeps/a --keep a.json": ["a.json"],
    "report": ["report.html"],
}
"""What a command leaves behind; for `run` within its run folder."""


def commands_of(blocks: list[tuple[str, str, str]]) -> list[str]:
    """`oneround …` lines of the shell blocks, in order; `make demo` is `oneround demo`."""
    lines = [line for language, _, code in blocks if language == "sh" for line in code.splitlines()]
    lines = ["oneround demo" if line.startswith("make demo  ") else line for line in lines]
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.startswith("oneround ")]


def words_of(line: str) -> list[str]:
    """Arguments of a command as the README has it: a line whose quotes are gone has one argument with spaces at most."""
    command, _, override = line.removeprefix("oneround ").partition(" --set ")
    return [*command.split(), *(["--set", override] if override else [])]


def shortened(words: list[str]) -> list[str]:
    """The same command with less to do."""
    two, one = " ".join(words[:2]), words[0]
    overrides = OVERRIDES.get(two, OVERRIDES.get(one, []))
    sets = [word for override in overrides for word in ("--set", override)]
    return [*(SHORTER.get(word, word) for word in words), *OPTIONS.get(one, []), *sets]


COMMANDS = commands_of(BLOCKS)
OLD = Path(__file__).parent / "compat" / "readme.md"
OLD_COMMANDS = commands_of(BLOCK.findall(OLD.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all of them run: with the plug-in that the README shows and a picture to recognise."""
    folder = tmp_path_factory.mktemp("readme")
    for _, title, code in BLOCKS:
        if title:
            (folder / title).write_text(code, encoding="utf-8")
    Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(folder / "photo.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.3")  # Flower looks often for work
        yield folder


LONG = ("oneround federate local",)  # test_deployment.py has the same processes


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.release if line.startswith(LONG) else ())
        for line in dict.fromkeys([*COMMANDS, *OLD_COMMANDS])
    ],
)
def test_a_command_of_the_readme(line: str, folder: Path) -> None:
    words = words_of(line)
    before = set((folder / "runs").glob("*"))
    output = good(*shortened(words), cwd=folder)
    assert output
    expected = FILES.get(" ".join(words), FILES.get(words[0], []))
    if words[0] == "run":
        (run,) = set((folder / "runs").glob("*")) - before
        expected = [f"{run.relative_to(folder)}/{name}" for name in expected]
    for name in expected:
        assert (folder / name).exists(), f"{name}: {output}"


def test_a_sweep_goes_on_when_its_command_is_repeated(folder: Path) -> None:
    (line,) = [line for line in COMMANDS if line.startswith("oneround sweep ")]
    results = {path: path.read_bytes() for path in (folder / "sweeps").rglob("result.json")}
    assert len(results) == 12, "three methods, two α, two partitions"
    good(*shortened(words_of(line)), cwd=folder)
    assert {path: path.read_bytes() for path in (folder / "sweeps").rglob("result.json")} == results


def test_a_recipe_of_a_run_repeats_it(folder: Path) -> None:
    good("run", "runs/x/recipe.yaml", "--out", "runs/again", cwd=folder)
    one, other = ((folder / name / "result.json").read_bytes() for name in ("runs/x", "runs/again"))
    assert one == other


def test_the_recipe_of_the_readme_runs(folder: Path) -> None:
    (recipe,) = [code for language, _, code in BLOCKS if language == "yaml"]
    (folder / "mine.yaml").write_text(recipe.replace("cifar10", "digits"), encoding="utf-8")
    output = good(
        "run", "mine.yaml", *(word for override in [*SMALL, *HERE] for word in ("--set", override)), cwd=folder
    )
    assert "typicality-gated" in output and "shards" in output


def listed(*command: str) -> list[str]:
    """Commands that `--help` lists."""
    page = good(*command, "--help").partition("─ Commands ─")[2]
    return re.findall(r"│ ([a-z]+) +[A-Z]", page)


def test_every_command_is_shown_or_explains_itself() -> None:
    commands = listed()
    assert len(commands) == 15 and {"run", "federate"} <= set(commands)
    shown = {words_of(line)[0] for line in COMMANDS}
    assert {"demo", "run", "fuse", "evaluate", "predict", "export", "sweep", "compare", "diagnose", "report"} <= shown
    for command in sorted(set(commands) - shown):
        assert "Usage:" in good(command, "--help"), command
    nested = listed("federate")
    assert sorted(nested) == ["client", "keys", "local", "server"]
    for command in nested:
        assert "Usage:" in good("federate", command, "--help"), command
