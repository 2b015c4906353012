"""A site is who runs an act: its name, its data, a folder for its state, and how its machine works."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from oneround.data import Images
from oneround.errors import RecipeError, RunError
from oneround.parts import Strict
from oneround.recipe import Local

SMALL = 2_000_000  # parameters: below, one thread per client and clients side by side are fastest
BESIDE_A_GPU = 4  # threads: the CPU only adds and writes; more of them wait for each other where runs share a machine


class Masks(Protocol):
    """What a site masks its sums with (`sums.masks.Masker`)."""

    secrets: dict[str, bytes]

    def mask(self, sums: Any, context: str) -> Any: ...


@dataclass(frozen=True)
class Site:
    """A client or the server."""

    name: str
    data: Images | None = None
    """Its own images: a client's samples, the server's public ones."""
    folder: Path | None = None
    """Where state is kept between epochs; None: nothing is kept, a restart begins anew."""
    local: Local = field(default_factory=Local)
    told: Mapping[str, float] = field(default_factory=dict)
    """What a simulation tells it about the other sites while they train; nothing in a real federation."""
    deadline: float | None = None
    """When to stop between two epochs (`time.time()`), to go on later."""
    validation: Images | None = None
    """Images to choose by, never trained on: the server's, or held back by the clients of a simulation."""
    masker: Masks | None = field(default=None, repr=False)
    """What puts its sums under masks, where the recipe says so."""

    @property
    def device(self) -> torch.device:
        return choose_device(self.local.device)

    @property
    def bf16(self) -> bool:
        """Whether to train in bf16 autocast."""
        if self.local.precision == "auto":
            return self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        return self.local.precision == "bf16"

    def kept_for(self, options: Strict) -> Path:
        """The folder in which the server keeps what belongs to these options from round to round."""
        if self.folder is None:
            raise RunError(f"{self.name}: what is kept between rounds needs a folder; give this site one")
        return self.folder / "server" / hashlib.sha256(options.model_dump_json().encode()).hexdigest()[:8]

    @contextmanager
    def arithmetic(self, parameters: int, *, search: bool = False) -> Iterator[None]:
        """Threads and determinism for the length of an act on a network of that size; as before afterwards.

        `search`: let a GPU try every way to convolve first, which takes seconds and pays only where a network is trained.
        """
        before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        torch.set_num_threads(threads_per_client(self.local, parameters))
        if self.local.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = search and not self.local.deterministic
        try:
            yield
        finally:
            torch.set_num_threads(before[0])
            if self.local.deterministic:  # not for nothing: the call loads PyTorch's compiler, which takes a second
                torch.use_deterministic_algorithms(before[1])
            torch.backends.cudnn.benchmark = before[2]


def threads_per_client(local: Local, parameters: int) -> int:
    """CPU threads for a network of that many parameters; results are bit-equal for a fixed number."""
    if local.threads:
        return local.threads
    cores = os.cpu_count() or 1
    if choose_device(local.device).type != "cpu":
        return min(BESIDE_A_GPU, cores)
    return 1 if parameters < SMALL else cores


def choose_device(wanted: str) -> torch.device:
    """The device named in a recipe's local half; auto: a GPU when there is one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise RecipeError(f"local.device = {wanted}: unknown; use auto, cpu, mps, cuda or cuda:0") from None
    there = (
        torch.cuda.device_count()
        if device.type == "cuda"
        else int(device.type == "cpu" or torch.backends.mps.is_available())
    )
    if there == 0 or (device.index or 0) >= there:
        raise RecipeError(f"local.device = {wanted}: not on this machine ({there} of that kind); use auto or cpu")
    return device
