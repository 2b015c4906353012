"""What the commands do: bring up a server, a site or a whole federation, tell what happens, end what was started."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from oneround.errors import DataError, Interrupted, RunError
from oneround.federate.keys import KeyFolder, check_dates, check_server_at, speaks_tls
from oneround.federate.processes import Child, SuperLink, free_port, is_loopback, supernode, write_app
from oneround.federate.sites import SiteFile
from oneround.observe.words import duration
from oneround.recipe import Recipe

Say = Callable[[str], None]
STILL_HELD = 90.0  # Flower holds a killed site's place for a minute
SILENCE = 60.0  # after which a site says that it waits
LET_IN = "SuperNode ID"  # what a SuperNode says when the server has taken its key


def be_server(recipe: Recipe, folder: Path, host: str, port: int, keys: KeyFolder | None, say: Say) -> None:
    """Serve until the model is made (or, started again on a finished run, until the late uploads are in)."""
    _only_here(host, keys)
    if keys:
        keys.check_server()
    with _link(folder, host, port, keys) as link:
        if keys:
            link.register(keys.sites)
        guard = (
            f"encrypted, for the keys of {', '.join(keys.sites)}"
            if keys
            else "INSECURE: not encrypted, no keys asked for"
        )
        say(f"listening on {host}:{port}, {guard}")
        _watch(_begin(link, recipe, folder), folder, say, f"the same command with --out {folder}")


def be_local(recipe: Recipe, folder: Path, say: Say) -> None:
    """A server and as many sites as the recipe's partition has clients, in processes of their own, on this machine."""
    from oneround.data import partitions
    from oneround.folder import client_name

    count, port = partitions.of(recipe.partition).clients, free_port()
    with _link(folder, "127.0.0.1", port, None) as link, ExitStack() as stack:
        for number in range(count):
            name = client_name(number, count)
            site = SiteFile(name=name, share=number, folder=(folder / "sites" / name).resolve(), local=recipe.local)
            node = supernode(f"127.0.0.1:{port}", write_site(site), folder / "sites" / name / "flower", None, None)
            stack.callback(node.start().stop)
        say(f"{count} sites and a server on this machine, port {port}; not encrypted, it never leaves the machine")
        _watch(_begin(link, recipe, folder), folder, say, f"the same command with --out {folder}")


@dataclass(frozen=True)
class Admission:
    """What lets a site in: the server's authority and the site's own key."""

    authority: Path
    key: Path


def be_client(site: SiteFile, server: str, admission: Admission | None, say: Say) -> None:
    """Take part until the server has counted the upload, or says why not."""
    assert site.folder is not None
    if site.data and ":" not in site.data and not Path(site.data).exists():
        raise DataError(f"--data {site.data}: no such file or folder")
    _check_admission(server, admission, say)
    own = supernode(server, write_site(site), site.folder / "flower", *(_pair(admission)))
    log, before = Tail(site.folder / "site.log"), _verdicts(site.folder)
    began = heard = time.monotonic()
    own.start()
    say(f"{site.name}: connecting to {server}")
    try:
        while True:
            for line in log.lines():
                heard = 0.0
                if line.startswith("ERROR "):
                    time.sleep(3)  # so that the server hears of it too
                    raise RunError(line.removeprefix("ERROR "))
                say(line)
            for path, _ in _verdicts(site.folder) - before:
                verdict = json.loads(path.read_text())
                if verdict["counted"] != "yes":
                    raise RunError(verdict["text"])
                for line in log.lines():  # what the server said of it was logged first
                    say(line)
                return
            if own.ended:
                _again(own, site, time.monotonic() - began, say)
            if heard and time.monotonic() - heard > SILENCE:
                say(f"{site.name}: no word from the server for {duration(SILENCE)}; still waiting (is its run over?)")
                heard = 0.0
            time.sleep(0.5)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command goes on where it was") from None
    finally:
        own.stop()


