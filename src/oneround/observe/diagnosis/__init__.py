"""What went wrong in a run: rules over what its clients measured; every finding with its evidence and advice.

A rule is one function from a run (or from one client of it) to the signs it sees, registered in `RULES` with what it needs to
see anything. The same rules serve a folder on disk and a run that is still training.
"""

from oneround.observe.diagnosis import alignment, clients, gradients, outcome
from oneround.observe.diagnosis.run import RULES, SEVERITIES, Entry, Finding, Run, findings

__all__ = ["RULES", "SEVERITIES", "Entry", "Finding", "Run", "alignment", "clients", "findings", "gradients", "outcome"]
