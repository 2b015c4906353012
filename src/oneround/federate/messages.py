"""Messages between server and sites: text fields and at most one blob, in Flower's records."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from oneround.errors import ProtocolError

BLOB = "blob"  # Flower sends arrays in chunks, so one byte array may have any size
FIELDS = "words"  # the record's name in the message

# message types, each a function of the ClientApp
TRAIN = "train"
COUNTED = "query.counted"
STANDING = "query.standing"
KEY = "query.key"
HISTOGRAM = "query.histogram"


def pack_message(fields: dict[str, str], blob: bytes = b"") -> RecordDict:
    """The content of a message."""
    records = RecordDict({FIELDS: ConfigRecord(dict(fields))})
    if blob:
        records[BLOB] = ArrayRecord({BLOB: Array("uint8", (len(blob),), "safetensors", blob)})
    return records


def fields_of(message: Message) -> dict[str, str]:
    """The text fields of a message, which may come from anybody; values of other types are left out."""
    record = message.content.config_records.get(FIELDS, ConfigRecord())
    return {key: value for key, value in record.items() if isinstance(value, str)}


def blob_of(message: Message) -> bytes:
    """The blob of a message; ProtocolError if it has none."""
    try:
        return message.content.array_records[BLOB][BLOB].data
    except KeyError:
        raise ProtocolError("refused, there is no safetensors file in the message") from None
