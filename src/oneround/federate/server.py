"""The ServerApp: one broadcast down to every site, one upload up, each checked and written the moment it arrives; for every round.

It pushes and pulls messages itself. A reply is pulled alone, so that one upload at a time is in memory, and nothing waits for the
slowest site. Flower hands an instruction out once: a site killed after taking it never answers. So a site that is silent for a
while gets a short question behind its instruction; sites answer in order, and an answer to the question without an upload before
it means that the instruction is lost, and it is pushed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Context, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from oneround.closing import logging_to
from oneround.data import load_dataset
from oneround.errors import OneroundError, ProtocolError, RecipeError
from oneround.federate.carrying import COUNTED, STANDING, TRAIN, blob_of, parcel, words_of
from oneround.federate.reception import Desk, Verdict
from oneround.folder import RunFolder
from oneround.reading import load
from oneround.recipe import Recipe

app = ServerApp()
log = logging.getLogger("oneround")

MONTH = 30 * 24 * 3600.0  # how long a message is valid; when to stop waiting is the recipe's to say
TRIES = 3  # how often a site whose process dies is asked


@app.main()
def main(grid: Grid, context: Context) -> None:
    """`recipe` and `out` in the run config say what to do and where to keep it."""
    told = context.run_config
    if not told.get("recipe") or not told.get("out"):
        raise RecipeError("the run config needs recipe (a file or preset) and out (a folder), both with whole paths")
    pace = Pace(float(told.get("poll", 0.5)), float(told.get("patience", 30.0)), float(told.get("farewell", 20.0)))
    serve(grid, load(str(told["recipe"])), Path(str(told["out"])), pace)


@dataclass(frozen=True)
class Pace:
    """How often the server looks, in seconds."""

    poll: float = 0.5
    patience: float = 30.0
    """Silence after which a site is asked whether it still has its instruction."""
    farewell: float = 20.0
    """How long the end waits until sites have heard that they are counted."""


def serve(grid: Grid, recipe: Recipe, folder: Path, pace: Pace) -> None:
    """A whole federation from the server's side; started again it goes on with the uploads it has."""
    place = RunFolder(folder)
    with place.locked(patience=30), logging_to(folder):  # the process of a killed server may take a while to end
        try:
            desk = Desk(recipe, load_dataset(recipe.data, recipe.local.data_path), place)
            while not place.result.exists() or desk.late:
                log.info("waiting for %d of %d uploads", desk.expected - len(desk.held), desk.expected)
                Collection(grid, desk, pace).run()
                desk.conclude()
                if desk.late:
                    break
        except OneroundError as error:
            log.error("%s", error)
            raise


@dataclass
class Asked:
    """One site and where its answer stands."""

    message: str = ""
    """Id of the instruction whose answer is awaited; none if it has answered."""
    since: float = 0.0
    question: str = ""
    """Id of the question behind it."""
    tries: int = 0


