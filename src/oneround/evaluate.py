"""How good a model is: accuracy, per class, and who is taken for whom.

Many rules are scored on the same uploads in one pass: each client's network is read once, sees every test image, and is
dropped before the next; what every rule needs of it is folded into running totals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.data import Images
from oneround.fusion import EnsembleRule, Rule, ridge
from oneround.fusion.rule import expert_of
from oneround.models import Ensemble, Expert
from oneround.models.inference import Combine, Totals
from oneround.protocol import Broadcast, GlobalModel, Upload
from oneround.protocol.model import preprocessing
from oneround.site import Site


@dataclass(frozen=True)
class Score:
    """Counts on a test set; `confusion[true][answered]`."""

    confusion: tuple[tuple[int, ...], ...]
    top5: float
    """Share of images whose class is among the five likeliest answers."""
    loss: float
    """Mean cross-entropy of softmax(scores)."""

    @staticmethod
    def of(scores: Tensor, labels: Tensor, classes: int) -> Score:
        scores, labels = scores.float().cpu(), labels.cpu()
        cells = torch.bincount(labels * classes + scores.argmax(1), minlength=classes * classes)
        among = (scores.topk(min(5, classes)).indices == labels[:, None]).any(1)
        table = tuple(tuple(row) for row in cells.reshape(classes, classes).tolist())
        return Score(table, float(among.double().mean()), float(F.cross_entropy(scores.double(), labels)))

    @property
    def samples(self) -> int:
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        return sum(row[label] for label, row in enumerate(self.confusion)) / self.samples

    @property
    def per_class(self) -> list[float | None]:
        """Accuracy on each class; None where the test set has none."""
        return [row[label] / sum(row) if sum(row) else None for label, row in enumerate(self.confusion)]

    def on_mix(self, counts: Sequence[int]) -> float | None:
        """Accuracy on images that come in a client's own mix of classes; of those the test set has."""
        pairs = [(count, value) for count, value in zip(counts, self.per_class, strict=True) if value is not None]
        total = sum(count for count, _ in pairs)
        return sum(count * value for count, value in pairs) / total if total else None

    def short(self) -> dict[str, float]:
        """In three numbers."""
        return {"accuracy": self.accuracy, "top5": self.top5, "loss": self.loss}

    def plain(self) -> dict[str, Any]:
        return {
            **self.short(),
            "per_class": self.per_class,
            "confusion": [list(row) for row in self.confusion],
        }


class Scores(NamedTuple):
    """What scoring found."""

    rules: dict[str, Score]
    alone: dict[str, Score]
    """Every client's network, or its sums, for itself; nobody's where sums are under masks."""
    held: dict[str, Score]
    """Of the rules on images held back to choose by; empty where there are none."""


@torch.inference_mode()
def score_uploads(
    rules: Mapping[str, Rule],
    uploads: Sequence[Upload],
    broadcast: Broadcast,
    test: Images,
    server: Site,
    made: dict[str, GlobalModel] | None = None,
    held: Images | None = None,
) -> Scores:
    """Every rule's score on the same uploads, and every client's alone; one encoder in memory at a time.

    `made`: models of rules that make one network, by name; those that are there are used, those that are not are put there.
    `held`: images to choose by, scored in the same pass.
    """
    made = {} if made is None else made
    together = {
        name: rule.ready(uploads, broadcast, server) for name, rule in rules.items() if isinstance(rule, EnsembleRule)
    }
    mean, std = preprocessing(broadcast.recipe)
    device = server.device
    sets = [test] + ([held] if held is not None and len(held) else [])
    totals = [{name: _begun(rule, images, device, mean, std) for name, rule in together.items()} for images in sets]
    alone: dict[str, Score] = {}
    for upload in uploads:
        if broadcast.weights:
            expert = expert_of(upload, broadcast, device)
            answers, *_ = [
                _look(expert, together, each, images.batches(device, mean, std))
                for each, images in zip(totals, sets, strict=True)
            ]
            del expert
            alone[upload.client] = Score.of(answers, test.labels, broadcast.classes)
        elif not broadcast.recipe.secure:  # under masks nobody's sums say anything alone
            own = GlobalModel.of(ridge.alone(upload, broadcast, device), ridge.Ridge(), broadcast)
            alone[upload.client] = score_model(own, test, device)
        del upload  # before the next one is read
    scores: list[dict[str, Score]] = [{} for _ in sets]
    for name, rule in rules.items():
        if name not in together and name not in made:
            with torch.inference_mode(False):  # a rule may train
                made[name] = GlobalModel.of(rule.fuse(uploads, broadcast, server), rule, broadcast)
        for found, each, images in zip(scores, totals, sets, strict=True):
            if name in together:
                outcome = torch.cat([together[name].scores(sums) for sums in each[name]])
                found[name] = Score.of(outcome, images.labels, broadcast.classes)
            else:
                found[name] = score_model(made[name], images, device)
    return Scores(scores[0], alone, scores[1] if len(scores) > 1 else {})


def _begun(rule: Combine, images: Images, device: torch.device, mean: float, std: float) -> list[Totals]:
    """What a rule makes of every batch itself, if it does so for a whole set at once; otherwise `begin` does, batch by batch."""
    at_once = getattr(rule, "begin_all", None)
    return at_once(images, device, mean, std) if at_once else []


def _look(
    expert: Expert, rules: Mapping[str, Combine], totals: dict[str, list[Totals]], batches: Iterator[Tensor]
) -> Tensor:
    """Let one expert see every image: fold what it sees into every rule's totals, return its own answers."""
    answers = []
    for number, images in enumerate(batches):
        seen = expert.see(images)
        answers.append(seen.logits)
        for name, rule in rules.items():
            so_far = totals[name]
            so_far[number : number + 1] = [
                rule.add(so_far[number] if number < len(so_far) else rule.begin(images), seen)
            ]
    return torch.cat(answers)


@torch.inference_mode()
def score_model(model: GlobalModel, test: Images, device: torch.device) -> Score:
    """A model's score; a streamed ensemble reads each of its networks once."""
    if isinstance(model.inference, Ensemble):
        rule = model.inference.to(device).rule
        totals = {"": _begun(rule, test, device, model.mean, model.std)}
        for expert in model.inference.experts:
            _look(expert.to(device), {"": rule}, totals, test.batches(device, model.mean, model.std))
            del expert
        outcome = torch.cat([rule.scores(sums) for sums in totals[""]])
    else:
        outcome = model.inference.to(device).answers(test, device, model.mean, model.std)
    return Score.of(outcome, test.labels, len(model.class_names))


@torch.inference_mode()
def score_personal(
    rules: Mapping[str, Rule],
    scores: Mapping[str, Score],
    alone: Mapping[str, Score],
    uploads: Sequence[Upload],
    broadcast: Broadcast,
    test: Images,
    server: Site,
) -> dict[str, dict[str, float | None]]:
    """Accuracy on every client's own mix of classes: of each rule's model, of the client alone, of what a rule makes for it."""
    mixes = {upload.client: upload.class_counts.tolist() for upload in uploads}
    found = {name: {client: score.on_mix(mix) for client, mix in mixes.items()} for name, score in scores.items()}
    found["alone"] = {client: alone[client].on_mix(mix) for client, mix in mixes.items()}
    for name, rule in rules.items():
        own = {}
        for client, model in rule.personal(uploads, broadcast, server):
            score = score_model(GlobalModel.of(model, rule, broadcast), test, server.device)
            own[client] = score.on_mix(mixes[client])
        if own:
            found[f"{name}, personal"] = own
    return found
