"""The states of clients that wait for their turn: on the device while there is room, and on disk from time to time.

A worker whose clients take turns would otherwise write a state, check it and read it again at every turn. The files are what survives a
kill: epochs since the last one are trained again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oneround.protocol import blob
from oneround.training.copies import copies, fetched
from oneround.training.step import unrecorded

SHARE_OF_DEVICE = 0.25
"""Of the device's memory for the states of idle clients; the oldest leave it first."""


class State(NamedTuple):
    """What a client continues from."""

    manifest: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def write_state(path: Path, state: State) -> None:
    """Replace the file; it survives a kill of the program."""
    with unrecorded:
        tensors = fetched(state.tensors)
    blob.write(path, "state", tensors, state.manifest, flush=False)


class IdleStates:
    """Copies of states by file, for several threads; a thread of its own writes them."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._kept: dict[Path, State] = {}
        self._unwritten: set[Path] = set()
        self._written_at: dict[Path, float] = {}
        self._writing: dict[Path, Future[None]] = {}
        self._begun = time.monotonic()
        self._lock = threading.RLock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="states")

    @classmethod
    def on(cls, device: torch.device) -> IdleStates | None:
        """For a GPU; elsewhere states go to the file at once."""
        if device.type != "cuda":
            return None
        return cls(int(SHARE_OF_DEVICE * torch.cuda.get_device_properties(device).total_memory))

    def keep(self, path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], seconds: float) -> None:
        """Copy a state, and have it written if the last file is older than `seconds`; OSError if an earlier one could not be."""
        state = State(dict(manifest), copies(tensors))
        with self._lock:
            self._drop(path)
            self._kept[path] = state
            self._unwritten.add(path)
            if time.monotonic() - self._written_at.get(path, self._begun) >= seconds:
                self._write(path)
            while len(self._kept) > 1 and sum(each.bytes for each in self._kept.values()) > self.most_bytes:
                oldest = next(iter(self._kept))
                self._write(oldest)
                self._wait(oldest)
                del self._kept[oldest]

    def get(self, path: Path) -> State | None:
        """The copy of a state, if it is here; the file is whole otherwise."""
        with self._lock:
            if path not in self._kept:
                self._wait(path)
            return self._kept.get(path)

    def forget(self, path: Path) -> None:
        """A state that nobody continues from."""
        with self._lock:
            self._drop(path)

    def settle(self) -> None:
        """Wait until every state is on disk; OSError if one cannot be written."""
        with self._lock:
            for path in list(self._unwritten):
                self._write(path)
            for path in list(self._writing):
                self._wait(path)

    def close(self) -> None:
        """Write what waits to be written, and free the copies."""
        try:
            self.settle()
        finally:
            self._kept.clear()
            self._writer.shutdown()

    def _write(self, path: Path) -> None:
        if path in self._unwritten:
            self._unwritten.remove(path)
            self._written_at[path] = time.monotonic()
            self._writing[path] = self._writer.submit(write_state, path, self._kept[path])

    def _drop(self, path: Path) -> None:
        self._kept.pop(path, None)
        self._unwritten.discard(path)
        writing = self._writing.get(path)
        if writing is not None and writing.cancel():
            del self._writing[path]
        else:
            self._wait(path)

    def _wait(self, path: Path) -> None:
        writing = self._writing.pop(path, None)
        if writing is not None:
            writing.result()
