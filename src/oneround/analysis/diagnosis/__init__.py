"""Diagnosis of a run by rules; every finding has evidence and advice.

A rule is one function from the record of a run (or from one client of it) to findings, registered in `RULES` with its
precondition. The same rules are applied to a folder on disk and to a run that is still training.
"""

from oneround.analysis.diagnosis import alignment, clients, gradients, outcome
from oneround.analysis.diagnosis.rules import RULES, SEVERITIES, Finding, findings

__all__ = ["RULES", "SEVERITIES", "Finding", "alignment", "clients", "findings", "gradients", "outcome"]
