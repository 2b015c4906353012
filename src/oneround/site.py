"""A site runs an act: its name, its data, a folder for its state and its machine's settings."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from oneround.config.parts import Strict
from oneround.config.recipe import Local
from oneround.data import Images
from oneround.errors import RecipeError, RunError
from oneround.session import ScoringSession

SMALL_NETWORK = 2_000_000  # parameters; below this, one thread per client with clients in parallel is fastest
GPU_HOST_THREADS = 4  # CPU threads of a run on a GPU: more would only compete with other runs on the machine


class Masks(Protocol):
    """Masks a site's sums (`privacy.masks.Masker`)."""

    secrets: dict[str, bytes]

    def mask(self, sums: Any, context: str) -> Any: ...


@dataclass(frozen=True)
class Site:
    """A client or the server."""

    name: str
    data: Images | None = None
    """Its own images: a client's samples, the server's public ones."""
    folder: Path | None = None
    """Folder of the state between epochs; None: no state is kept, and a restart starts over."""
    local: Local = field(default_factory=Local)
    consensus: float = 1.0
    """Spread of the clients' prototypes relative to the first epoch: known in a simulation, 1 in a real federation."""
    deadline: float | None = None
    """When to stop between two epochs (`time.time()`); a later call resumes."""
    validation: Images | None = None
    """Images for model selection, never trained on: the server's, or held out by the clients of a simulation."""
    masker: Masks | None = field(default=None, repr=False)
    """Masks its sums, where the recipe asks for it."""
    emit: Callable[[dict[str, Any]], None] = field(default=lambda event: None, repr=False, compare=False)
    """Takes events of work at this site that lasts: what a fusion rule has done of it."""
    session: ScoringSession = field(default_factory=ScoringSession, repr=False, compare=False)
    """Values that scoring at this site has already computed."""

    def __post_init__(self) -> None:
        if self.folder is not None:  # a plain string is accepted
            object.__setattr__(self, "folder", Path(self.folder))

    @property
    def device(self) -> torch.device:
        return choose_device(self.local.device)

    @property
    def bf16(self) -> bool:
        """Whether to train in bf16 autocast."""
        if self.local.precision == "auto":
            return self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        return self.local.precision == "bf16"

    def state_folder(self, options: Strict) -> Path:
        """The folder of the state that the server keeps for these options from round to round."""
        if self.folder is None:
            raise RunError(f"{self.name}: state between rounds needs a folder; give this site one")
        return self.folder / "server" / hashlib.sha256(options.model_dump_json().encode()).hexdigest()[:8]

    @contextmanager
    def arithmetic(self, parameters: int) -> Iterator[None]:
        """Set threads and determinism for one act on a network of that size, and restore them afterwards."""
        settings = Arithmetic(threads_per_client(self.local, parameters), self.local.deterministic)
        with _arithmetic.set_to(settings):
            yield


class Arithmetic(NamedTuple):
    """Settings of the whole process that an act needs."""

    threads: int
    deterministic: bool

    @classmethod
    def current(cls) -> Arithmetic:
        return cls(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())

    def apply(self) -> None:
        torch.set_num_threads(self.threads)
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if self.deterministic != torch.are_deterministic_algorithms_enabled():  # loads PyTorch's compiler
            torch.use_deterministic_algorithms(self.deterministic)


class _Acts:
    """The settings of the acts that run, in several threads or one within another: the last to begin decides."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Arithmetic] = []
        self._before: Arithmetic | None = None

    @contextmanager
    def set_to(self, settings: Arithmetic) -> Iterator[None]:
        with self._lock:
            if not self._running:
                self._before = Arithmetic.current()
            self._running.append(settings)
            settings.apply()
        try:
            yield
        finally:
            with self._lock:
                del self._running[len(self._running) - 1 - self._running[::-1].index(settings)]
                restored = self._running[-1] if self._running else self._before
                assert restored is not None
                restored.apply()


_arithmetic = _Acts()


def threads_per_client(local: Local, parameters: int) -> int:
    """CPU threads for a network of that many parameters; results are bit-equal for a fixed number."""
    if local.threads:
        return local.threads
    cores = os.cpu_count() or 1
    if choose_device(local.device).type != "cpu":
        return min(GPU_HOST_THREADS, cores)
    return 1 if parameters < SMALL_NETWORK else cores


def num_workers(local: Local, parameters: int, clients: int) -> int:
    """Number of clients to train at once."""
    if choose_device(local.device).type != "cpu":
        return 1
    cores = os.cpu_count() or 1
    return min(clients, local.workers or max(1, cores // threads_per_client(local, parameters)))


def choose_device(name: str) -> torch.device:
    """The device named in a recipe's local half; auto: a GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"local.device = {name}: unknown; use auto, cpu, mps, cuda or cuda:0") from None
    available = (
        torch.cuda.device_count()
        if device.type == "cuda"
        else int(device.type == "cpu" or torch.backends.mps.is_available())
    )
    if available == 0 or (device.index or 0) >= available:
        raise RecipeError(f"local.device = {name}: not on this machine ({available} of that kind); use auto or cpu")
    return device
