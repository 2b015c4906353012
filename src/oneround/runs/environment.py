"""The environment of a run: versions, processor, device, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("oneround", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "pydantic", "flwr")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor, device and commit, JSON-ready."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device_name(device),
        "packages": dict(_versions()),
        "commit": commit() if "ONEROUND_COMMIT" in os.environ else _commit_at_first(),
    }


@cache
def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@cache
def _commit_at_first() -> str | None:
    """The commit when it was first asked for: later changes of the files are no part of what this process runs."""
    return commit()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} ({os.cpu_count()} cores)" if device.type == "cpu" else device.type


def commit() -> str | None:
    """$ONEROUND_COMMIT, or the commit of the checkout that contains this package, with `-dirty` if files differ; None if there is none.

    An installed package often lies inside another checkout (a virtual environment in a project's folder), whose commit does not
    identify this code.
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
    """Whether this file is a tracked src/oneround/… of the git checkout around it; git fails if it is not tracked."""
    path = Path(__file__).resolve()
    root = Path(_git("rev-parse", "--show-toplevel")).resolve()
    return root / "src" / "oneround" in path.parents and bool(_git("ls-files", "--error-unmatch", str(path)))


def _git(*arguments: str) -> str:
    """Output of a git command in the folder of this package; it takes no lock, so that it can be killed."""
    command, folder = ["git", "--no-optional-locks", *arguments], Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
