"""Evaluation: accuracy, accuracy per class and the confusion matrix.

Many rules are scored on the same uploads in one pass: each client's network is read once, run on every test image, and
dropped before the next. Every rule folds its outputs into running totals.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from oneround.config.sections import Evaluation
from oneround.data import Images
from oneround.data.augment import preprocessing
from oneround.fusion import EnsembleRule, Rule, ridge
from oneround.fusion.base import expert_of
from oneround.global_model import GlobalModel
from oneround.models.inference import TRANSDUCTIVE, Combine, Combiner, Ensemble, Expert, Totals, moments_of
from oneround.models.norm import batch_statistics, has_batch_norm
from oneround.protocol import Broadcast, Upload
from oneround.seeds import generator
from oneround.site import Site

log = logging.getLogger("oneround")


@dataclass(frozen=True)
class Score:
    """Counts on a test set; `confusion[true][predicted]`."""

    confusion: tuple[tuple[int, ...], ...]
    top5: float
    """Share of images whose class is among the five highest scores."""
    loss: float
    """Mean cross-entropy of softmax(scores)."""

    @staticmethod
    def of(scores: Tensor, labels: Tensor, classes: int) -> Score:
        scores, labels = scores.float().cpu(), labels.cpu()
        cells = torch.bincount(labels * classes + scores.argmax(1), minlength=classes * classes)
        in_top5 = (scores.topk(min(5, classes)).indices == labels[:, None]).any(1)
        table = tuple(tuple(row) for row in cells.reshape(classes, classes).tolist())
        return Score(table, float(in_top5.double().mean()), float(F.cross_entropy(scores.double(), labels)))

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
        """Accuracy on a client's own mix of classes, over the classes the test set has."""
        pairs = [(count, value) for count, value in zip(counts, self.per_class, strict=True) if value is not None]
        total = sum(count for count, _ in pairs)
        return sum(count * value for count, value in pairs) / total if total else None

    def short(self) -> dict[str, float]:
        """Accuracy, top-5 accuracy and loss."""
        return {"accuracy": self.accuracy, "top5": self.top5, "loss": self.loss}

    def plain(self) -> dict[str, Any]:
        return {**self.short(), "per_class": self.per_class, "confusion": [list(row) for row in self.confusion]}


class Scores(NamedTuple):
    """Scores on one set of uploads."""

    rules: dict[str, Score]
    clients: dict[str, Score]
    """Every client's own network, or the classifier of its own sums; empty where sums are masked, or nothing of it classifies."""
    validation: dict[str, Score]
    """Every rule on validation images; empty where there are none."""
    class_counts: dict[str, list[int]]
    """Every client's number of samples of each class, as its upload tells it."""


class ScoringPass:
    """One pass over a set of images: every network sees each image once, and every rule folds its outputs into totals."""

    def __init__(
        self,
        rules: Mapping[str, Combine],
        images: Images,
        device: torch.device,
        mean: float,
        std: float,
        batch: int | None = None,
    ) -> None:
        """`batch`: score transductively, with batch norm on the statistics of so many shuffled images."""
        order = None if batch is None else shuffled(images)
        self.images, self.transductive = images if order is None else images.take(order), batch is not None
        sizes = images.scored_at_once(device) if batch is None else batch_sizes(len(images), batch)
        self.rules, self.preprocessing = rules, (device, mean, std, sizes)
        self.totals: dict[str, list[Totals]] = {}
        for name, rule in rules.items():
            totals = rule.begin_all(images, device, mean, std) if isinstance(rule, Combiner) else None
            self.totals[name] = self._by_batch(totals, order) if totals is not None else []

    def _by_batch(self, totals: Totals, order: Tensor | None) -> list[Totals]:
        """Totals of the whole set, in its own order, as totals of every batch."""
        if order is not None:
            totals = {name: value[order.to(value.device)] for name, value in totals.items()}
        parts = zip(*(value.split(self.preprocessing[-1]) for value in totals.values()), strict=True)
        return [dict(zip(totals, values, strict=True)) for values in parts]

    def add(self, expert: Expert) -> Tensor:
        """Run one expert on every image; returns its logits."""
        logits = []
        with batch_statistics(expert) if self.transductive else nullcontext():
            if any(rule.transductive for rule in self.rules.values()):
                features = [expert.output(images).features for images in self.images.batches(*self.preprocessing)]
                expert.set_moments = moments_of(torch.cat(features))
            for number, images in enumerate(self.images.batches(*self.preprocessing)):
                output = expert.output(images)
                logits.append(output.logits)
                for name, rule in self.rules.items():
                    totals = self.totals[name]
                    before = totals[number] if number < len(totals) else rule.begin(images)
                    totals[number : number + 1] = [rule.add(before, output)]
        expert.set_moments = None
        return torch.cat(logits)

    def score(self, name: str, classes: int) -> Score:
        """The score of a rule, once every expert is added."""
        scores = torch.cat([self.rules[name].scores(totals) for totals in self.totals[name]])
        return Score.of(scores, self.images.labels, classes)


def transductive_name(rule: str, batch: int) -> str:
    """What a rule's transductive score is called: with the size of the batches unless it is the default."""
    rule = rule.removesuffix(f", {TRANSDUCTIVE}")
    return f"{rule}, {TRANSDUCTIVE}" + (f" {batch}" if batch != Evaluation().batch_size else "")


