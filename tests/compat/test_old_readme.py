"""What the README of version 0.1.0 showed works today. Its commands are in test_readme_commands.py, with those of today."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from commands import SMALL, good
from oneround.config.load import load
from test_readme_commands import BLOCK, OLD, OLD_COMMANDS

BLOCKS = BLOCK.findall(OLD.read_text(encoding="utf-8"))


def test_the_commands_are_there() -> None:
    assert len(OLD_COMMANDS) == 22
    assert {line.split()[1] for line in OLD_COMMANDS} >= {"run", "fuse", "sweep", "compare", "federate", "methods"}


def test_its_recipe_loads(tmp_path: Path) -> None:
    (recipe,) = [code for language, _, code in BLOCKS if language == "yaml"]
    (tmp_path / "mine.yaml").write_text(recipe)
    assert load(tmp_path / "mine.yaml").partition.label == "shards clients=10 labels_per_client=2"


def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = "\n".join(code for language, title, code in BLOCKS if language == "python" and not title)
    assert "oneround.settle" in script
    in_process = script.replace('("training.epochs", 2)', '("training.epochs", 2), ("local.workers", 1)')
    assert in_process != script
    (tmp_path / "script.py").write_text(in_process)
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path("script.py")
    assert "iffi" in capsys.readouterr().out and names["model"].class_names == names["data"].class_names


def test_its_plugin_works(tmp_path: Path) -> None:
    ((title, code),) = [(title, code) for language, title, code in BLOCKS if language == "python" and title]
    (tmp_path / title).write_text(code)
    (line,) = [line for line in OLD_COMMANDS if "my_rules" in line]
    words = line.removeprefix("oneround ").partition(" --set ")
    output = good(*words[0].split(), "--set", words[2], "--epochs", "1", "--out", "x", *SMALL, cwd=tmp_path)
    assert "loudest" in output
    assert "loudest" in good("evaluate", "x", cwd=tmp_path)
