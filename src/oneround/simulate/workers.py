"""Workers train clients: this process, or several beside it, each one client at a time.

On a CPU, small networks train fastest with one thread per client and several clients at once; on a GPU, clients take turns in
lanes of this process (lanes.py). Results do not depend on the worker: every client has its own random generators and a fixed number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from oneround.acts import train_and_measure, train_group
from oneround.config.parts import load_plugin
from oneround.config.recipe import Local
from oneround.data import Images
from oneround.privacy.masks import simulated_masker
from oneround.processes import begin_worker, hidden_main, load_workers, worker_pool
from oneround.protocol import Broadcast, Upload
from oneround.runs.folder import RunFolder
from oneround.simulate.lanes import MOST, Lanes
from oneround.site import Site, choose_device
from oneround.training import Emit, Trainer, silent
from oneround.training.idle import IdleStates

J = TypeVar("J")
T = TypeVar("T")


@dataclass(frozen=True)
class TrainJob:
    """Train one client to the end of an epoch and write its upload."""

    client: str
    samples: NDArray[np.int64]
    """Indices of its samples in the pool's data."""
    folder: RunFolder
    until: int
    local: Local
    consensus: float = 1.0
    """Spread of the clients' prototypes relative to the first epoch."""
    validation: NDArray[np.int64] | None = None
    """Indices of the samples that it holds back for validation."""
    ahead: bool = False
    """Whether its upload has to wait until the one before it is scored."""


@dataclass(frozen=True)
class GroupJob:
    """Train several clients together to the end of an epoch and write their uploads."""

    members: dict[int, TrainJob]
    """By slot of the batched network."""
    slots: int


class Worker:
    """Trains one client after another, with one trainer; keeps the last broadcast it read."""

    def __init__(self, data: Images, emit: Emit, deadline: float | None, idle: IdleStates | None = None) -> None:
        """`deadline`: when to stop between two epochs (`time.time()`). `idle`: of all workers that train the same clients."""
        self.data, self.emit, self.deadline, self.trainer = data, emit, deadline, Trainer(idle)
        self._broadcast: tuple[tuple[Path, int, int], Broadcast] | None = None

    def train(self, job: TrainJob) -> Callable[[], str]:
        """Train the client; what is left to do writes its upload and returns its name."""
        broadcast = self._begin(job)
        rest = train_and_measure(broadcast, self._site(job, broadcast), job.until, self.emit, self.trainer)
        return lambda: _write(rest(), job)

    def train_group(self, job: GroupJob) -> Callable[[], list[str]]:
        """Train the clients together and write their uploads; what is left to do returns their names."""
        jobs = {each.client: each for each in job.members.values()}
        first = next(iter(jobs.values()))
        broadcast = self._begin(first)
        sites = {slot: self._site(each, broadcast) for slot, each in job.members.items()}
        for upload in train_group(broadcast, sites, job.slots, first.until, self.emit, self.trainer):
            _write(upload, jobs[upload.client])  # one at a time in memory
        return lambda: list(jobs)

    def _begin(self, job: TrainJob) -> Broadcast:
        for module in job.local.plugins:
            load_plugin(module)
        return self._read(job.folder.broadcast)

    def _site(self, job: TrainJob, broadcast: Broadcast) -> Site:
        folder, recipe, validation = job.folder, broadcast.recipe, job.validation
        return Site(
            job.client,
            self.data.take(job.samples),
            folder.state(job.client),
            job.local,
            consensus=job.consensus,
            deadline=self.deadline,
            validation=None if validation is None or len(validation) == 0 else self.data.take(validation),
            masker=simulated_masker(job.client, broadcast.roster, recipe.seeds.training) if broadcast.masked else None,
        )

    def _read(self, path: Path) -> Broadcast:
        """The broadcast, read once for all clients that share it, and again when the file changes."""
        status = path.stat()
        version = path, status.st_mtime_ns, status.st_ino  # times of some file systems are whole seconds
        if self._broadcast is None or self._broadcast[0] != version:
            self._broadcast = version, Broadcast.read(path)
        return self._broadcast[1]


