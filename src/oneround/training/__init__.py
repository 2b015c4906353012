"""Training at a site and at the server: the loop, its objective, and the state it resumes from."""

from oneround.training.loop import Emit, Learner, Trainer, silent
from oneround.training.objective import Batch, Term, terms

__all__ = ["Batch", "Emit", "Learner", "Term", "Trainer", "silent", "terms"]
