"""The command line in processes of its own, forked from one that has loaded PyTorch: a test need not wait for that again."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from oneround.processes import forked_from, hidden_main

PATIENCE = 300  # seconds
SMALL = ["--set", "model.encoder.width=4", "--set", "local.workers=1", "--set", "training.batch_size=64"]
"""Options of a run that trains next to nothing."""


def oneround(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`oneround` with these words in a folder: its exit code and what it said."""
    with TemporaryDirectory() as output_dir, hidden_main():
        files = [Path(output_dir, name) for name in ("stdout", "stderr")]
        process = forked_from("oneround.cli").Process(
            target=_be, args=(words, cwd or Path.cwd(), {**os.environ}, files)
        )
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"oneround {' '.join(words)}: {files[1].read_text()}")
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text() for file in files))


def _be(words: Sequence[str], cwd: Path, environment: dict[str, str], files: Sequence[Path]) -> None:
    """What `python -m oneround.cli` does, once Python has started."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["oneround", *words]
    runpy.run_module("oneround.cli", run_name="__main__", alter_sys=True)


def good(*words: str, cwd: Path | None = None) -> str:
    """What it says when all is well, on one line."""
    done = oneround(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def bad(*words: str, code: int = 2, cwd: Path | None = None) -> str:
    """What it says when it cannot: one line on stderr, no traceback, nothing left behind."""
    done = oneround(*words, cwd=cwd)
    assert done.returncode == code, (done.stdout, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]
