"""Helpers of the scripts: the command line's parser, measurements in processes of their own, JSON files, Markdown tables."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def in_own_process(*arguments: str) -> Any:
    """Run the same script with other arguments; returns the JSON in the last line that it prints.

    Raises subprocess.CalledProcessError if it fails.
    """
    command = [sys.executable, sys.argv[0], *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Write a JSON file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


def markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown_head(heads: Sequence[str]) -> list[str]:
    """The first two lines of a table."""
    return [markdown_row(heads), "|---" * len(heads) + "|"]
