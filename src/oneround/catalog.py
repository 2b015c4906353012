"""Every built-in part, imported here and nowhere else, so that a recipe finds it by its kind."""
# ruff: noqa: F401

from oneround.data import official, partition
from oneround.fusion import (
    aligned_iffi,
    average,
    distilled,
    dynamic_prototypes,
    entropy_gated,
    feature_vote,
    fedsra,
    iffi,
    informative_iffi,
    logit_ensemble,
    mergenet,
    ridge,
    routed,
    split,
    stacked,
    student,
    taught,
    typicality_gated,
)
from oneround.models import encoders, features, patches, unet
from oneround.training import contrastive, distillation, objective, reference
from oneround.training.alignment import anchors, guards, schedules, weights
