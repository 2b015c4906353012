"""report writes one file."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from oneround.cli import app
from reports import Page


def test_the_command_writes_the_file(reported_run: Path, here: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(reported_run)])
    assert done.exit_code == 0, done.output
    assert Page((here / "report.html").read_text(encoding="utf-8")).count("h1") == 1
    assert CliRunner().invoke(app, ["report", str(reported_run), "--out", str(here)]).exit_code == 0


def test_a_path_with_brackets_is_printed_as_it_is(reported_run: Path, here: Path) -> None:
    """Rich takes words in brackets for markup."""
    done = CliRunner().invoke(app, ["report", str(reported_run), "--out", "[a].html"])
    assert done.output.startswith("written to [a].html (") and (here / "[a].html").is_file()