def _write(upload: Upload, job: TrainJob) -> str:
    path = job.folder.upload_ahead(job.client) if job.ahead else job.folder.upload(job.client)
    upload.write(path, flush=False)  # `SimulatedClients` flushes those of the last epoch
    return job.client


class WorkerPool:
    """Workers that take jobs, as a context. A pool of one trains in this process: on a GPU in lanes, otherwise when a job is submitted."""

    def __init__(self, data: Images, size: int, emit: Emit = silent, deadline: float | None = None) -> None:
        self.data, self.size, self.emit, self.deadline = data, size, emit, deadline
        self._worker: Worker | None = None
        self._lanes: Lanes[Worker] | None = None
        self._idle: IdleStates | None = None
        self._pool: ProcessPoolExecutor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> WorkerPool:
        if self.size > 1:
            shared = Images(self.data.pixels.share_memory_(), self.data.labels.share_memory_())
            pool = worker_pool(self.size, load_workers(__name__), self.emit, _start_worker, shared, self.deadline)
            self._pool = self._stack.enter_context(pool)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._lanes:
            self._lanes.close(at_once=error[0] is not None)
        self._worker = self._lanes = None
        self._stack.__exit__(*error)
        if self._idle:
            with suppress(OSError) if error[0] else nullcontext():  # the first error tells more
                self._idle.close()
            self._idle = None

    def settle(self) -> None:
        """Wait until the states of idle clients are on disk."""
        if self._idle:
            self._idle.settle()

    @property
    def goes_on(self) -> bool:
        """Whether clients train on while this thread does something else, on a device that has room for both."""
        return self._lanes is not None

    @property
    def out_of_time(self) -> bool:
        return self.deadline is not None and time.time() >= self.deadline

    def submit(self, job: TrainJob) -> Future[str]:
        """Train one client; the future's result is its name."""
        return self._submit(job.local, _work, Worker.train, job)

    def submit_group(self, job: GroupJob) -> Future[list[str]]:
        """Train several clients together; the future has their names."""
        return self._submit(next(iter(job.members.values())).local, _work_together, Worker.train_group, job)

    def _submit(
        self, local: Local, in_process: Callable[[J], T], here: Callable[[Worker, J], Callable[[], T]], job: J
    ) -> Future[T]:
        if self._pool is not None:
            with hidden_main():
                return self._pool.submit(in_process, job)
        device = choose_device(local.device)
        if self._lanes is None and self._worker is None:
            self._begin(device, min(local.workers or MOST, MOST) if device.type == "cuda" else 0)
        if self._lanes is not None:
            return self._lanes.submit(lambda worker: here(worker, job))
        assert self._worker is not None
        done: Future[T] = Future()
        done.set_result(here(self._worker, job)())
        return done

    def _begin(self, device: torch.device, lanes: int) -> None:
        """Make what trains in this process: so many lanes, or a worker; on a GPU the images stay there, if they take less than a quarter of what is free."""
        self._idle, data = IdleStates.on(device), self.data
        if device.type == "cuda" and 4 * data.pixels.nbytes < torch.cuda.mem_get_info(device)[0]:
            data = data.to(device)

        def make(emit: Emit) -> Worker:
            return Worker(data, emit, self.deadline, self._idle)

        if lanes:
            self._lanes = Lanes(make, self.emit, device, lanes)
        else:
            self._worker = make(self.emit)


_worker: Worker
"""The one Worker of a worker process, set by `_start_worker`."""


def _start_worker(events: Any, data: Images, deadline: float | None) -> None:
    """The first call in a worker process of a pool."""
    global _worker
    _worker = Worker(data, events.put, deadline)
    begin_worker()


def _work(job: TrainJob) -> str:
    return _worker.train(job)()


def _work_together(job: GroupJob) -> list[str]:
    return _worker.train_group(job)()
