"""Knowledge from a large network into a small one through their parameters (MergeNet)."""

from oneround.mergenet.adapter import Adapter, ParameterAttention
from oneround.mergenet.merger import Merger, Pair, as_matrix, default_pairs
from oneround.mergenet.single import Beside
from oneround.mergenet.teacher import Teacher, kept_by, teacher_of

__all__ = [
    "Adapter",
    "Beside",
    "Merger",
    "Pair",
    "ParameterAttention",
    "Teacher",
    "as_matrix",
    "default_pairs",
    "kept_by",
    "teacher_of",
]
