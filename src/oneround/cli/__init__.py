"""The command line: a thin layer over the library."""

from __future__ import annotations

import errno
import gc
import signal
import sys

from rich.markup import escape

from oneround.cli import comparing as comparing
from oneround.cli import diagnosing as diagnosing
from oneround.cli import federating as federating
from oneround.cli import merging as merging
from oneround.cli import reporting as reporting
from oneround.cli import reproducing as reproducing
from oneround.cli import running as running
from oneround.cli import using as using
from oneround.cli.options import app, err
from oneround.errors import Interrupted, OneroundError

_REMEDIES = {
    errno.ENOSPC: "free some space and continue with --resume",
    errno.EEXIST: "a file of that name exists; choose another path",
    errno.ENOTDIR: "a file has the name of a folder in this path; choose another path",
    errno.EISDIR: "that is a folder; give a file name",
    errno.EACCES: "no permission to write there; choose another path",
    errno.EROFS: "no permission to write there; choose another path",
}


_ORDER = [
    "demo",
    "run",
    "methods",
    "partition",
    "sweep",
    "reproduce",
    "merge",
    "compare",
    "diagnose",
    "report",
    "fuse",
    "evaluate",
    "predict",
    "export",
]
"""Order of the commands in the help."""
app.registered_commands.sort(
    key=lambda command: _ORDER.index(str(command.name or getattr(command.callback, "__name__", None)))
)


def main() -> None:
    """Entry point: an error that a user can fix is one line and its exit code."""
    # A command that is terminated ends its workers, as when it is interrupted.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: the command outlives its terminal
            signal.signal(number, _interrupt)
    try:
        app()
    except OneroundError as error:
        _print_error(str(error))
        sys.exit(Interrupted.exit_code if _interrupted else error.exit_code)
    except (Exception, SystemExit) as error:
        if _interrupted and getattr(error, "code", 1) not in (0, Interrupted.exit_code):
            _print_error(f"interrupted; what is done is kept, continue with --resume ({type(error).__name__}: {error})")
            sys.exit(Interrupted.exit_code)
        if not isinstance(error, OSError):
            raise
        _print_error(_reason(error))
        sys.exit(1)
    finally:
        gc.freeze()  # saves the last garbage collection, which would visit every object that PyTorch loaded


_interrupted = False
"""Whether this command was asked to end (SIGINT, SIGTERM): errors raised afterwards are consequences and are not reported."""


def _interrupt(*_: object) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def _print_error(text: str) -> None:
    for line in text.splitlines():
        err.print(f"[bold red]error:[/] {escape(line)}", highlight=False, soft_wrap=True)


def _reason(error: OSError) -> str:
    """An error of the operating system in one line: the file, the reason, and the remedy where one is known."""
    where = next((f"{name}: " for name in (error.filename2, error.filename) if name is not None), "")
    fix = _REMEDIES.get(error.errno or 0)
    return where + " ".join((error.strerror or str(error)).split()) + (f"; {fix}" if fix else "")
