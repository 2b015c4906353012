"""Flower's processes: a SuperLink, a SuperNode, a run.

On Linux they end with the command that started them, even if that is killed. (The kernel watches the thread that starts them, so start
them from one that lives as long as the command.)
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

PORT_TIMEOUT = 20.0  # seconds; a killed server's SuperLink takes a while to end and free its port
START_TIMEOUT = 60.0  # seconds a SuperLink may take to start
CONNECTION = "here"  # name of the SuperLink in Flower's config.toml
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
serverapp = "oneround.federate.server_app:app"
clientapp = "oneround.federate.client_app:app"

[tool.flwr.app.config]
recipe = ""
out = ""
poll = 0.5
patience = 30.0
farewell = 20.0
sites = 0
"""


def write_app(folder: Path) -> Path:
    """Write the folder that `flwr run` needs; it names installed code and contains none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(APP.format(version=version("oneround")))
    return folder


def environment(home: Path) -> dict[str, str]:
    """Environment of Flower's processes: their own home folder, the programs of this Python environment, no downloads, no telemetry."""
    return {
        **os.environ,
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def _end_with_parent() -> None:
    """In the child: SIGTERM when its parent dies, even by SIGKILL."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def is_taken(host: str, port: int) -> bool:
    """Whether another program listens on this port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections that linger do not count
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
    """A child process whose output goes to a file."""

    command: Sequence[str]
    home: Path
    output: Path
    process: subprocess.Popen[bytes] | None = None
    begin: int = 0
    """Offset of its own output in the file."""

    def start(self) -> Child:
        self.home.mkdir(parents=True, exist_ok=True)
        self.begin = self.output.stat().st_size if self.output.exists() else 0
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                self.command,
                env=environment(self.home),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return self

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def stop(self) -> None:
        """Terminate it and, if it does not end within 10 seconds, kill it with the processes it started."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Kill it and the processes it started."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def read_output(self) -> str:
        return self.output.read_bytes()[self.begin :].decode(errors="replace") if self.output.exists() else ""


@dataclass
class SuperLink:
    """Flower's process at the server, as a context: it takes messages for the ServerApp and keeps them in a database file."""

    folder: Path
    """Folder of Flower's own files."""
    host: str
    port: int
    keys: KeyFolder | None = None
    """None: neither encrypted nor authenticated."""
    options: tuple[str, ...] = ()
    """Further options of `flower-superlink`."""
    child: Child = field(init=False)

    def __enter__(self) -> SuperLink:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.child.stop()

    def start(self) -> SuperLink:
        """Start it and wait until it answers; RunError if the port is in use or it does not start."""
        command = [sys.executable, "-m", "oneround.federate.superlink", "--host", self.host, "--port", str(self.port)]
        command += ["--database", str((self.folder / "link.db").resolve()), "--disable-runtime-dependency-installation"]
        tls = "insecure = true"
        if self.keys:
            authority, certificate, key = (
                str(file.resolve()) for file in (self.keys.ca, self.keys.certificate, self.keys.key)
            )
            command += ["--ssl-ca-certfile", authority, "--ssl-certfile", certificate, "--ssl-keyfile", key]
            command += ["--enable-supernode-auth"]
            tls = f'root-certificates = "{authority}"'
        else:
            command += ["--insecure"]
        command += self.options
        until = time.monotonic() + PORT_TIMEOUT
        while is_taken(self.host, self.port):
            if time.monotonic() > until:
                raise RunError(f"port {self.port} is in use by another program; end it, or choose another --port")
            time.sleep(0.5)
        self.folder.mkdir(parents=True, exist_ok=True)
        address = f'address = "127.0.0.1:{self.port}"'
        settings = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{address}\n{tls}\n'
        (self.folder / "config.toml").write_text(settings)
        self.child = Child(command, self.folder, self.folder / "superlink.log").start()
        until = time.monotonic() + START_TIMEOUT
        while self.child.ended or not self._answers():
            if self.child.ended or time.monotonic() > until:
                self.child.stop()
                last = [line for line in self.child.read_output().splitlines() if line.strip()][-1:]
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
        """Register these sites' keys; one that is registered already stays so."""
        assert self.keys is not None
        children = {}
        for site in sites:
            command = ["flwr", "supernode", "register", str(self.keys.public(site).resolve()), CONNECTION]
            command += ["--name", site, "--format", "json"]
            children[site] = Child(command, self.folder, self.folder / f"register-{site}.log").start()
        for site, child in children.items():
            assert child.process is not None
            code, output = child.process.wait(), child.read_output()
            if (code or '"success": false' in output) and "already" not in output:
                raise RunError(
                    f"{self.keys.public(site)}: Flower does not take this key: {' '.join(output.split())[-300:]}"
                )

    def run(self, app: Path, config: dict[str, str | float], options: Sequence[str] = ()) -> Child:
        """Start a run; the child ends when the run does. `options`: further ones of `flwr run`."""
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        command = ["flwr", "run", str(app.resolve()), CONNECTION, "--stream", "--run-config", settings, *options]
        return Child(command, self.folder, self.folder / "flwr-run.log").start()


def supernode(server: str, site_file: Path, credentials: tuple[Path, Path] | None = None) -> Child:
    """Flower's process at a site, not started yet.

    `credentials`: the CA certificate and the site's private key; without them neither encrypted nor authenticated.
    """
    command = ["flower-supernode", "--superlink", server, "--port", str(free_port())]
    command += ["--node-config", f'site="{site_file.resolve()}"']
    if credentials:
        authority, key = (str(file.resolve()) for file in credentials)
        command += ["--root-certificates", authority, "--auth-supernode-private-key", key]
    else:
        command += ["--insecure"]
    folder = site_file.parent / "flower"
    return Child(command, folder, folder / "supernode.log")