def is_transductive(name: str) -> bool:
    """Whether a score of this name is transductive."""
    return f", {TRANSDUCTIVE}" in name


def batch_sizes(images: int, batch: int) -> list[int]:
    """Sizes of the batches of a transductive pass, `batch` images each; a short last one joins the one before."""
    full, rest = divmod(images, batch)
    return [batch] * (full - 1) + [batch + rest] if full else [rest] * (rest > 0)


def shuffled(images: Images) -> Tensor:
    """A fixed order of the images for transductive batches."""
    if len(images.labels.unique()) == 1:
        log.warning(
            "all %d test images are of one class: batch norm on their statistics hides what tells them apart",
            len(images),
        )
    return torch.randperm(len(images), generator=generator(0, "test batches"))


@torch.inference_mode()
def score_uploads(
    rules: Mapping[str, Rule],
    uploads: Sequence[Upload],
    broadcast: Broadcast,
    test: Images,
    server: Site,
    models: dict[str, GlobalModel] | None = None,
    validation: Images | None = None,
    batch: int | None = None,
) -> Scores:
    """Every rule's score on the same uploads, and every client's own; one encoder in memory at a time.

    `models`: models of rules that make one network, by name; missing ones are made and added.
    `validation`: images for model selection, scored in the same pass.
    `batch`: score test images transductively too, in batches of so many; those scores are called `RULE, transductive`.
    """
    models = {} if models is None else models
    device, classes = server.device, broadcast.classes
    ensembles = {
        name: rule.ready(uploads, broadcast, server) for name, rule in rules.items() if isinstance(rule, EnsembleRule)
    }
    image_sets = [(test, None), *([(validation, None)] if validation else []), *([(test, batch)] if batch else [])]
    passes = [
        ScoringPass(ensembles, images, device, *preprocessing(broadcast.recipe), size) for images, size in image_sets
    ]
    clients: dict[str, Score] = {}
    class_counts = dict[str, list[int]]()
    for upload in uploads:
        class_counts[upload.client] = upload.class_counts.tolist()
        if broadcast.weights:
            expert = expert_of(upload, broadcast, device)
            logits, *_ = [each.add(expert) for each in passes]
            del expert
            clients[upload.client] = Score.of(logits, test.labels, classes)
        elif broadcast.sums and not broadcast.masked:  # masked sums cannot be read one by one
            own = GlobalModel.of(ridge.local_classifier(upload, broadcast, device), ridge.Ridge(), broadcast)
            clients[upload.client] = score_model(own, test, device)
        del upload  # before the next one is read
    for name, rule in rules.items():
        if name not in ensembles and name not in models:
            with torch.inference_mode(False):  # a rule may train
                models[name] = GlobalModel.of(rule.fuse(uploads, broadcast, server), rule, broadcast)
    scores = [
        {
            name: each.score(name, classes) if name in ensembles else score_model(models[name], images, device, size)
            for name in rules
            if size is None or name in ensembles or _has_batch_norm(models[name])
        }
        for each, (images, size) in zip(passes, image_sets, strict=True)
    ]
    transductive = {transductive_name(name, batch): score for name, score in scores[-1].items()} if batch else {}
    return Scores(scores[0] | transductive, clients, scores[1] if validation else {}, class_counts)


def _has_batch_norm(model: GlobalModel) -> bool:
    """Whether its networks have batch norm; those of an ensemble are alike, and may be built one at a time."""
    inference = model.inference
    return has_batch_norm(next(iter(inference.experts)) if isinstance(inference, Ensemble) else inference)


@torch.inference_mode()
def score_model(model: GlobalModel, test: Images, device: torch.device, batch: int | None = None) -> Score:
    """A model's score; a streamed ensemble reads each of its networks once. `batch`: transductively, so many images a batch."""
    inference, classes = model.inference.to(device), len(model.class_names)
    if isinstance(inference, Ensemble):
        scoring = ScoringPass({"": inference.rule}, test, device, model.mean, model.std, batch)
        for expert in inference.experts:
            scoring.add(expert.to(device))
            del expert
        return scoring.score("", classes)
    if batch is None:
        return Score.of(inference.predict(test, device, model.mean, model.std), test.labels, classes)
    images = test.take(shuffled(test))
    with batch_statistics(inference):
        batches = images.batches(device, model.mean, model.std, batch_sizes(len(images), batch))
        return Score.of(torch.cat([inference(each) for each in batches]), images.labels, classes)


@torch.inference_mode()
def score_personal(
    rules: Mapping[str, Rule],
    scores: Scores,
    uploads: Sequence[Upload],
    broadcast: Broadcast,
    test: Images,
    server: Site,
) -> dict[str, dict[str, float | None]]:
    """Accuracy on every client's own mix of classes: of each rule's model, of its own network, of its personal model."""
    mixes = scores.class_counts
    personal = {
        name: {client: score.on_mix(mix) for client, mix in mixes.items()}
        for name, score in scores.rules.items()
        if not is_transductive(name)
    }
    personal["alone"] = {client: score.on_mix(mixes[client]) for client, score in scores.clients.items()}
    for name, rule in rules.items():
        own = {}
        for client, model in rule.personal(uploads, broadcast, server):
            score = score_model(GlobalModel.of(model, rule, broadcast), test, server.device)
            own[client] = score.on_mix(mixes[client])
        if own:
            personal[f"{name}, personal"] = own
    return personal