@dataclass
class Collection:
    """The exchange of messages until the desk has what it wants."""

    grid: Grid
    desk: Desk
    pace: Pace
    sites: dict[int, Asked] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """Node → whom its key is registered for."""
    farewells: set[str] = field(default_factory=set)

    def run(self) -> None:
        self.key = hashlib.sha256(self.desk.sent).hexdigest()
        while not self.desk.done():
            self._welcome()
            for node, site in list(self.sites.items()):
                try:
                    self._listen(node, site)
                except OneroundError:
                    raise
                except Exception as error:  # whatever one site's messages do to Flower, the others are served
                    self._lost(node, site, f"could not be heard ({_short(error)})")
            self._pull_farewells()
            time.sleep(self.pace.poll)
        until = time.monotonic() + (self.pace.farewell if self.desk.last_round else 0.0)
        while self.farewells and time.monotonic() < until:
            self._pull_farewells()
            time.sleep(self.pace.poll)

    def _welcome(self) -> None:
        """Ask every site that is here and was not asked yet, or was away and is back."""
        for info in self.grid.get_nodes():
            node = info.node_id
            self.names[node] = info.name
            if node not in self.sites and (not self.desk.wanted or not info.name or info.name in self.desk.wanted):
                self.sites[node] = Asked()
                if info.name in self.desk.held:
                    self._say_counted(node, Verdict(info.name, True, f"{info.name}: counted already"))
                else:
                    self._ask(node)

    def _ask(self, node: int) -> None:
        words = {"held": json.dumps(self.desk.held), "wanted": json.dumps(self.desk.wanted)}
        content = parcel(words, self.desk.sent)
        site = self.sites[node]
        site.message, site.question, site.since, site.tries = "", "", time.monotonic(), site.tries + 1
        try:
            site.message = self._push(node, TRAIN, content)
        except Exception as error:  # a site that confirms before it has everything makes Flower fail
            self._lost(node, site, f"could not be asked ({_short(error)})")

    def _push(self, node: int, kind: str, content: object) -> str:
        (sent,) = self.grid.push_messages([Message(content, node, kind, ttl=MONTH)])  # type: ignore[call-overload]
        return str(sent or "")

    def _pull(self, message: str) -> Message | None:
        return next(iter(self.grid.pull_messages([message])), None) if message else None

    def _listen(self, node: int, site: Asked) -> None:
        """The site's answer, if it is there; the question behind it, if it is silent for long."""
        answer = self._pull(site.message)
        if answer is not None:
            site.message = ""
            self._hear(node, site, answer)
            return
        if not site.message or time.monotonic() - site.since < self.pace.patience:
            return
        if not site.question:
            site.question = self._push(node, STANDING, parcel({}))
            return
        lost = self._pull(site.question)
        if lost is not None:
            site.question = ""
            if lost.has_error():
                self._lost(node, site, "is not reachable", gone=True)
            else:
                self._lost(node, site, "has lost its instruction")

    def _hear(self, node: int, site: Asked, answer: Message) -> None:
        if answer.has_error():
            away = answer.error.code == ErrorCode.NODE_UNAVAILABLE
            self._lost(node, site, "went away" if away else f"failed ({_short(answer.error.reason)})", gone=away)
            return
        words = words_of(answer)
        if "refused" in words:
            log.warning("%s", _short(words["refused"], 500))
            return
        sender = self.names.get(node) or f"node {node}"
        if "resting" in words:
            return
        if "held" in words:
            name = words.get("name", sender)
            self._say_counted(node, Verdict(name, True, f"{name}: counted already"))
            return
        try:
            verdict = self.desk.take(blob_of(answer), sender, self.names.get(node, ""))
        except ProtocolError as error:
            verdict = Verdict(sender, False, f"{sender}: {error}")
            log.warning("%s", verdict.text)
        self._say_counted(node, verdict)

    def _lost(self, node: int, site: Asked, why: str, gone: bool = False) -> None:
        """Ask again: at once, or, if the site is gone, when it is back."""
        who = self.names.get(node) or f"node {node}"
        if gone:
            log.warning("%s %s; it is asked again when it is back", who, why)
            del self.sites[node]
        elif site.tries < TRIES:
            log.warning("%s %s; asked again", who, why)
            self._ask(node)
        else:
            log.warning("%s %s; asked %d times, given up", who, why, site.tries)
            site.message = ""

    def _say_counted(self, node: int, verdict: Verdict) -> None:
        if verdict.counted and not self.desk.last_round:
            return  # the next round's broadcast says as much
        words = {"broadcast": self.key, "counted": "yes" if verdict.counted else "no", "text": verdict.text}
        with suppress(Exception):  # that the site hears it is a courtesy
            self.farewells.add(self._push(node, COUNTED, parcel(words)))

    def _pull_farewells(self) -> None:
        for message in list(self.farewells):
            with suppress(Exception):
                if self._pull(message) is None:
                    continue
            self.farewells.discard(message)


def _short(said: object, most: int = 200) -> str:
    return " ".join(str(said).split())[:most]
