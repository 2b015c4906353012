"""The commands of a federation: how many sites, what is shown of a log, and how a command learns the end."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from conftest import small_recipe
from oneround.config.load import change
from oneround.data import load_dataset
from oneround.errors import RecipeError, RunError
from oneround.federate import launch
from oneround.federate.launch import write_site
from oneround.federate.processes import Child, free_port
from oneround.federate.sites import SiteFile, read_site
from oneround.server.plan import DealtPlan


def test_a_natural_partition_has_a_site_for_every_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`oneround federate local` without partition.clients: the data say how many, as they do in a simulation."""
    random, labels = np.random.RandomState(0), np.arange(40) % 4
    pixels = random.randint(0, 256, (40, 10, 10)).astype(np.uint8)
    arrays = {"x_train": pixels, "y_train": labels, "x_test": pixels[:8], "y_test": labels[:8]}
    np.savez(tmp_path / "mine.npz", **arrays, group_train=np.array(list("abcde"))[np.arange(40) % 5])
    path = str(tmp_path / "mine.npz")
    recipe = small_recipe(data="npz", local__data_path=path, partition={"kind": "natural"})
    assert recipe.partition.clients is None
    started: list[Path] = []
    monkeypatch.setattr(launch, "SuperLink", lambda *args: nullcontext())
    monkeypatch.setattr(launch, "_start_run", lambda *args: None)
    monkeypatch.setattr(launch, "_watch", lambda *args: None)
    monkeypatch.setattr(
        launch, "supernode", lambda server, site_file, *more: started.append(site_file) or MagicMock(Child)
    )
    lines: list[str] = []
    launch.run_local(recipe, tmp_path / "out", lines.append)
    sites = [read_site(file) for file in started]
    plan = DealtPlan.of(recipe, load_dataset(recipe.data, recipe.local.data_path))
    assert {site.name: site.share for site in sites} == plan.clients and len(sites) == 5
    assert lines[0].startswith("5 sites and a server")
    fewer = change(recipe, {"partition.clients": 2})
    assert launch.num_sites(fewer) == 2
    with pytest.raises(RecipeError, match="no group ids"):
        launch.num_sites(small_recipe(partition={"kind": "natural"}))


def test_a_log_is_shown_whole_and_without_times(tmp_path: Path) -> None:
    log = launch.Tail(tmp_path / "run.log")
    assert not log.show(print)
    (tmp_path / "run.log").write_text(
        "from another program\n"
        "2026-01-02 03:04:05,678 INFO one of two\n  two of two, indented\n\nfour words after a blank line\n"
        "2026-01-02 03:04:06,000 WARNING not so good\n2026-01-02 03:04:07,000 ERROR bad\nworse than bad\n2026-01-02 03:04:08,"
    )
    lines: list[str] = []
    assert log.show(lines.append)
    assert lines == [
        "from another program", "one of two", "  two of two, indented", "", "four words after a blank line", "WARNING not so good",
    ]  # fmt: skip
    with (tmp_path / "run.log").open("a") as file:
        file.write("000 INFO INFO is a word\n")
    assert log.entries() == [("INFO", "INFO is a word")]


OUTCOMES: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "ok, whatever the log ends with": ({"ok": True}, None),
    "an error of several lines": ({"error": "first line\nsecond line"}, "first line\nsecond line"),
    "none: the process died": (None, "the server's process ended without a result"),
}


@pytest.mark.parametrize(("outcome", "message"), OUTCOMES.values(), ids=OUTCOMES.keys())
def test_how_a_run_ended_is_read_from_its_outcome(tmp_path: Path, outcome: Any, message: str | None) -> None:
    (tmp_path / "result.json").write_text("{}")  # of an earlier start
    if outcome is not None:
        (tmp_path / "outcome.json").write_text(json.dumps(outcome))

    class Ended(Child):
        @property
        def ended(self) -> bool:
            (tmp_path / "run.log").write_text("2026-01-02 03:04:05,678 ERROR is only a word in a log\n")
            return True

    with pytest.raises(RunError, match=message) if message else nullcontext():
        launch._watch(Ended([], tmp_path, tmp_path / "output.log"), tmp_path, print)


@pytest.mark.processes
def test_a_site_whose_process_ends_is_started_again_and_given_up_in_the_end(tmp_path: Path) -> None:
    def child(name: str, code: str) -> Child:
        return Child([sys.executable, "-c", code], tmp_path, tmp_path / f"{name}.log").start()

    run, node = child("run", "import time; time.sleep(60)"), child("node", "print('the address is in use')")
    lines: list[str] = []
    with pytest.raises(
        RunError, match=r"^client_001: its process ended 3 times \(the address is in use\); continue with"
    ):
        launch._watch(run, tmp_path, lines.append, {"client_001": node})
    assert lines == ["client_001: its process ended, started again"] * 2 and run.ended


@pytest.mark.parametrize("refused", [True, False])
def test_a_site_ends_by_its_refusal_and_not_by_a_word_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    site = SiteFile(name="a", share=0, folder=tmp_path / "a")
    write_site(site)
    (tmp_path / "a" / "refused.json").write_text('{"error": "of an earlier start"}')

    def start() -> None:
        stamp = "2026-01-02 03:04:05,678"
        (tmp_path / "a" / "site.log").write_text(
            f"{stamp} INFO ERROR is a word\n{stamp} ERROR two\nlines\n{stamp} INFO last\n"
        )
        (tmp_path / "a" / "0").mkdir()
        path, content = ("refused.json", {"error": "two\nlines"}) if refused else ("0/counted.json", {"counted": "yes"})
        (tmp_path / "a" / path).write_text(json.dumps(content))

    node = MagicMock(Child, ended=False)
    node.start.side_effect, node.read_output.return_value = start, ""
    monkeypatch.setattr(launch, "supernode", lambda *args: node)
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    lines: list[str] = []
    with pytest.raises(RunError, match=r"^two\nlines$") if refused else nullcontext():
        launch.run_client(site, f"127.0.0.1:{free_port()}", None, lines.append)
    assert lines[1:] == ["ERROR is a word", "last"]
    assert node.stop.called


NODE = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
print("Receiving: query.counted message (ID: 1)", flush=True)
(folder / "run").mkdir()
(folder / "run" / "counted.json").write_text(json.dumps({"counted": "yes", "text": "counted"}))
time.sleep(2)
print("Sending: query.counted message (ID: 2)", flush=True)
time.sleep(1)
(folder / "sent").touch()
print("Sent successfully", flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_site_s_command_ends_after_its_last_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def node(*_: object) -> Child:
        return Child([sys.executable, "-c", NODE, str(tmp_path)], tmp_path / "flower", tmp_path / "node.log")

    monkeypatch.setattr(launch, "supernode", node)
    monkeypatch.setattr(launch, "_check_admission", lambda *_: None)
    launch.run_client(SiteFile(name="a", share=0, folder=tmp_path), "127.0.0.1:1", None, lambda line: None)
    assert (tmp_path / "sent").exists()


def test_replies_a_site_owes() -> None:
    got, sending = "Receiving: train message (ID: 1)\n", "Sending: train message (ID: 2)\n"
    for output, sent in (
        ("", True),
        (got, False),
        (got + sending, False),
        (got + sending + "Sent successfully\n", True),
        (got + sending + "Failed to send message 2: no\n", True),
        (got + sending + "Sent successfully\n" + got, False),
        (got + sending + "Sent successfully\n" + got + sending, False),
    ):
        assert launch.replies_sent(output) == sent, output
