"""Networks: encoders, the clients' prototype network, fixed features and inference modules."""

from oneround.models import patches as patches
from oneround.models.encoders import Encoder, EncoderPart, encoders
from oneround.models.features import Features, FeaturesPart, features
from oneround.models.inference import Ensemble, Expert, Inference, Single
from oneround.models.prototype import PrototypeNet, initialise

__all__ = [
    "Encoder",
    "EncoderPart",
    "Ensemble",
    "Expert",
    "Features",
    "FeaturesPart",
    "Inference",
    "PrototypeNet",
    "Single",
    "encoders",
    "features",
    "initialise",
]
