"""A message carries a few text fields and one file; whatever else somebody sends is left out or refused."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from oneround.errors import ProtocolError
from oneround.federate.messages import FIELDS, TRAIN, blob_of, fields_of, pack_message


@pytest.fixture(autouse=True)
def in_a_flower_run() -> None:
    """Flower makes messages only for a run."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


def test_fields_and_file_come_out_as_they_went_in() -> None:
    message = Message(pack_message({"name": "hospital-a", "round": "2"}, b"\x00\xffsafetensors"), 1, TRAIN)
    assert fields_of(message) == {"name": "hospital-a", "round": "2"}
    assert blob_of(message) == b"\x00\xffsafetensors"


def test_a_message_without_a_file_is_refused_in_words() -> None:
    with pytest.raises(ProtocolError, match="no safetensors file in the message"):
        blob_of(Message(pack_message({"name": "a"}), 1, TRAIN))


def test_what_is_no_text_is_left_out() -> None:
    message = Message(RecordDict({FIELDS: ConfigRecord({"name": "a", "size": 3, "raw": b"x", "list": [1]})}), 1, TRAIN)
    assert fields_of(message) == {"name": "a"}
    assert fields_of(Message(RecordDict(), 1, TRAIN)) == {}
