"""The side of a Ray worker: trains clients on its node, in a folder of its own, and yields what the run's folder needs."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from oneround.data import Images
from oneround.errors import OneroundError, RunError
from oneround.files import write_durably
from oneround.runs.environment import device_name
from oneround.runs.folder import RunFolder
from oneround.simulate.workers import TrainJob, Worker
from oneround.site import choose_device

PREFIX = "oneround-ray-"
NEW = 60.0  # seconds
Message = tuple[str, Any]
"""`("event", an event)`, `("state", name → bytes)`, and last `("upload", bytes)` or `("error", a OneroundError)`."""


def versions() -> dict[str, str]:
    """Versions that must be the same at both ends."""
    return {"oneround": metadata.version("oneround"), "torch": torch.__version__}


class NodeWorker:
    """Trains one client after another on this node; keeps data, network and the last broadcast."""

    def __init__(self, pixels: Any, labels: Any) -> None:
        """`pixels`, `labels`: read-only arrays in the node's shared memory."""
        _remove_orphans()
        self._stack = ExitStack()
        self.folder = RunFolder(Path(tempfile.mkdtemp(prefix=PREFIX)))
        self._stack.callback(shutil.rmtree, self.folder.path, ignore_errors=True)
        self._stack.enter_context(self.folder.locked(patience=5))
        self.messages: SimpleQueue[Message | None] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1)  # one for all clients: PyTorch has settings and CUDA handles per thread
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nobody writes into the arrays: a client's samples are copied
            self.worker = Worker(Images(torch.from_numpy(pixels), torch.from_numpy(labels)), self._emit, None)
        self._sent: dict[str, int] = {}

    def device(self, name: str) -> str:
        return device_name(choose_device(name))

    def set_broadcast(self, raw: bytes) -> None:
        """The broadcast that the next clients train from."""
        write_durably(self.folder.broadcast, raw, flush=False)

    def train(self, job: TrainJob, states: Mapping[str, bytes], seconds: float | None) -> Iterator[Message]:
        """Train a client from these files of its state; `seconds`: the time that is left for it."""
        self.worker.deadline = None if seconds is None else time.time() + seconds  # clocks of two machines differ
        state, upload = self.folder.state(job.client), self.folder.upload(job.client)
        self._sent = {}
        for name, raw in states.items():
            write_durably(state / name, raw, flush=False)
            self._sent[name] = (state / name).stat().st_mtime_ns
        training = self._thread.submit(self._train, replace(job, folder=self.folder))
        training.add_done_callback(lambda _: self.messages.put(None))
        try:
            while (message := self.messages.get()) is not None:
                yield message
                if message[0] == "event":
                    yield from self._new_states(state)
            yield from self._new_states(state)
            try:
                training.result()
            except OneroundError as error:
                yield "error", error
            else:
                yield "upload", upload.read_bytes()
        finally:
            shutil.rmtree(state, ignore_errors=True)
            upload.unlink(missing_ok=True)

    def _train(self, job: TrainJob) -> str:
        return self.worker.train(job)()

    def _emit(self, event: dict[str, Any]) -> None:
        self.messages.put(("event", event))

    def _new_states(self, state: Path) -> Iterator[Message]:
        """The files of the client's state that were written since they were last looked at."""
        changed = {}
        for path in sorted(state.glob("*.safetensors")):
            version = path.stat().st_mtime_ns
            if self._sent.get(path.name) != version:
                self._sent[path.name] = version
                changed[path.name] = path.read_bytes()
        if changed:
            yield "state", changed

    def close(self) -> None:
        """Remove its folder."""
        self._thread.shutdown()
        self._stack.close()


def _remove_orphans() -> None:
    """Remove folders of workers that were killed: nobody holds their locks. One that is new may be about to be locked."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, RunError):
            if time.time() - path.stat().st_mtime > NEW:
                with RunFolder(path).locked():
                    shutil.rmtree(path, ignore_errors=True)
