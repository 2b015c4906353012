"""Networks: encoders, the prototype network clients train, and what a global model can be made of."""

from oneround.models.encoders import Encoder, EncoderPart, encoders
from oneround.models.inference import Ensemble, Expert, Inference, Single
from oneround.models.prototype import PrototypeNet, initialise

__all__ = [
    "Encoder",
    "EncoderPart",
    "Ensemble",
    "Expert",
    "Inference",
    "PrototypeNet",
    "Single",
    "encoders",
    "initialise",
]