def write_site(site: SiteFile) -> Path:
    """The site's file in its own folder, where its SuperNode finds it."""
    assert site.folder is not None
    site.folder.mkdir(parents=True, exist_ok=True)
    path = site.folder / "site.yaml"
    path.write_text(yaml.safe_dump(site.model_dump(mode="json"), sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


class Tail:
    """New lines of a log, without the time they begin with."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = path.stat().st_size if path.exists() else 0

    def lines(self) -> Iterator[str]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self.at += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            yield re.sub(r"^\S+ \S+ (INFO )?", "", line)


def _only_here(host: str, keys: KeyFolder | None) -> None:
    if keys is None and not is_loopback(host):
        raise DataError(
            f"--insecure with --host {host}: only on this machine (127.0.0.1); for others make keys with oneround federate keys"
        )


@contextmanager
def _link(folder: Path, host: str, port: int, keys: KeyFolder | None) -> Iterator[SuperLink]:
    link = SuperLink(folder / "flower", host, port, keys).start()
    try:
        yield link
    finally:
        link.stop()


def _begin(link: SuperLink, recipe: Recipe, folder: Path) -> Child:
    asked = folder / "flower" / "asked.yaml"
    asked.write_text(recipe.to_yaml(), encoding="utf-8")
    config: dict[str, str | float] = {"recipe": str(asked.resolve()), "out": str(folder.resolve())}
    return link.run(write_app(folder / "flower" / "app"), config)


def _watch(run: Child, folder: Path, say: Say, again: str) -> None:
    """Tell what the server's log says until the run ends; a run without a result is an error, in its own words."""
    log, last = Tail(folder / "run.log"), ""
    try:
        while True:
            ended = run.ended
            for line in log.lines():
                last = line
                if not line.startswith("ERROR"):
                    say(line)
            if ended:
                break
            time.sleep(0.3)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; uploads are kept, go on with {again}") from None
    finally:
        run.stop()
    if last.startswith("ERROR "):
        raise RunError(last.removeprefix("ERROR "))
    if not (folder / "result.json").exists():
        raise RunError(f"the server's process ended without a result; {run.output} says more; go on with {again}")


def _pair(admission: Admission | None) -> tuple[Path | None, Path | None]:
    return (admission.authority, admission.key) if admission else (None, None)


def _check_admission(server: str, admission: Admission | None, say: Say) -> None:
    host, colon, port = server.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise DataError(f"--server {server}: write it as HOST:PORT, the port from 1 to 65535")
    if admission is None:
        if not is_loopback(host):
            raise DataError(
                f"--insecure with --server {server}: only on this machine (127.0.0.1); otherwise give --keys"
            )
        if speaks_tls(server):
            raise DataError(f"--insecure with --server {server}: it is encrypted and asks for keys; give --keys FOLDER")
        return
    for file, what in ((admission.authority, "the server's ca.crt"), (admission.key, "the site's private key")):
        if not file.is_file():
            raise DataError(f"{file}: not there; it is {what}")
    check_dates(admission.authority, "ask the server's operator for the present ca.crt")
    told = check_server_at(server, admission.authority)
    if told:
        say(told)


def _verdicts(folder: Path) -> set[tuple[Path, int]]:
    """What the server has said so far, and when."""
    return {(path, path.stat().st_mtime_ns) for path in folder.glob("*/counted.json")}


def _again(own: Child, site: SiteFile, seconds: float, say: Say) -> None:
    """A SuperNode that ended by itself: say why, or start it again while the server still holds the place of a killed one.

    Flower refuses an unknown key and a place still held with the same words; a site that was let in from this folder before has a
    known key.
    """
    said = " ".join(own.said().split())
    if "Failed to activate SuperNode" not in said:
        raise RunError(f"{site.name}: the connection ended: {said[-300:]}")
    if LET_IN not in own.output.read_text(errors="replace"):
        raise DataError(
            f"{site.name}: the server does not know this key, or a site with it is connected already; "
            "give its operator the file that ends in .pub, or end the other one"
        )
    if seconds > STILL_HELD:
        raise RunError(
            f"{site.name}: the server still holds the connection this site had before, after {duration(seconds)}; "
            "does this site run in another process?"
        )
    say(f"{site.name}: the server still holds the connection this site had before; trying again")
    time.sleep(5)
    own.start()
