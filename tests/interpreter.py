"""Kernels interpreted on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def interpreted(module: str) -> dict[str, dict[str, float]]:
    """Case → largest errors of the kernels of a module against PyTorch."""
    script = Path(__file__).parent / "kernels" / "in_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(script), module]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    table: dict[str, dict[str, float]] = json.loads(done.stdout)
    return table
