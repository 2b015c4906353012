"""Networks: encoders, the clients' prototype network, fixed features and inference modules."""

from oneround.models.encoders import encoders
from oneround.models.features import features
from oneround.models.inference import Ensemble, Expert, Inference, Single
from oneround.models.prototype import PrototypeNet, initialise

__all__ = [
    "Ensemble",
    "Expert",
    "Inference",
    "PrototypeNet",
    "Single",
    "encoders",
    "features",
    "initialise",
]
