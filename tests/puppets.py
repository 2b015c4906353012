"""Sites that do not run our ClientApp: they speak Flower's own protocol to a real SuperLink and send whatever they like."""

from __future__ import annotations

import threading
import time

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from oneround.federate.messages import TRAIN, pack_message


class Puppet(threading.Thread):
    """One node. It answers an instruction with these bytes once it may (`ready`), and everything else with nothing."""

    def __init__(self, address: str, answer: bytes, ready: bool = True, rude: bool = False, half: bool = False) -> None:
        """`rude`: says that it has a message before it has fetched it. `half`: announces its answer and sends half of it."""
        super().__init__(daemon=True)
        self.address, self.answer, self.rude = address, answer, rude
        self.half, self.announced = half, threading.Event()
        self.ready, self.ended = threading.Event(), threading.Event()
        if ready:
            self.ready.set()
        self.start()

    def run(self) -> None:
        with http_request_response(self.address, insecure=True) as (_, receive, send, _, _, pull, push, confirm):
            while not self.ended.is_set():
                got = receive()
                if got is None:
                    time.sleep(0.5)  # a dozen of them that ask more often keep the SuperLink from its work
                    continue
                message, tree = got
                if not self.rude:
                    parts, run = [part.object_id for part in iterate_object_tree(tree)], message.metadata.run_id
                    pull_objects(parts, lambda part, run=run: pull(run, part))
                confirm(message.metadata.run_id, message.metadata.message_id)
                train = message.metadata.message_type == TRAIN
                while train and not self.ready.wait(0.1):
                    if self.ended.is_set():
                        return
                self._reply(message, self.answer if train else b"", send, push)

    def _reply(self, message: Message, raw: bytes, send: object, push: object) -> None:
        TaskIdentity.task_id = 1
        reply = Message(pack_message({"name": "puppet"}, raw), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            objects = get_all_nested_objects(reply)
            wanted, session = send(reply, get_object_tree(reply), 0.0)
            sent = [key for key in objects if key in wanted]
            if self.half and raw:
                sent = sent[: len(sent) // 2]
                self.announced.set()
            for key in sent:
                push(message.metadata.run_id, session, key, objects[key].deflate())

    def stop(self) -> None:
        self.ended.set()
        self.join(timeout=10)
