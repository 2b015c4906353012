"""The command line: a thin face over the rest."""

from __future__ import annotations

import errno
import signal
import sys

from rich.markup import escape

from oneround.cli import comparing as comparing
from oneround.cli import diagnosing as diagnosing
from oneround.cli import federating as federating
from oneround.cli import reporting as reporting
from oneround.cli import running as running
from oneround.cli import using as using
from oneround.cli.options import app, err
from oneround.errors import OneroundError

_FIXES = {
    errno.ENOSPC: "free some space and go on with --resume",
    errno.EEXIST: "a file is in the way, choose another place",
    errno.ENOTDIR: "a file is in the way, choose another place",
    errno.EISDIR: "a folder is there, name a file",
    errno.EACCES: "choose a place you may write to",
    errno.EROFS: "choose a place you may write to",
}


_ORDER = (
    "demo",
    "run",
    "methods",
    "partition",
    "sweep",
    "compare",
    "diagnose",
    "report",
    "fuse",
    "evaluate",
    "predict",
    "export",
)
app.registered_commands.sort(
    key=lambda command: _ORDER.index(command.name or getattr(command.callback, "__name__", ""))
)  # as help shows them


def main() -> None:
    """Entry point: an error a user can put right is one line and its exit code."""
    # Asked to end, a command ends what it started, as when interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # its terminal was closed, and nohup did not say to go on
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        app()
    except OneroundError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        _say(_reason(error))
        sys.exit(1)


def _say(text: str) -> None:
    for line in text.splitlines():
        err.print(f"[bold red]error:[/] {escape(line)}", highlight=False, soft_wrap=True)


def _reason(error: OSError) -> str:
    """What the system refused: where, why, and the way out where there is one."""
    where = next((f"{name}: " for name in (error.filename2, error.filename) if name is not None), "")
    fix = _FIXES.get(error.errno or 0)
    return where + " ".join((error.strerror or str(error)).split()) + (f"; {fix}" if fix else "")
