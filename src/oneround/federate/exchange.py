"""One question to every site and its answer, however long that takes and whatever happens to the sites meanwhile.

It pushes and pulls messages itself. A reply is pulled alone and only once all of it is at the SuperLink, so one upload at a time
is in memory. Nothing waits for the slowest site, nor for one that announced a reply and never sent it. Flower delivers a question
once: a site killed after taking it never answers. So a silent site is asked for a sign of life. Sites answer in order: a sign of life
without an answer before it means that the question is lost, and it is pushed again.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.superlink.grid.http_grid import HttpGrid

from oneround.errors import OneroundError, printable
from oneround.federate.messages import STANDING, fields_of, pack_message

log = logging.getLogger("oneround")

MONTH = 30 * 24 * 3600.0  # how long a message is valid; the recipe's deadline ends the waiting
TRIES = 3  # how often a site whose process dies is asked


@dataclass(frozen=True)
class Pace:
    """Waiting times of the server, in seconds."""

    poll: float = 0.5
    """Polling interval."""
    patience: float = 30.0
    """Silence after which a site is pinged, to learn whether its question was lost."""
    farewell: float = 20.0
    """Longest wait at the end for sites to confirm that they received the verdict."""


class NotYetSent(Exception):
    """A part of a reply is announced but not at the SuperLink."""


@dataclass
class Announced:
    """A reply that the SuperLink has announced, of which parts may still be missing."""

    message: str
    """Its id."""
    parts: list[str]
    """Ids of its objects, in the order in which a site sends them."""
    missing: str
    """The part to look for first."""


class ReplyPuller:
    """Pulls a reply when all of it has arrived, and never waits for the rest of one.

    `HttpGrid.pull_messages` asks for an announced object again and again, until the SuperLink gives its sender up after 180 s. Here
    a look at a missing part is one short request. A reply whose sender is given up becomes an error, as there. Parts are pulled one
    by one in the calling thread: Flower interrupts it when the SuperLink is gone, and a thread that waits for others does not notice.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.announced: dict[str, Announced] = {}
        """By the id of the message that is replied to."""

    def pull(self, message: str) -> Message | Error | None:
        """The reply to this message, the error it carries, or None until all of it is there."""
        if isinstance(self.grid, HttpGrid):
            reply = self._pull_if_whole(self.grid, message)
        else:
            reply = next(iter(self.grid.pull_messages([message])), None)
        return reply.error if isinstance(reply, Message) and reply.has_error() else reply

    def drop(self, message: str) -> None:
        """Stop waiting for this reply."""
        self.announced.pop(message, None)

    def _pull_if_whole(self, grid: HttpGrid, message: str) -> Message | Error | None:
        reply = self.announced.pop(message, None) or self._announced(grid, message)
        if reply is None:
            return None
        try:
            return self._pulled(grid, reply)
        except NotYetSent:
            self.announced[message] = reply
            return None
        except ObjectPullError as error:
            return Error(ErrorCode.MESSAGE_UNAVAILABLE, f"announced a reply and did not send it all; {error}")

    def _announced(self, grid: HttpGrid, message: str) -> Announced | None:
        """Ids of the reply and of its parts, which the SuperLink hands out once."""
        response = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=[message]))
        for proto, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            parts = [part.object_id for part in iterate_object_tree(tree)]
            return Announced(proto.metadata.message_id, parts, missing=parts[-1])
        return None

    def _pulled(self, grid: HttpGrid, reply: Announced) -> Message:
        assert grid._run is not None
        client, run_id = grid._runtime_client, grid._run.run_id
        fetch = make_pull_object_fn_protobuf(client.PullObject, grid.node, run_id)

        def pull_part(part: str) -> bytes:
            try:
                return fetch(part)
            except ObjectUnavailableError:
                reply.missing = part
                raise NotYetSent from None

        pull_part(reply.missing)  # the last one sent: while it is not there, nothing else is fetched
        contents = {part: pull_part(part) for part in reply.parts}
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=grid.node, run_id=run_id, message_object_id=reply.message)
        )
        message = inflate_object_from_contents(reply.message, contents)
        if not isinstance(message, Message):
            raise TypeError(f"the reply is a {type(message).__name__}, no message")
        message.metadata.__dict__["_message_id"] = reply.message
        return message


@dataclass
class PendingReply:
    """The state of one site's answer."""

    message: str = ""
    """Id of the message whose answer is awaited; none if it has answered."""
    since: float = 0.0
    sign: str = ""
    """Id of the question for a sign of life behind it."""
    tries: int = 0


