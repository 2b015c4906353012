"""One instruction to every site and its reply, however long that takes, even if sites fail or disconnect in between.

Messages are pushed and pulled here, not by a Flower strategy. A reply is pulled alone and only once all of it is at the SuperLink, so one
upload at a time is in memory. Nothing waits for the slowest site, nor for one that announced a reply and never sent it. Flower delivers an
instruction once: a site killed after taking it never replies. So a silent site is pinged. Sites reply in order: a reply to the ping without
one to the instruction means that the instruction is lost, and it is pushed again.
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

MONTH = 30 * 24 * 3600.0  # seconds that a message is valid; the recipe's deadline ends the waiting
MAX_TRIES = 3  # how often a site whose process dies gets the instruction


@dataclass(frozen=True)
class Pace:
    """Waiting times of the server, in seconds."""

    poll: float = 0.5
    """Polling interval."""
    patience: float = 30.0
    """Silence after which a site is pinged, to learn whether its instruction is lost."""
    farewell: float = 20.0
    """Longest wait at the end for sites to confirm that they received the verdict."""


@dataclass
class AnnouncedReply:
    """A reply that the SuperLink has announced, of which parts may still be missing."""

    message: str
    """Its id."""
    parts: list[str]
    """Ids of its objects, in the order in which a site sends them."""
    missing: str
    """The part to pull first."""


class ReplyPuller:
    """Pulls a reply when all of it has arrived, and never waits for the rest of one.

    `HttpGrid.pull_messages` polls for an announced object until the SuperLink gives its sender up after 180 s. Here a poll for a missing
    part is one short request. A reply whose sender is given up becomes an error, as there. Parts are pulled one by one in the calling
    thread: Flower interrupts it when the SuperLink is gone, and a thread that waits for other threads does not notice.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.announced: dict[str, AnnouncedReply] = {}
        """By the id of the message that is replied to."""

    def pull(self, message: str) -> Message | Error | None:
        """The reply to this message or the error it carries; None until all of it has arrived."""
        if isinstance(self.grid, HttpGrid):
            reply = self._pull_if_whole(self.grid, message)
        else:
            reply = next(iter(self.grid.pull_messages([message])), None)
        return reply.error if isinstance(reply, Message) and reply.has_error() else reply

    def drop(self, message: str) -> None:
        """Stop waiting for this reply."""
        self.announced.pop(message, None)

    def _pull_if_whole(self, grid: HttpGrid, message: str) -> Message | Error | None:
        reply = self.announced.pop(message, None) or self._find_announced(grid, message)
        if reply is None:
            return None
        try:
            return self._pull_parts(grid, reply)
        except ObjectUnavailableError:  # announced, and not yet at the SuperLink
            self.announced[message] = reply
            return None
        except ObjectPullError as error:
            return Error(ErrorCode.MESSAGE_UNAVAILABLE, f"announced a reply and did not send it all; {error}")

    def _find_announced(self, grid: HttpGrid, message: str) -> AnnouncedReply | None:
        """Ids of the reply and of its parts, which the SuperLink gives out once."""
        response = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=[message]))
        for proto, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            parts = [part.object_id for part in iterate_object_tree(tree)]
            return AnnouncedReply(proto.metadata.message_id, parts, missing=parts[-1])
        return None

    def _pull_parts(self, grid: HttpGrid, reply: AnnouncedReply) -> Message:
        """The whole reply; ObjectUnavailableError while a part of it is missing."""
        assert grid._run is not None
        client, run_id = grid._runtime_client, grid._run.run_id
        fetch = make_pull_object_fn_protobuf(client.PullObject, grid.node, run_id)

        def pull_part(part: str) -> bytes:
            reply.missing = part
            return fetch(part)

        pull_part(reply.missing)  # the last one sent: as long as it is missing, nothing else is pulled
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
class SiteStatus:
    """What the server has sent to one site and waits for."""

    message: str = ""
    """Id of the instruction whose reply is pending; empty if none is."""
    sent_at: float = 0.0
    ping: str = ""
    """Id of the ping sent after it."""
    tries: int = 0


