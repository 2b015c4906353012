"""Worker processes, forked from one that has loaded PyTorch. Nothing here imports PyTorch itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


def may_use_workers(device: str | None) -> bool:
    """Whether clients are likely to train side by side: several cores, no GPU. A guess that needs no PyTorch."""
    gpu = Path("/dev/nvidia0").exists() if device in (None, "auto") else device != "cpu"
    return (os.cpu_count() or 1) > 1 and not gpu


def load_workers(module: str) -> ForkServerContext:
    """Start the process that workers are forked from. Call it early: it imports `module`, and PyTorch, beside this one.

    It ignores Ctrl-C, which reaches all processes of a terminal: its parent ends it.
    """
    context = forked_from(module)
    in_main_thread = threading.current_thread() is threading.main_thread()  # no other may set signal handlers
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    try:
        forkserver.ensure_running()
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, before)
    return context


def forked_from(*modules: str) -> ForkServerContext:
    """A context whose processes are forked from one that has imported these modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    return context


def _kill_fork_server() -> None:
    """Kill it before this process exits: a worker forked now would have no parent."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def worker_pool(
    size: int,
    processes: ForkServerContext,
    emit: Callable[[dict[str, Any]], None],
    begin: Callable[..., None],
    *shared: Any,
) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that each call `begin(events, *shared)` first; what they put into `events` is emitted here.

    They are killed if the body raises.
    """
    from concurrent.futures import ProcessPoolExecutor

    listener = Listener(processes, emit)
    pool = ProcessPoolExecutor(size, processes, initializer=begin, initargs=(listener.events, *shared))
    try:
        yield pool
    except BaseException as error:
        for process in list((pool._processes or {}).values()):
            process.kill()
        if isinstance(error, KeyboardInterrupt):
            _kill_fork_server()
        raise
    finally:
        with suppress(RuntimeError):  # interrupted while the pool's own thread was starting: it cannot be joined yet
            pool.shutdown(wait=True, cancel_futures=True)
        listener.close()


class Listener:
    """Emits what worker processes put into `events`.

    A worker that is killed while writing leaves the queue locked and a partial message. So there is no end marker:
    the queue ends when all its writers are closed.
    """

    def __init__(self, processes: BaseContext, emit: Callable[[dict[str, Any]], None]) -> None:
        self.events = processes.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, args=(emit,), daemon=True)
        self._thread.start()

    def _listen(self, emit: Callable[[dict[str, Any]], None]) -> None:
        while True:
            try:
                event = self.events.get()
            except (EOFError, OSError):
                return
            emit(event)

    def close(self) -> None:
        """Emit the last events and end; call it after all workers have ended."""
        self.events._writer.close()  # type: ignore[attr-defined]
        self._thread.join(timeout=5)


@contextmanager
def hidden_main() -> Iterator[None]:
    """Start workers without importing the user's script into them: it need not guard itself with `__main__`."""
    names, attributes = ("__file__", "__spec__"), sys.modules["__main__"].__dict__
    before = {name: attributes[name] for name in names if name in attributes}  # a notebook has no __file__
    attributes.update(dict.fromkeys(names))
    try:
        yield
    finally:
        for name in names:
            attributes.pop(name, None)
        attributes.update(before)


def begin_worker() -> None:
    """The first call in a worker process: it ignores Ctrl-C and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """End when the parent ends: no worker writes into the run folder of a killed run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