class Exchange(ABC):
    """Asks sites and takes their answers; each kind of exchange defines which sites it asks, what, and how it takes an answer."""

    kind: ClassVar[str]
    """Type of the message that asks."""

    def __init__(self, grid: Grid, pace: Pace) -> None:
        self.grid, self.pace, self.replies = grid, pace, ReplyPuller(grid)
        self.pending: dict[int, PendingReply] = {}
        self.names: dict[int, str] = {}
        """Node → the site its key is registered for."""
        self.closing = False
        """Whether the exchange is done and nobody is asked again."""

    @abstractmethod
    def done(self) -> bool:
        """Whether to stop waiting."""

    @abstractmethod
    def greet(self, node: int, name: str) -> None:
        """Called when a site connects: send it the question unless it has answered. `name` is empty where keys are not registered."""

    @abstractmethod
    def question(self) -> RecordDict:
        """Content of the message that asks."""

    @abstractmethod
    def take(self, node: int, fields: dict[str, str], answer: Message) -> None:
        """Handle a site's answer and its fields; failures and refusals do not get here."""

    def meanwhile(self) -> None:  # noqa: B027 — not every exchange has something to do
        """Hook: called once per polling interval."""

    def run(self) -> None:
        """Ask and take answers until the exchange is done; answers that have arrived since the last look count too."""
        while not self.done():
            self._welcome()
            self._look(self._listen)
            self.meanwhile()
            time.sleep(self.pace.poll)
        self.closing = True
        self._look(self._heard)

    def _look(self, listen: Callable[[int, PendingReply], object]) -> None:
        """Poll every site; an exception caused by one site's messages does not stop the others."""
        for node, pending in list(self.pending.items()):
            try:
                listen(node, pending)
            except OneroundError:
                raise
            except Exception as error:
                self._lost(node, pending, f"sent a reply that could not be read ({printable(str(error))})")

    def ask(self, node: int) -> None:
        pending = self.pending[node]
        self.replies.drop(pending.message)
        self.replies.drop(pending.sign)
        pending.message, pending.sign, pending.since, pending.tries = "", "", time.monotonic(), pending.tries + 1
        try:
            pending.message = self.push(node, self.kind, self.question())
        except Exception as error:  # a site that confirms before it has everything makes Flower fail
            self._lost(node, pending, f"could not be asked ({printable(str(error))})")

    def push(self, node: int, kind: str, content: RecordDict) -> str:
        (sent,) = self.grid.push_messages([Message(content, node, kind, ttl=MONTH)])
        return str(sent or "")

    def pull(self, message: str) -> Message | Error | None:
        """The reply to this message if all of it is here, or its error. Never waits."""
        return self.replies.pull(message) if message else None

    def sender(self, node: int) -> str:
        return self.names.get(node) or f"node {node}"

    def _welcome(self) -> None:
        """Handle sites that have connected or reconnected: ask them (again), or send the verdict again."""
        nodes = list(self.grid.get_nodes())
        present = {info.node_id for info in nodes}
        for node in [node for node, pending in self.pending.items() if not pending.message and node not in present]:
            del self.pending[node]
        for info in nodes:
            self.names[info.node_id] = info.name
            if info.node_id not in self.pending:
                self.pending[info.node_id] = PendingReply()
                self.greet(info.node_id, info.name)

    def _listen(self, node: int, pending: PendingReply) -> None:
        """Take the site's answer if it is here; ask a site that has been silent for long for a sign of life."""
        if self._heard(node, pending):
            return
        if not pending.message or time.monotonic() - pending.since < self.pace.patience:
            return
        if not pending.sign:
            pending.sign = self.push(node, STANDING, pack_message({}))
            return
        sign = self.pull(pending.sign)
        if sign is not None and not self._heard(node, pending):  # it answers in order: what came before is here too
            pending.sign = ""
            gone = isinstance(sign, Error)
            self._lost(node, pending, "is not reachable" if gone else "has lost its instruction", gone)

    def _heard(self, node: int, pending: PendingReply) -> bool:
        """Take the site's answer; False if it is not here."""
        answer = self.pull(pending.message)
        if answer is None:
            return False
        pending.message = ""
        if isinstance(answer, Error):
            away = answer.code == ErrorCode.NODE_UNAVAILABLE
            self._lost(node, pending, "went away" if away else f"failed ({printable(str(answer.reason))})", away)
        elif refused := fields_of(answer).get("refused"):
            log.warning("%s; it is asked again when it comes back", printable(refused, 500))
        else:
            self.take(node, fields_of(answer), answer)
        return True

    def _lost(self, node: int, pending: PendingReply, why: str, gone: bool = False) -> None:
        """Ask again: at once, or, if the site is gone, when it is back; not at all once the exchange is done."""
        sender = self.sender(node)
        if self.closing:
            log.warning("%s %s", sender, why)
        elif gone:
            log.warning("%s %s; it is asked again when it is back", sender, why)
            self.replies.drop(pending.message)
            del self.pending[node]
        elif pending.tries < TRIES:
            log.warning("%s %s; asked again", sender, why)
            self.ask(node)
        else:
            log.warning(
                "%s %s; no answer after %d attempts, asked again when it reconnects", sender, why, pending.tries
            )
            pending.message = ""
