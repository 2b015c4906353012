"""The messages of one-shot learning, and how they are written, read and checked."""

from oneround.protocol.messages import Broadcast, Upload, UploadFolder

__all__ = ["Broadcast", "Upload", "UploadFolder"]
