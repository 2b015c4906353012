"""One question to every site and its answer, however long that takes and whatever becomes of the sites meanwhile.

It pushes and pulls messages itself. A reply is pulled alone, so that one upload at a time is in memory, and nothing waits for the
slowest site. Flower hands a question out once: a site killed after taking it never answers. So a site that is silent for a
while is asked for a sign of life behind it; sites answer in order, and a sign without an answer before it means that the question
is lost, and it is pushed again.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from oneround.errors import OneroundError
from oneround.federate.carrying import STANDING, parcel, words_of

log = logging.getLogger("oneround")

MONTH = 30 * 24 * 3600.0  # how long a message is valid; when to stop waiting is the recipe's to say
TRIES = 3  # how often a site whose process dies is asked


@dataclass(frozen=True)
class Pace:
    """How often the server looks, in seconds."""

    poll: float = 0.5
    patience: float = 30.0
    """Silence after which a site is asked whether it still has its instruction."""
    farewell: float = 20.0
    """How long the end waits until sites have heard that they are counted."""


@dataclass
class Asked:
    """One site and where its answer stands."""

    message: str = ""
    """Id of the message whose answer is awaited; none if it has answered."""
    since: float = 0.0
    sign: str = ""
    """Id of the question for a sign of life behind it."""
    tries: int = 0


class Exchange(ABC):
    """What is asked, whom, and what becomes of an answer, is for each kind of exchange to say."""

    kind: ClassVar[str]
    """Of the message that asks."""

    def __init__(self, grid: Grid, pace: Pace) -> None:
        self.grid, self.pace = grid, pace
        self.sites: dict[int, Asked] = {}
        self.names: dict[int, str] = {}
        """Node → whom its key is registered for."""

    @abstractmethod
    def done(self) -> bool:
        """Whether to stop waiting."""

    @abstractmethod
    def greet(self, node: int, name: str) -> None:
        """A site is here: ask it, unless it need not be asked. Its name is empty where keys are not registered."""

    @abstractmethod
    def question(self) -> RecordDict:
        """What a site is asked."""

    @abstractmethod
    def take(self, node: int, words: dict[str, str], answer: Message) -> None:
        """What a site answered, with the words in it; no failure and no refusal."""

    def meanwhile(self) -> None:  # noqa: B027 — not every exchange has something to do
        """What else there is to do between two looks."""

    def run(self) -> None:
        while not self.done():
            self._welcome()
            for node, site in list(self.sites.items()):
                try:
                    self._listen(node, site)
                except OneroundError:
                    raise
                except Exception as error:  # whatever one site's messages do to Flower, the others are served
                    self._lost(node, site, f"could not be heard ({_short(error)})")
            self.meanwhile()
            time.sleep(self.pace.poll)

    def ask(self, node: int) -> None:
        site = self.sites[node]
        site.message, site.sign, site.since, site.tries = "", "", time.monotonic(), site.tries + 1
        try:
            site.message = self.push(node, self.kind, self.question())
        except Exception as error:  # a site that confirms before it has everything makes Flower fail
            self._lost(node, site, f"could not be asked ({_short(error)})")

    def push(self, node: int, kind: str, content: RecordDict) -> str:
        (sent,) = self.grid.push_messages([Message(content, node, kind, ttl=MONTH)])
        return str(sent or "")

    def pull(self, message: str) -> Message | None:
        return next(iter(self.grid.pull_messages([message])), None) if message else None

    def sender(self, node: int) -> str:
        return self.names.get(node) or f"node {node}"

    def _welcome(self) -> None:
        """Greet every site that is here and was not greeted yet, or was away and is back: to be asked again, or told again."""
        here = list(self.grid.get_nodes())
        present = {info.node_id for info in here}
        for node in [node for node, site in self.sites.items() if not site.message and node not in present]:
            del self.sites[node]
        for info in here:
            self.names[info.node_id] = info.name
            if info.node_id not in self.sites:
                self.sites[info.node_id] = Asked()
                self.greet(info.node_id, info.name)

    def _listen(self, node: int, site: Asked) -> None:
        """The site's answer, if it is there; a sign of life, if it is silent for long."""
        answer = self.pull(site.message)
        if answer is not None:
            site.message = ""
            self._hear(node, site, answer)
            return
        if not site.message or time.monotonic() - site.since < self.pace.patience:
            return
        if not site.sign:
            site.sign = self.push(node, STANDING, parcel({}))
            return
        lost = self.pull(site.sign)
        if lost is not None:
            site.sign = ""
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
            log.warning("%s; it is asked again when it comes back", _short(words["refused"], 500))
            return
        self.take(node, words, answer)

    def _lost(self, node: int, site: Asked, why: str, gone: bool = False) -> None:
        """Ask again: at once, or, if the site is gone, when it is back."""
        who = self.sender(node)
        if gone:
            log.warning("%s %s; it is asked again when it is back", who, why)
            del self.sites[node]
        elif site.tries < TRIES:
            log.warning("%s %s; asked again", who, why)
            self.ask(node)
        else:
            log.warning("%s %s; asked %d times, given up until it comes back", who, why, site.tries)
            site.message = ""


def _short(said: object, most: int = 200) -> str:
    return " ".join(str(said).split())[:most]
