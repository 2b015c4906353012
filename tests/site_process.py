"""A site that answers one message in a process of its own, as under Flower."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from oneround import sums
from oneround.federate.client_app import app as client_app
from oneround.federate.messages import KEY, blob_of, fields_of, pack_message
from oneround.processes import forked_from, hidden_main


def in_a_process(node: dict[str, Any], kind: str, raw: bytes, answer: Path, killed: bool = False) -> int | None:
    """Let a site answer one message in a process of its own, as Flower does; `killed`: in the middle of its sums."""
    with hidden_main():
        process = forked_from("oneround.cli").Process(target=_answer, args=(node, kind, raw, answer, killed))
        process.start()
        process.join(120)
    return process.exitcode


def _answer(node: dict[str, Any], kind: str, raw: bytes, answer: Path, killed: bool) -> None:
    torch.set_num_threads(1)
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 10
    if killed:
        sums.gather = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    message = Message(pack_message({"run": raw.decode()}) if kind == KEY else pack_message({}, raw), 10, kind)
    message.metadata.__dict__["_message_id"] = "1"
    reply = client_app(message, Context(run_id=1, node_id=10, node_config=node, state=RecordDict(), run_config={}))
    answer.write_bytes(fields_of(reply)["key"].encode() if kind == KEY else blob_of(reply))
