"""What happens at a site: the training loop, what it minimises, and the state it can resume from."""

from oneround.learning import contrastive, distillation, reference
from oneround.learning.loop import Emit, Learner, silent
from oneround.learning.objective import Batch, Term, terms

__all__ = ["Batch", "Emit", "Learner", "Term", "contrastive", "distillation", "reference", "silent", "terms"]
