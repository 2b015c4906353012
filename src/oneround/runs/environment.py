"""The environment of a run: versions, processor, device, commit."""

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
    """Versions, processor, device and commit, JSON-ready."""
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
    """$ONEROUND_COMMIT, or the commit of the checkout this package runs from, marked when files differ; else None.

    An installed package often lies inside somebody else's checkout (a virtual environment in a project's folder), whose commit says
    nothing about this code.
    """
    if "ONEROUND_COMMIT" in os.environ:
        return os.environ["ONEROUND_COMMIT"]
    try:
        if not _is_own_checkout():
            return None
        head, changed = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + "-dirty" * bool(changed)


def _is_own_checkout() -> bool:
    """Whether this file is src/oneround/… of the git checkout around it, and tracked there; git fails where it is not."""
    path = Path(__file__).resolve()
    root = Path(_git("rev-parse", "--show-toplevel")).resolve()
    return root / "src" / "oneround" in path.parents and bool(_git("ls-files", "--error-unmatch", str(path)))


def _git(*arguments: str) -> str:
    """Output of a git command in the checkout of this package; it takes no lock, so that it can be killed."""
    command = ["git", "--no-optional-locks", *arguments]
    output = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True
    ).stdout
    return output.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
