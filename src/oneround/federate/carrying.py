"""How a blob and a few words about it travel in a Flower message."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from oneround.errors import ProtocolError

BLOB = "blob"  # arrays travel in chunks, so one array of bytes may be as large as it likes
WORDS = "words"

TRAIN = "train"
COUNTED = "query.counted"
STANDING = "query.standing"
KEY = "query.key"


def parcel(words: dict[str, str], blob: bytes = b"") -> RecordDict:
    """What a message holds."""
    records = RecordDict({WORDS: ConfigRecord(dict(words))})
    if blob:
        records[BLOB] = ArrayRecord({BLOB: Array("uint8", (len(blob),), "safetensors", blob)})
    return records


def words_of(message: Message) -> dict[str, str]:
    """The words that came along, whoever wrote them: text only, anything else is left out."""
    said = message.content.config_records.get(WORDS, ConfigRecord())
    return {key: value for key, value in said.items() if isinstance(value, str)}


def blob_of(message: Message) -> bytes:
    """The blob, or a `ProtocolError`."""
    try:
        return message.content.array_records[BLOB][BLOB].data
    except KeyError:
        raise ProtocolError("refused, there is no safetensors file in the message") from None
