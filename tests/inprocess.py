"""Flower without processes: a grid that hands every message to the ClientApp at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from oneround.federate.client_app import app as client_app

Answer = Callable[[Message, Context], Message]


class InProcess(Grid):
    """Nodes by number, each with its node config; `answer` may stand in for the ClientApp to misbehave."""

    def __init__(
        self, nodes: dict[int, dict[str, Any]], names: dict[int, str] | None = None, answer: Answer = client_app
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self.nodes, self.names, self.answer = nodes, names or {}, answer
        self.sent: list[Message] = []
        self.replies: dict[str, Message] = {}

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, name=self.names.get(node, "")) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            key = f"{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = key
            self.sent.append(message)
            node = message.metadata.dst_node_id
            TaskIdentity.node_id = node
            context = Context(run_id=1, node_id=node, node_config=self.nodes[node], state=RecordDict(), run_config={})
            reply = self.answer(message, context)
            if reply is not None:
                self.replies[key] = reply
            yield key

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(key) for key in message_ids if key in self.replies]

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(list(self.push_messages(messages)))
