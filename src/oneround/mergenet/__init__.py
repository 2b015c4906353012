"""MergeNet: knowledge transfer from a large network to a small one through their parameters."""

from oneround.config.sections import Adapter, Pair
from oneround.mergenet.adapter import ParameterAttention
from oneround.mergenet.companion import CompanionNetwork, check_companion
from oneround.mergenet.merger import Merger, check_pairs, chosen_pairs, not_finite
from oneround.mergenet.teacher import Teacher, layout_of, teacher_of

__all__ = [
    "Adapter",
    "CompanionNetwork",
    "Merger",
    "Pair",
    "ParameterAttention",
    "Teacher",
    "check_companion",
    "check_pairs",
    "chosen_pairs",
    "layout_of",
    "not_finite",
    "teacher_of",
]
