"""What is printed while a run trains."""

from __future__ import annotations

import io

from rich.console import Console

from oneround.cli.progress import Live, SweepLive


def test_progress_tells_size_pace_and_snapshots_where_no_bar_is_drawn() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    with Live(console) as live:
        live.emit({"event": "plan", "lines": ["a run of 100 steps"], "steps": 100, "epochs": 10})
        live.emit({"event": "steps", "client": "a", "epoch": 1, "done": 2, "of": 10})
        live.started -= 60
        live.emit({"event": "epoch", "client": "a", "epoch": 1, "steps": 10})
        scored = {"event": "snapshot", "epoch": 1, "when": "epoch 1", "accuracy": {"iffi": 0.5, "average": 0.75}}
        for seconds, left in ((2, 9), (20, 0), (20, 9), (20, 8)):
            live.emit({"event": "scoring", "epoch": 1})
            assert live.bars.tasks[0].description == "scoring"
            live.emit({**scored, "seconds": seconds, "left": left})
            assert live.bars.tasks[0].description == "training"
    text = console.export_text()
    assert (
        text.count("scoring took") == 1 and "fusing and scoring took 20 s and is due 9 more times: about 3 min" in text
    )
    assert "a run of 100 steps" in text
    assert "about 11 min left" in text
    assert "epoch 1: average 75.0, iffi 50.0" in text


def test_a_sweep_has_a_line_for_every_cell_that_ends() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    with SweepLive(console) as live:
        live.emit({"event": "sweep", "cells": 3, "done": 1})
        live.emit({"event": "plan", "cell": "a", "lines": [], "steps": 10, "epochs": 1})
        live.emit({"event": "trouble", "cell": "a", "text": "λ is out of [range]"})
        live.emit({"event": "epoch", "cell": "a", "client": "client_000", "steps": 10})
        live.emit({"event": "cell", "name": "a", "state": "done", "accuracy": {"iffi": 0.5, "average": 0.75}})
        live.emit({"event": "cell", "name": "b", "state": "stopped"})
        live.emit({"event": "cell", "name": "b", "state": "failed", "text": "no data"})
    assert console.export_text().splitlines() == [
        "3 cells, 1 done already", "a: λ is out of [range]", "[2/3] a: average 75.0, iffi 50.0", "[2/3] b: no data",
    ]  # fmt: skip
