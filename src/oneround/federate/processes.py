"""Flower's processes with the right settings: a SuperLink, a SuperNode, a run. Each is ours to end, by its own id.

On Linux they are also told to end when the command that started them is gone, however it ended (strictly: its thread, so start
them from one that lasts).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from oneround.errors import RunError
from oneround.federate.keys import KeyFolder

BIN = Path(sys.executable).parent
ENDING = 20.0  # seconds until what a killed server started has ended
HERE = "here"  # what the SuperLink is called in Flower's own settings
APP = """\
[project]
name = "oneround-federation"
version = "{version}"
description = "One-shot federated learning; the code is the installed oneround package."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "oneround"

[tool.flwr.app.components]
serverapp = "{server}"
clientapp = "{client}"

[tool.flwr.app.config]
recipe = ""
out = ""
poll = 0.5
patience = 30.0
farewell = 20.0
"""


def write_app(
    folder: Path, server: str = "oneround.federate.server:app", client: str = "oneround.federate.client:app"
) -> Path:
    """The folder `flwr run` wants: names of installed code, no code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(APP.format(version=version("oneround"), server=server, client=client))
    return folder


def environment(home: Path) -> dict[str, str]:
    """For every process of Flower: its own folder, its programs first on the path, nothing fetched, nothing reported."""
    ours = {
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return {**os.environ, **ours}


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
END_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def _end_with_parent() -> None:
    """In the child: SIGTERM when its parent dies, even by SIGKILL."""
    if _libc is not None:
        _libc.prctl(END_WITH_PARENT, signal.SIGTERM, 0, 0, 0)


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what is left of connections does not count
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_loopback(host: str) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


@dataclass
class Child:
    """A process of ours whose output goes to a file."""

    command: Sequence[str]
    home: Path
    output: Path
    process: subprocess.Popen[bytes] | None = None
    begin: int = 0
    """Where in the file its own output begins."""

    def start(self) -> Child:
        self.home.mkdir(parents=True, exist_ok=True)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.begin = self.output.stat().st_size if self.output.exists() else 0
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                self.command, env=environment(self.home), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                preexec_fn=_end_with_parent,
            )  # fmt: skip
        return self

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def stop(self) -> None:
        """In good order; what it started ends with it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """At once, with all it started."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def said(self) -> str:
        return self.output.read_bytes()[self.begin :].decode(errors="replace") if self.output.exists() else ""


@dataclass
class SuperLink:
    """The server's end: takes messages for the ServerApp, keeps them in a database file."""

    folder: Path
    """Of Flower's own files."""
    host: str
    port: int
    keys: KeyFolder | None = None
    """None: neither encrypted nor authenticated."""
    options: tuple[str, ...] = ()
    """Further options of `flower-superlink`."""
    child: Child = field(init=False)

    @property
    def _here(self) -> str:
        """As this machine reaches it."""
        return f"127.0.0.1:{self.port}"

    def start(self, seconds: float = 60) -> SuperLink:
        command = [sys.executable, "-m", "oneround.federate.superlink", "--host", self.host, "--port", str(self.port)]
        command += ["--database", str((self.folder / "link.db").resolve()), "--disable-runtime-dependency-installation"]
        if self.keys:
            command += [
                "--ssl-ca-certfile",
                str(self.keys.ca.resolve()),
                "--ssl-certfile",
                str(self.keys.certificate.resolve()),
            ]
            command += ["--ssl-keyfile", str(self.keys.key.resolve()), "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        command += self.options
        self.folder.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + ENDING
        while is_taken(self.host, self.port):  # a killed server's SuperLink takes a while to end
            if time.monotonic() > until:
                raise RunError(f"port {self.port} is in use by another program; end it, or choose another --port")
            time.sleep(0.5)
        tls = f'root-certificates = "{self.keys.ca.resolve()}"' if self.keys else "insecure = true"
        settings = f'[superlink]\ndefault = "{HERE}"\n\n[superlink.{HERE}]\naddress = "{self._here}"\n{tls}\n'
        (self.folder / "config.toml").write_text(settings)
        self.child = Child(command, self.folder, self.folder / "superlink.log").start()
        until = time.monotonic() + seconds
        while self.child.ended or not self._answers():
            if self.child.ended or time.monotonic() > until:
                self.child.stop()
                last = [line for line in self.child.said().splitlines() if line.strip()][-1:]
                raise RunError(f"the SuperLink does not start on {self.host}:{self.port}: {''.join(last)[:300]}")
            time.sleep(0.2)
        return self

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False

    def register(self, sites: Sequence[str]) -> None:
        """Make these sites' keys known; a key that is known already stays so."""
        assert self.keys is not None
        waiting = {}
        for site in sites:
            command = [
                "flwr",
                "supernode",
                "register",
                str(self.keys.public(site).resolve()),
                HERE,
                "--name",
                site,
                "--format",
                "json",
            ]
            waiting[site] = Child(command, self.folder, self.folder / f"register-{site}.log").start()
        for site, child in waiting.items():
            assert child.process is not None
            failed = child.process.wait() or '"success": false' in child.said()
            if failed and "already" not in child.said():
                raise RunError(
                    f"{self.keys.public(site)}: Flower does not take this key: {' '.join(child.said().split())[-300:]}"
                )

    def run(self, app: Path, config: dict[str, str | float], options: Sequence[str] = ()) -> Child:
        """Start a run; the child ends when the run does. `options`: further ones of `flwr run`."""
        told = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        command = ["flwr", "run", str(app.resolve()), HERE, "--stream", "--run-config", told, *options]
        return Child(command, self.folder, self.folder / "flwr-run.log").start()

    def stop(self) -> None:
        self.child.stop()


def supernode(server: str, site_file: Path, folder: Path, authority: Path | None, key: Path | None) -> Child:
    """A site's end, not started yet; without authority and key neither encrypted nor authenticated."""
    command = ["flower-supernode", "--superlink", server, "--port", str(free_port())]
    command += ["--node-config", f'site="{site_file.resolve()}"']
    if authority and key:
        command += ["--root-certificates", str(authority.resolve()), "--auth-supernode-private-key", str(key.resolve())]
    else:
        command += ["--insecure"]
    return Child(command, folder, folder / "supernode.log")
