"""From uploads to a model, a file a rule."""

from oneround.fusion import aligned as aligned
from oneround.fusion import average as average
from oneround.fusion import distilled as distilled
from oneround.fusion import ensemble as ensemble
from oneround.fusion import entropy as entropy
from oneround.fusion import iffi as iffi
from oneround.fusion import kernel as kernel
from oneround.fusion import merged as merged
from oneround.fusion import prototypes as prototypes
from oneround.fusion import ridge as ridge
from oneround.fusion import routed as routed
from oneround.fusion import split as split
from oneround.fusion import taught as taught
from oneround.fusion import typicality as typicality
from oneround.fusion.rule import EnsembleRule, Rule, UploadExperts, rules

__all__ = ["EnsembleRule", "Rule", "UploadExperts", "rules"]
