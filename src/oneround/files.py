"""Files that are replaced whole, so that a reader finds the old content or the new one whenever a program stops; log files."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER_ONLY = 0o600


def write_durably(path: Path, *raw: bytes | memoryview, flush: bool = True, mode: int = 0o666) -> None:
    """Write these pieces atomically: a temporary file, flushed to disk, then renamed. `mode`: its permissions, from the first byte on.

    Without `flush` the file survives a crash of the program but not of the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.writelines(raw)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if flush:
            flush_folder(path.parent)
    except OSError as error:  # name the file the user knows, not the temporary one
        if error.errno is not None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Flush the renaming itself: without it, the old file may be back after a power cut. Not every file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BackgroundFlush:
    """Flushes files that were written without it, while the program goes on. Leaving the context waits until all are on disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flushed: dict[Path, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flush")

    def __enter__(self) -> BackgroundFlush:
        return self

    def add(self, path: Path) -> None:
        """Flush this file, once."""
        with self._lock, suppress(RuntimeError):  # the context is left already, with an error
            if path not in self._flushed:
                self._flushed[path] = self._thread.submit(flush_file, path)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._thread.shutdown()
        if kind is not None:  # the first error tells more
            return
        for each in self._flushed.values():
            each.result()
        for folder in {path.parent for path in self._flushed}:
            flush_folder(folder)


def flush_file(path: Path) -> None:
    """Flush a file that was written without it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append the package's log to this file within the context."""
    log, handler = logging.getLogger("oneround"), logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
