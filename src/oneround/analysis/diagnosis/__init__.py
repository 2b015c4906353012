"""Diagnosis of a run: rules over what its clients measured; every finding with its evidence and advice.

A rule is one function from the record of a run (or from one client of it) to findings, registered in `RULES` with what it
needs. The same rules serve a folder on disk and a run that is still training.
"""

from oneround.analysis.diagnosis import alignment, clients, gradients, outcome
from oneround.analysis.diagnosis.rules import RULES, SEVERITIES, Finding, findings

__all__ = ["RULES", "SEVERITIES", "Finding", "alignment", "clients", "findings", "gradients", "outcome"]
