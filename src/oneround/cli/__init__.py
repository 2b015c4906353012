"""The command line: a thin face over the rest."""

from __future__ import annotations

import sys

from rich.markup import escape

from oneround.cli import running as running
from oneround.cli import using as using
from oneround.cli.options import app, err
from oneround.errors import OneroundError


def main() -> None:
    """Entry point: an error a user can put right is one line and its exit code."""
    try:
        app()
    except OneroundError as error:
        for line in str(error).splitlines():
            err.print(f"[bold red]error:[/] {escape(line)}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
