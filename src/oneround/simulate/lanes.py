"""Clients on one GPU, one or two at a time: while one loads or waits, the other computes, and their small kernels overlap.

A lane is a thread with a worker, and so a network, a recorded step and a stream, of its own. Results are those of one client at a time.
Uploads are written by further threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from oneround.training import Emit

MOST = 2  # lanes; a third gains nothing on an H200
ROOM = 1.5  # free memory, in that of the clients before, that a second lane needs


W = TypeVar("W")
T = TypeVar("T")


class Closing(Exception):
    """The pool is being left: its clients stop where they are, as when the program is killed."""


class Lanes(Generic[W]):
    """So many threads that work on one device; `worker` makes the worker of a thread."""

    def __init__(self, worker: Callable[[Emit], W], emit: Emit, device: torch.device, lanes: int) -> None:
        self._make, self._emit, self._device = worker, emit, device
        self._own = threading.local()
        self._emitting, self._first = threading.Lock(), threading.Lock()
        self._room_for_two: bool | None = None
        """Not known before one client was trained."""
        self._closing = False
        self._lanes, self._writers = (ThreadPoolExecutor(lanes, thread_name_prefix=each) for each in ("lane", "upload"))
        self._unwritten = threading.Semaphore(2 * lanes)
        """Uploads in memory: a lane that is further ahead of the disk waits."""

    def submit(self, work: Callable[[W], Callable[[], T]]) -> Future[T]:
        """Have a lane do this with its worker, and then what is left to do beside it; the future is of both."""
        done: Future[T] = Future()
        self._lanes.submit(self._run, work, done)
        return done

    def close(self, *, at_once: bool) -> None:
        """Wait for the lanes; `at_once`: clients stop at their next event."""
        self._closing = at_once
        self._lanes.shutdown(cancel_futures=at_once)
        self._writers.shutdown()

    def _run(self, work: Callable[[W], Callable[[], T]], done: Future[T]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            rest = self._work(work)
        except BaseException as error:
            done.set_exception(error)
            return
        self._unwritten.acquire()
        self._writers.submit(self._finish, rest, done)

    def _work(self, work: Callable[[W], T]) -> T:
        with self._first:
            if not self._room_for_two:
                done = work(self._worker())
                if self._room_for_two is None:
                    self._room_for_two = has_room(self._device)
                return done
        return work(self._worker())

    def _finish(self, rest: Callable[[], T], done: Future[T]) -> None:
        try:
            done.set_result(rest())
        except BaseException as error:
            done.set_exception(error)
        finally:
            self._unwritten.release()

    def _worker(self) -> W:
        if not hasattr(self._own, "worker"):
            self._own.worker = self._make(self._send)
        worker: W = self._own.worker
        return worker

    def _send(self, event: dict[str, Any]) -> None:
        if self._closing:
            raise Closing
        with self._emitting:
            self._emit(event)


def has_room(device: torch.device) -> bool:
    """Whether the device has room for as much again as this process has used."""
    if device.type != "cuda":
        return True
    return torch.cuda.mem_get_info(device)[0] > ROOM * torch.cuda.max_memory_reserved(device)
