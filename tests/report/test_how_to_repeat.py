"""The command a report names gives the same recipe."""

from __future__ import annotations

from pathlib import Path

from oneround.config.load import load, read_yaml
from oneround.report import report
from oneround.report.how_to_repeat import command
from oneround.runs.record import RunRecord
from reports import Page


def test_the_command_gives_the_same_recipe(reported_run: Path) -> None:
    recipe = load("v12", [("training.epochs", 7), ("alignment.weight.rate", 0.2), ("fusion", ["iffi", "average"])])
    line = command(recipe)
    assert line is not None
    assert line.startswith("oneround run etf-attenuated --set")
    assert "training.epochs=7" in line
    assert command(load("v12", [("method", "mine")])) is None
    page = Page(report([reported_run]))
    shown = next(text for text in page.texts if text.startswith("method: etf-attenuated"))
    assert read_yaml(shown, "recipe") == RunRecord.read(reported_run).recipe.plain()
