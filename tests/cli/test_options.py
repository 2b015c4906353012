"""Options: their help, and those that would do nothing."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from commands import bad
from oneround.cli import app
from oneround.cli.options import make_recipe


def test_help_says_what_arguments_are() -> None:
    for command, words in (("run", "A preset (see oneround methods), a recipe file"), ("export", "Where to write it")):
        output = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert words in " ".join(output.split()), command


def test_options_that_would_do_nothing_are_refused(finished: Path) -> None:
    for words in (["--set", "beta=2"], ["--out", "somewhere"]):
        assert "--set and --out are for one rule; name it with --rule" in bad("fuse", str(finished), *words)
    assert "5-1 is no range of 1 to 1,000 seeds" in bad("sweep", "v4", "--partitions", "5-1")
    assert "1-100000000 is no range" in bad("sweep", "v4", "--partitions", "1-100000000")
    assert "--minutes nan: must be a number above 0" in bad("sweep", "v4", "--minutes", "nan")


def test_epochs_are_those_of_the_only_network() -> None:
    alone, both = (make_recipe(name, epochs=7) for name in ("generated", "generated+routed"))
    assert alone.generator and both.generator and (alone.epochs, both.epochs) == (7, 7 + both.generator.epochs)
    assert make_recipe("generated", epochs=7, sets=["generator.epochs=9"]).epochs == 9
