"""Who does the work of training: this process, or several beside it, each training one client at a time.

On a CPU, small networks train fastest one thread per client and clients side by side; on a GPU clients take turns in this
process. What a client computes does not depend on which: its randomness is its own and its threads are fixed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneround.acts import train
from oneround.data import Images
from oneround.learning import Emit, silent
from oneround.parts import load_plugin
from oneround.protocol import Broadcast
from oneround.recipe import Local
from oneround.site import Site, choose_device, threads_per_client
from oneround.sums.masks import simulated


@dataclass(frozen=True)
class Job:
    """Train one client to the end of an epoch and write its upload."""

    client: str
    samples: NDArray[np.int64]
    """Which samples of the crew's data it holds."""
    broadcast: Path
    upload: Path
    state: Path
    until: int
    local: Local
    told: Mapping[str, float]
    """What the simulation tells the client about the others."""
    deadline: float | None = None
    """When to stop between two epochs; the crew's."""
    held: NDArray[np.int64] | None = None
    """Samples it held back, to judge its network by."""


def crew_size(local: Local, parameters: int, clients: int) -> int:
    """How many clients to train at once."""
    if choose_device(local.device).type != "cpu":
        return 1
    cores = os.cpu_count() or 1
    return min(clients, local.workers or max(1, cores // threads_per_client(local, parameters)))


class Crew:
    """Workers that take jobs. `size` 1 works in this process."""

    def __init__(self, data: Images, size: int, emit: Emit = silent, deadline: float | None = None) -> None:
        self.data, self.size, self.emit, self.deadline = data, size, emit, deadline
        self._pool: ProcessPoolExecutor | None = None
        self._listener: Listener | None = None

    def __enter__(self) -> Crew:
        if self.size > 1:
            processes = load_workers()
            self._listener = Listener(processes, self.emit)
            shared = Images(self.data.pixels.share_memory_(), self.data.labels.share_memory_())
            begin_with = (shared, self._listener.events)
            self._pool = ProcessPoolExecutor(self.size, processes, initializer=_begin, initargs=begin_with)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            if kind is not None:
                for process in list((self._pool._processes or {}).values()):
                    process.kill()
                if kind is KeyboardInterrupt:
                    _stop_loading()
            self._pool.shutdown(wait=True, cancel_futures=True)
            assert self._listener is not None
            self._listener.close()

    @property
    def out_of_time(self) -> bool:
        return self.deadline is not None and time.time() >= self.deadline

    def submit(self, job: Job) -> Future[str]:
        """The client's name, when its upload is written."""
        job = replace(job, deadline=self.deadline)
        if self._pool is not None:
            with hidden_main():
                return self._pool.submit(_work, job)
        done: Future[str] = Future()
        done.set_result(_train(job, self.data, self.emit))
        return done


def load_workers() -> ForkServerContext:
    """Begin to load what workers are forked from, so that it is there when they are needed."""
    processes = forked_from(__name__)
    with ignoring_interrupts():
        forkserver.ensure_running()
    return processes


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """A process begun here does not hear an interrupt, which goes to all processes of a terminal: its parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def forked_from(*modules: str) -> ForkServerContext:
    """Processes that begin with these modules in place: they and PyTorch are loaded once, not once for each process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [*modules, "torch._dynamo"]
    )  # PyTorch's optimisers load it, otherwise in every process
    return context


def _stop_loading() -> None:
    """This process is about to end: whatever it is forking workers from must not fork one that finds it gone."""
    begun = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if begun is not None:
        with suppress(ProcessLookupError):
            os.kill(begun, signal.SIGKILL)


class Listener:
    """Passes on what worker processes put into `events`.

    A worker that is killed while it writes leaves the queue locked for ever and a message torn, so the end is not a message: it
    is that nobody can write any more.
    """

    def __init__(self, processes: BaseContext, emit: Emit) -> None:
        self.events = processes.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, args=(emit,), daemon=True)
        self._thread.start()

    def _listen(self, emit: Emit) -> None:
        while True:
            try:
                event = self.events.get()
            except (EOFError, OSError):
                return
            emit(event)

    def close(self) -> None:
        """Once all workers are gone: hear what they said last, and end."""
        self.events._writer.close()  # type: ignore[attr-defined]
        self._thread.join(timeout=5)


@contextmanager
def hidden_main() -> Iterator[None]:
    """Start workers without importing the user's script into them: it need not guard itself with `__main__`."""
    main = sys.modules["__main__"]
    before = {name: main.__dict__.get(name) for name in ("__file__", "__spec__")}
    main.__dict__.update(dict.fromkeys(before))
    try:
        yield
    finally:
        main.__dict__.update(before)


def _train(job: Job, data: Images, emit: Emit) -> str:
    for module in job.local.plugins:
        load_plugin(module)
    held = None if job.held is None or len(job.held) == 0 else data.take(job.held)
    broadcast = _broadcast(job.broadcast, job.broadcast.stat().st_mtime_ns)
    masker = (
        simulated(job.client, broadcast.roster, broadcast.recipe.seeds.training) if broadcast.recipe.secure else None
    )
    site = Site(job.client, data.take(job.samples), job.state, job.local, job.told, job.deadline, held, masker)
    final = job.until == broadcast.last_epoch
    train(broadcast, site, job.until, emit).write(job.upload, flush=final)  # a lost snapshot is trained again
    return job.client


@lru_cache(maxsize=2)
def _broadcast(path: Path, _written: int) -> Broadcast:
    """Read once for all clients that share it; a file written anew is read anew."""
    return Broadcast.read(path)


_data: Images
_emit: Callable[[dict[str, Any]], None]


def _begin(data: Images, events: Any) -> None:
    """First thing in a worker process of a crew."""
    global _data, _emit
    _data, _emit = data, events.put
    begin_worker()


def begin_worker() -> None:
    """First thing in any worker process: it ends with its parent and by nobody else's hand."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A killed parent must not leave workers behind that write into its run folder."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: Job) -> str:
    return _train(job, _data, _emit)
