"""Messages of worker processes, also of one that dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import pytest

from oneround.processes import Listener, hidden_main


def speak(events: Any, torn: bool) -> None:
    """In a process of its own: say three things, and perhaps die in the middle of the next."""
    for number in range(3):
        events.put({"event": "steps", "done": number})
    if torn:
        events._wlock.acquire()
        os.write(events._writer.fileno(), b"\0\0\1\0 half a message")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("torn", [False, True])
def test_a_worker_that_dies_while_it_speaks_holds_nobody_up(torn: bool) -> None:
    """What it leaves behind is a locked queue and half a message."""
    heard: list[dict[str, Any]] = []
    processes = multiprocessing.get_context("fork")
    listener = Listener(processes, heard.append)
    worker = processes.Process(target=speak, args=(listener.events, torn))
    worker.start()
    worker.join()
    ending = threading.Thread(target=listener.close, daemon=True)
    ending.start()
    ending.join(timeout=60)
    assert not ending.is_alive() and not listener._thread.is_alive()
    assert [event["done"] for event in heard] == [0, 1, 2]


@pytest.mark.parametrize("script", [None, "/somewhere/script.py"], ids=["notebook", "script"])
def test_the_main_module_is_as_it_was_before(script: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's has no `__file__`; Ray asks whether it has one."""
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    if script is not None:
        monkeypatch.setattr(main, "__file__", script, raising=False)
    before = dict(vars(main))
    with hidden_main(), hidden_main():
        assert main.__file__ is None and main.__spec__ is None
    assert vars(main).get("__file__", "none") == before.get("__file__", "none")
    assert hasattr(main, "__file__") == (script is not None) and main.__spec__ is before["__spec__"]
