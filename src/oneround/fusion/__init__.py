"""Fusion rules, from uploads to a model: one file per rule, named like its kind."""

from oneround.fusion.base import EnsembleRule, Rule, UploadExperts, rules

__all__ = ["EnsembleRule", "Rule", "UploadExperts", "rules"]
