"""Packs a blob and a few text fields into a Flower message, and unpacks them."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from oneround.errors import ProtocolError

BLOB = "blob"  # Flower sends arrays in chunks, so one byte array may have any size
FIELDS = "words"  # the record's name in the message

TRAIN = "train"
COUNTED = "query.counted"
STANDING = "query.standing"
KEY = "query.key"


def pack_message(fields: dict[str, str], blob: bytes = b"") -> RecordDict:
    """The content of a message."""
    records = RecordDict({FIELDS: ConfigRecord(dict(fields))})
    if blob:
        records[BLOB] = ArrayRecord({BLOB: Array("uint8", (len(blob),), "safetensors", blob)})
    return records


def fields_of(message: Message) -> dict[str, str]:
    """The text fields of a message from anybody; values of other types are left out."""
    record = message.content.config_records.get(FIELDS, ConfigRecord())
    return {key: value for key, value in record.items() if isinstance(value, str)}


def blob_of(message: Message) -> bytes:
    """The blob, or a `ProtocolError`."""
    try:
        return message.content.array_records[BLOB][BLOB].data
    except KeyError:
        raise ProtocolError("refused, there is no safetensors file in the message") from None
