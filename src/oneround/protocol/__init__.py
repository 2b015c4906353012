"""The three messages of one-shot learning and how they are written, read and checked."""

from oneround.protocol.messages import Broadcast, Upload, UploadFolder
from oneround.protocol.model import GlobalModel

__all__ = ["Broadcast", "GlobalModel", "Upload", "UploadFolder"]
