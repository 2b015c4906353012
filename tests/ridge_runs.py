"""Runs that train nothing, and commands on them."""

from __future__ import annotations

from typer.testing import CliRunner

from oneround.cli.options import app

SMALL = [("sums.features", {"kind": "patches", "size": 96, "patch": 4}), ("local.workers", 1), ("partition.clients", 4)]


def oneround(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output
