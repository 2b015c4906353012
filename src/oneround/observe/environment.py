"""What a run ran on: versions, processor, device."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("oneround", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "pydantic", "flwr")


def environment(device: torch.device) -> dict[str, Any]:
    """Enough to explain a number later."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device_name(device),
        "packages": versions,
        "commit": commit(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} ({os.cpu_count()} cores)" if device.type == "cpu" else device.type


def commit() -> str | None:
    """$ONEROUND_COMMIT, or the commit of the checkout this package runs from, marked when files differ."""
    if "ONEROUND_COMMIT" in os.environ:
        return os.environ["ONEROUND_COMMIT"]
    try:
        known, changed = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return known + "-dirty" * bool(changed)


def _git(*words: str) -> str:
    """What git says of the checkout this package lies in; it takes no lock there, so that it can be killed."""
    asked = ["git", "--no-optional-locks", *words]
    told = subprocess.run(
        asked, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True
    ).stdout
    return told.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
