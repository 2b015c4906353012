"""Launches a server, a site or a whole local federation, prints its log and stops the processes that it starts."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import yaml

from oneround.config.recipe import Recipe
from oneround.errors import DataError, Interrupted, RunError
from oneround.federate.keys import KeyFolder, check_dates, check_server_at, speaks_tls
from oneround.federate.processes import Child, SuperLink, free_port, is_loopback, supernode, write_app
from oneround.federate.sites import OUTCOME, REFUSED, SiteFile
from oneround.formatting import duration

PrintLine = Callable[[str], None]
RECONNECT_TIMEOUT = 90.0  # seconds; Flower keeps the connection of a killed site open for a minute
SILENCE = 60.0  # seconds without a message after which a site says that it still waits
REPLY_TIMEOUT = 20.0  # seconds that a site's last replies may take
MOST_STARTS = 3  # of a site's process in a federation on one machine
ACCEPTED = "SuperNode ID"  # printed by a SuperNode when the server has accepted its key


def run_server(
    recipe: Recipe, folder: Path, host: str, port: int, keys: KeyFolder | None, print_line: PrintLine
) -> None:
    """Serve until the model is made or, started again on a finished run, until the late uploads are in."""
    if keys:
        keys.check_server()
    elif not is_loopback(host):
        raise DataError(
            f"--insecure with --host {host}: only on this machine (127.0.0.1); for others make keys with oneround federate keys"
        )
    with SuperLink(folder / "flower", host, port, keys) as link:
        if keys:
            link.register(keys.sites)
        security = (
            f"encrypted, for the keys of {', '.join(keys.sites)}"
            if keys
            else "INSECURE: not encrypted, no keys asked for"
        )
        print_line(f"listening on {host}:{port}, {security}")
        _watch(_start_run(link, recipe, folder), folder, print_line)


def run_local(recipe: Recipe, folder: Path, print_line: PrintLine) -> None:
    """Run a server and as many sites as the recipe's partition has clients on this machine, each in processes of its own."""
    from oneround.runs.folder import client_name

    count, port = num_sites(recipe), free_port()
    nodes: dict[str, Child] = {}
    with SuperLink(folder / "flower", "127.0.0.1", port) as link, ExitStack() as stack:
        for number in range(count):
            name = client_name(number, count)
            site = SiteFile(name=name, share=number, folder=(folder / "sites" / name).resolve(), local=recipe.local)
            nodes[name] = supernode(f"127.0.0.1:{port}", write_site(site)).start()
            stack.callback(nodes[name].stop)
        print_line(
            f"{count} sites and a server on this machine, port {port}; not encrypted, it never leaves the machine"
        )
        _watch(_start_run(link, recipe, folder, count), folder, print_line, nodes)


def num_sites(recipe: Recipe) -> int:
    """The number of clients of the recipe's partition; if it has none, the number of groups in the data."""
    from oneround.data import load_dataset, partitions

    partition = partitions.of(recipe.partition)
    if partition.clients is not None:  # known without reading any image
        return partition.clients
    return partition.num_clients(load_dataset(recipe.data, recipe.local.data_path))


def run_client(site: SiteFile, server: str, keys: KeyFolder | None, print_line: PrintLine) -> None:
    """Take part until the server has counted the upload, or says why not."""
    assert site.folder is not None
    if site.data and ":" not in site.data and not Path(site.data).exists():
        raise DataError(f"--data {site.data}: no such file or folder")
    credentials = (keys.ca, keys.private(site.name)) if keys else None
    _check_admission(server, credentials, print_line)
    node = supernode(server, write_site(site), credentials)
    refusal, log, before = site.folder / REFUSED, Tail(site.folder / "site.log"), _verdicts(site.folder)
    started = waiting_since = time.monotonic()
    node.start()
    print_line(f"{site.name}: connecting to {server}")
    try:
        while True:
            refused, verdicts = refusal.exists(), _verdicts(site.folder) - before
            if log.show(
                print_line
            ):  # after the check for the files that end the command: what led to them is in the log
                waiting_since = 0.0
            if refused or verdicts:
                _finish_replies(node)  # so that the server receives them
                if refused:
                    raise RunError(json.loads(refusal.read_text(encoding="utf-8"))["error"])
                for path, _ in verdicts:
                    verdict = json.loads(path.read_text(encoding="utf-8"))
                    if verdict["counted"] != "yes":
                        raise RunError(verdict["text"])
                return
            if node.ended:
                _restart(node, site, time.monotonic() - started, print_line)
            if waiting_since and time.monotonic() - waiting_since > SILENCE:
                print_line(
                    f"{site.name}: no message from the server for {duration(SILENCE)}; still waiting (is its run over?)"
                )
                waiting_since = 0.0
            time.sleep(0.5)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command resumes") from None
    finally:
        node.stop()


def write_site(site: SiteFile) -> Path:
    """Write the site's file into its folder, for its SuperNode; remove the refusal of an earlier start."""
    assert site.folder is not None
    site.folder.mkdir(parents=True, exist_ok=True)
    (site.folder / REFUSED).unlink(missing_ok=True)
    path = site.folder / "site.yaml"
    path.write_text(yaml.safe_dump(site.model_dump(mode="json"), sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


class Tail:
    """New entries of a log, without their time stamps."""

    STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d+)? ([A-Z]+) ", re.MULTILINE)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = path.stat().st_size if path.exists() else 0

    def show(self, print_line: PrintLine) -> bool:
        """Print the new entries except errors, which the caller raises; returns whether there are new entries."""
        entries = self.entries()
        for level, text in entries:
            if level != "ERROR":
                for line in (text if level in ("INFO", "") else f"{level} {text}").split("\n"):
                    print_line(line)
        return bool(entries)

    def entries(self) -> list[tuple[str, str]]:
        """Level and text of the new entries. A line without a time stamp belongs to the entry before it.

        The level is empty where there is no such entry, as in a log that another program wrote.
        """
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.at)
            fresh = file.read()
        complete = fresh[: fresh.rfind(b"\n") + 1]
        self.at += len(complete)
        before, *parts = self.STAMP.split(complete.decode(errors="replace"))
        entries = [("", before), *zip(parts[::2], parts[1::2], strict=True)]
        return [(level, text.removesuffix("\n")) for level, text in entries if text]


