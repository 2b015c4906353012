"""Dynamic prototypes: IFFI's fused features against prototypes that count by what each client knows of a class.

    P̄_c = Σ_k r_k q_kc P_kc / Σ_k r_k q_kc, the plain mean where nobody knows the class

by size:        r_k = n_k,                     q_kc = 1 if the client holds the class, else 0
by count:       r_k = 1,                       q_kc = n_kc
by reliability: r_k = balanced accuracy,       q_kc = n_kc × mean probability given to the right class
optimised:      P̄ starts at the simplex anchors A and descends CE of every client's known prototypes against P̄ plus 0.1·MSE(P̄, A)

Accuracy and probability are measured by the client on images it held back (`validation`, with no public images), or, where it
held back none, on what it trained on: then they say little. They reveal one number per class.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.fusion.rule import EnsembleRule, rules
from oneround.learning.anchors import anchors
from oneround.models.inference import Seen, Totals, plus
from oneround.protocol.messages import Shapes

STEPS, RATE, TO_ANCHORS = 20, 1e-3, 0.1
BETAS, EPSILON = (0.9, 0.999), 1e-8


@rules.register("dynamic-prototypes")
class DynamicPrototypes(EnsembleRule):
    """Features averaged by sample count, against prototypes weighed by what each client knows of the class."""

    by: Literal["size", "count", "reliability", "optimised"] = "reliability"

    @property
    def needs_counts(self) -> bool:
        return True

    @property
    def reveals(self) -> str:
        return "how well it answers, for every class" if self.by == "reliability" else ""

    def statistics(self, classes: int, features: int) -> Shapes:
        return {"reliability": (), "confidence": (classes,)} if self.by == "reliability" else {}

    def judge(self, logits: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
        return judged(logits, labels, classes) if self.by == "reliability" else {}

    def add(self, totals: Totals | None, seen: Seen) -> Totals:
        expert, prototypes = seen.expert, seen.expert.net.prototypes
        held = (expert.class_counts > 0).to(prototypes)
        known = {"size": expert.samples * held, "count": expert.class_counts, "optimised": held}.get(self.by)
        if known is None:
            known = expert.statistic("reliability") * expert.class_counts * expert.statistic("confidence")
        folded = plus(
            {name: total for name, total in totals.items() if name != "each"} if totals else None,
            features=expert.samples * seen.features, weight=expert.samples, plain=prototypes, clients=torch.ones_like(expert.samples),
            prototypes=known[:, None] * prototypes, known=known[:, None],
        )  # fmt: skip
        if self.by == "optimised":
            mine = torch.cat([held[:, None], prototypes], 1)[None]
            folded["each"] = mine if totals is None else torch.cat([totals["each"], mine])
        return folded

    def scores(self, totals: Totals) -> Tensor:
        fused = F.normalize(totals["features"] / totals["weight"], dim=1)
        weighed = totals["prototypes"] / totals["known"].clamp(min=1e-12)
        mean = torch.where(totals["known"] > 0, weighed, totals["plain"] / totals["clients"])
        if self.by == "optimised":
            mean = optimised(totals["each"][:, :, 1:], totals["each"][:, :, 0])
        return fused @ mean.T


def judged(logits: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """A client's balanced accuracy, and the mean probability it gives the right class of every class it was asked about.

    A class it was not asked about has the mean of the others: it may hold some samples of it, all of them trained on.
    """
    members = F.one_hot(labels, classes).to(logits)
    counts = members.sum(0)
    asked = counts > 0
    right = (logits.argmax(1) == labels).to(logits)
    probability = logits.softmax(1).gather(1, labels[:, None])[:, 0]
    accuracy, confidence = ((members * each[:, None]).sum(0) / counts.clamp(min=1) for each in (right, probability))
    return {
        "reliability": accuracy[asked].mean(),
        "confidence": torch.where(asked, confidence, confidence[asked].mean()),
    }


def optimised(prototypes: Tensor, known: Tensor) -> Tensor:
    """P̄ by Adam from the anchors; prototypes (clients, classes, features), known (clients, classes) 0 or 1.

    Written out step by step, so that it works without recorded gradients and inside an exported model.
    """
    _, classes, features = prototypes.shape
    start = anchors.parse("etf" if features >= classes - 1 else "random").make(classes, features, 0).to(prototypes)
    label = torch.eye(classes).to(prototypes)
    mean, first, second = start, torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, STEPS + 1):
        error = ((prototypes @ mean.T).softmax(2) - label) * known[:, :, None]
        pull = torch.einsum("kcl,kcd->ld", error, prototypes) / known.sum().clamp(min=1)
        gradient = pull + TO_ANCHORS * 2 * (mean - start) / start.numel()
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient.square()
        size = (second / (1 - BETAS[1] ** step)).sqrt() + EPSILON
        mean = mean - RATE * (first / (1 - BETAS[0] ** step)) / size
    return mean
