"""The kernels, interpreted on the CPU, against PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_kernels_compute_what_pytorch_does() -> None:
    script = Path(__file__).parent / "in_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert len(table) == 194
    for case, errors in table.items():
        limit = 6e-3 if "bfloat16" in case else 2e-4
        for name, error in errors.items():
            assert error < limit, (case, name, error)