def _start_run(link: SuperLink, recipe: Recipe, folder: Path, sites: int | None = None) -> Child:
    """Start the server's run; `sites`: their number where no other can connect."""
    recipe_file = folder / "flower" / "asked.yaml"
    recipe_file.write_text(recipe.to_yaml(), encoding="utf-8")
    (folder / OUTCOME).unlink(missing_ok=True)  # of an earlier start
    config: dict[str, str | float] = {"recipe": str(recipe_file.resolve()), "out": str(folder.resolve())}
    if sites is not None:
        config["sites"] = sites
    return link.run(write_app(folder / "flower" / "app"), config)


def _watch(run: Child, folder: Path, print_line: PrintLine, nodes: Mapping[str, Child] = MappingProxyType({})) -> None:
    """Show the server's log until the run ends. How it ended is in `outcome.json`, which the ServerApp writes last.

    `nodes`: the sites' processes, where they are this command's: one that ends is started again, up to `MOST_STARTS` times.
    """
    starts = Counter[str]()
    log, resumption = Tail(folder / "run.log"), f"continue with the same command and --out {folder}"
    try:
        while True:
            ended = run.ended
            log.show(print_line)
            if ended:
                break
            for name, node in nodes.items():
                if node.ended:
                    starts[name] += 1
                    output = " ".join(node.read_output().split())[-300:]
                    if starts[name] == MOST_STARTS:
                        raise RunError(f"{name}: its process ended {MOST_STARTS} times ({output}); {resumption}")
                    print_line(f"{name}: its process ended, started again")
                    node.start()
            time.sleep(0.3)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; uploads are kept, {resumption}") from None
    finally:
        run.stop()
    outcome = json.loads((folder / OUTCOME).read_text(encoding="utf-8")) if (folder / OUTCOME).exists() else {}
    if "error" in outcome:
        raise RunError(outcome["error"])
    if not outcome.get("ok"):
        raise RunError(f"the server's process ended without a result; {run.output} says more; {resumption}")


def _check_admission(server: str, credentials: tuple[Path, Path] | None, print_line: PrintLine) -> None:
    """Refuse an address or credentials that the server would not accept."""
    host, colon, port = server.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise DataError(f"--server {server}: write it as HOST:PORT, the port from 1 to 65535")
    if credentials is None:
        if not is_loopback(host):
            raise DataError(
                f"--insecure with --server {server}: only on this machine (127.0.0.1); otherwise give --keys"
            )
        if speaks_tls(server):
            raise DataError(f"--insecure with --server {server}: it is encrypted and asks for keys; give --keys FOLDER")
        return
    for file, description in zip(credentials, ("the server's ca.crt", "the site's private key"), strict=True):
        if not file.is_file():
            raise DataError(f"{file}: no such file; it is {description}")
    authority, _ = credentials
    check_dates(authority, "ask the server's operator for the present ca.crt")
    if message := check_server_at(server, authority):
        print_line(message)


def _verdicts(folder: Path) -> set[tuple[Path, int]]:
    """The files of the server's verdicts so far, with their modification times."""
    return {(path, path.stat().st_mtime_ns) for path in folder.glob("*/counted.json")}


def _finish_replies(node: Child) -> None:
    """Wait until the SuperNode has sent all its replies: the server keeps polling for one that is announced and never sent."""
    until = time.monotonic() + REPLY_TIMEOUT
    while not node.ended and not replies_sent(node.read_output()) and time.monotonic() < until:
        time.sleep(0.1)


def replies_sent(output: str) -> bool:
    """Whether a SuperNode has replied to all messages it received, according to its output."""
    _, _, after = output.rpartition("Sending: ")
    closed = any(phrase in after for phrase in ("Sent successfully", "Failed to send", "Ignoring reply"))
    return output.count("Receiving: ") <= output.count("Sending: ") and (closed or "Sending: " not in output)


def _restart(node: Child, site: SiteFile, seconds: float, print_line: PrintLine) -> None:
    """Restart a SuperNode that the server refused because it still holds the connection of a killed one; else raise why it ended.

    Flower refuses an unknown key with the same message; a site that was accepted from this folder before has a known key.
    """
    output = " ".join(node.read_output().split())
    if "Failed to activate SuperNode" not in output:
        raise RunError(f"{site.name}: the connection ended: {output[-300:]}")
    if ACCEPTED not in node.output.read_text(errors="replace"):
        raise DataError(
            f"{site.name}: the server does not know this key, or a site with it is connected already; "
            "give its operator the file that ends in .pub, or end the other one"
        )
    if seconds > RECONNECT_TIMEOUT:
        raise RunError(
            f"{site.name}: the server still holds the connection this site had before, after {duration(seconds)}; "
            "does this site run in another process?"
        )
    print_line(f"{site.name}: the server still holds the connection this site had before; trying again")
    time.sleep(5)
    node.start()