class Exchange(ABC):
    """Sends sites an instruction and handles their replies; each kind of exchange defines which sites, what, and how."""

    kind: ClassVar[str]
    """Message type of the instruction."""

    def __init__(self, grid: Grid, pace: Pace, num_nodes: int | None = None) -> None:
        """`num_nodes`: the number of sites where no other can connect and none is repaired meanwhile, as in a federation on one machine."""
        self.grid, self.pace, self.replies, self.num_nodes = grid, pace, ReplyPuller(grid), num_nodes
        self.sites: dict[int, SiteStatus] = {}
        """By node, those that are or were connected."""
        self.names: dict[int, str] = {}
        """Node → the site its key is registered for."""
        self.refusals: dict[int, str] = {}
        """Node → why nothing more is expected of it; it is asked again when it comes back."""
        self.closing = False
        """Whether the exchange is done and nothing is sent again."""

    @abstractmethod
    def done(self) -> bool:
        """Whether to stop waiting."""

    @abstractmethod
    def on_connect(self, node: int, name: str) -> None:
        """Called when a site connects: instruct it unless it has replied. `name` is empty where keys are not registered."""

    @abstractmethod
    def instruction(self) -> RecordDict:
        """Content of the instruction."""

    @abstractmethod
    def on_reply(self, node: int, fields: dict[str, str], reply: Message) -> None:
        """Handle a site's reply and its fields; errors and refusals are handled before."""

    def on_poll(self) -> None:  # noqa: B027 — not every exchange has something to do
        """Called once per polling interval."""

    def run(self) -> None:
        """Instruct sites and handle replies until the exchange is done; replies that have arrived since the last poll count too."""
        while not self.done() and not self.deserted:
            self._check_connections()
            self._poll_sites(self._poll_site)
            self.on_poll()
            time.sleep(self.pace.poll)
        self.closing = True
        self._poll_sites(self._receive)

    @property
    def deserted(self) -> bool:
        """Whether waiting is in vain: no site can come that is not here, and nothing more is expected of those that are."""
        return (
            self.num_nodes is not None
            and len(self.sites) >= self.num_nodes
            and not any(site.message for site in self.sites.values())
        )

    def _poll_sites(self, poll: Callable[[int, SiteStatus], object]) -> None:
        """Call `poll` for every site; an exception caused by one site's messages does not stop the others."""
        for node, site in list(self.sites.items()):
            try:
                poll(node, site)
            except OneroundError:
                raise
            except Exception as error:
                self._on_failure(node, site, f"sent a reply that could not be read ({printable(str(error))})")

    def instruct(self, node: int) -> None:
        """Send the instruction; a pending reply to an earlier one is ignored."""
        site = self.sites[node]
        self.refusals.pop(node, None)
        self.replies.drop(site.message)
        self.replies.drop(site.ping)
        site.message, site.ping, site.sent_at, site.tries = "", "", time.monotonic(), site.tries + 1
        try:
            site.message = self.push(node, self.kind, self.instruction())
        except Exception as error:  # a site that confirms before it has everything makes Flower fail
            self._on_failure(node, site, f"could not be asked ({printable(str(error))})")

    def push(self, node: int, kind: str, content: RecordDict) -> str:
        (sent,) = self.grid.push_messages([Message(content, node, kind, ttl=MONTH)])
        return str(sent or "")

    def pull(self, message: str) -> Message | Error | None:
        """The reply to this message or its error; None until all of it has arrived, and without a message. Never waits."""
        return self.replies.pull(message) if message else None

    def sender(self, node: int) -> str:
        return self.names.get(node) or f"node {node}"

    def _check_connections(self) -> None:
        """Call `on_connect` for sites that have connected or reconnected; forget those that replied and left."""
        nodes = list(self.grid.get_nodes())
        connected = {info.node_id for info in nodes}
        for node in [node for node, site in self.sites.items() if not site.message and node not in connected]:
            del self.sites[node]
        for info in nodes:
            self.names[info.node_id] = info.name
            if info.node_id not in self.sites:
                self.sites[info.node_id] = SiteStatus()
                self.on_connect(info.node_id, info.name)

    def _poll_site(self, node: int, site: SiteStatus) -> None:
        """Handle the site's reply if it has arrived; ping a site that has been silent for long."""
        if self._receive(node, site):
            return
        if not site.message or time.monotonic() - site.sent_at < self.pace.patience:
            return
        if not site.ping:
            site.ping = self.push(node, STANDING, pack_message({}))
            return
        answer = self.pull(site.ping)
        if answer is not None and not self._receive(node, site):  # it replies in order: an earlier reply is here too
            site.ping = ""
            gone = isinstance(answer, Error)
            self._on_failure(node, site, "is not reachable" if gone else "has lost its instruction", gone)

    def _receive(self, node: int, site: SiteStatus) -> bool:
        """Handle the site's reply; False if it has not arrived."""
        reply = self.pull(site.message)
        if reply is None:
            return False
        site.message = ""
        if isinstance(reply, Error):
            gone = reply.code == ErrorCode.NODE_UNAVAILABLE
            self._on_failure(node, site, "went away" if gone else f"failed ({printable(str(reply.reason))})", gone)
        elif refused := fields_of(reply).get("refused"):
            self.refusals[node] = printable(refused, 500)
            log.warning("%s%s", self.refusals[node], self._unless_closed("; it is asked again when it comes back"))
        else:
            self.on_reply(node, fields_of(reply), reply)
        return True

    def _on_failure(self, node: int, site: SiteStatus, reason: str, gone: bool = False) -> None:
        """Instruct it again: at once, or, if the site is gone, when it is back; not at all once the exchange is done."""
        sender = self.sender(node)
        if self.closing:
            log.warning("%s %s", sender, reason)
        elif gone:
            log.warning("%s %s; it is asked again when it is back", sender, reason)
            self.replies.drop(site.message)
            del self.sites[node]
        elif site.tries < MAX_TRIES:
            log.warning("%s %s; asked again", sender, reason)
            self.instruct(node)
        else:
            self.refusals[node] = f"{sender} {reason}; no answer after {site.tries} attempts"
            log.warning("%s%s", self.refusals[node], self._unless_closed(", asked again when it reconnects"))
            site.message = ""

    def _unless_closed(self, prospect: str) -> str:
        """What happens to a site that comes back, where one can."""
        return "" if self.num_nodes is not None else prospect
