"""Knowledge from a large network into a small one through their parameters (MergeNet)."""

from oneround.mergenet.adapter import Adapter, ParameterAttention
from oneround.mergenet.merger import Merger, Pair, as_matrix, check_pairs, chosen_pairs
from oneround.mergenet.single import Beside
from oneround.mergenet.teacher import Larger, Teacher, layout_of, teacher_of

__all__ = [
    "Adapter",
    "Beside",
    "Larger",
    "Merger",
    "Pair",
    "ParameterAttention",
    "Teacher",
    "as_matrix",
    "check_pairs",
    "chosen_pairs",
    "layout_of",
    "teacher_of",
]
