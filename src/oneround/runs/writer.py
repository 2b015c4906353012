"""The writer of a run: metrics of every snapshot, model and result, the same for both transports."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from oneround import acts
from oneround.data import Images
from oneround.evaluate import Scores, score_personal
from oneround.files import flush_file, flush_folder
from oneround.fusion import Rule
from oneround.global_model import GlobalModel
from oneround.models import Single
from oneround.protocol import Upload, UploadFolder, blob
from oneround.runs import pictures
from oneround.runs.folder import RunFolder
from oneround.runs.log import Event, Measurements, best_epoch
from oneround.runs.loggers import Logger, write_events
from oneround.runs.record import RunRecord
from oneround.runs.result import Result
from oneround.site import Site

log = logging.getLogger("oneround")


@dataclass(frozen=True)
class Facts:
    """What a result contains besides scores."""

    data: str
    partition: str
    """Digest of which client holds which sample."""
    traffic: Mapping[str, tuple[int, int]]
    """Bytes down to and up from every client."""
    remarks: Sequence[str]


@dataclass(frozen=True)
class Snapshot:
    """The uploads at the end of an epoch and their scores."""

    epoch: int
    uploads: UploadFolder
    scores: Scores
    models: dict[str, GlobalModel] = field(default_factory=dict)
    """Rule → its fused model, where scoring made it: of rules whose model is one network."""
    seconds: float = 0.0
    """Time for fusing and scoring."""


class RunWriter:
    """Writes a run's metrics, model and result; nothing else does."""

    def __init__(
        self,
        folder: RunFolder,
        rules: Mapping[str, Rule],
        loggers: Sequence[Logger] = (),
        epochs_over: int = 0,
        draws: bool = True,
    ) -> None:
        """Continue an earlier log after its last complete snapshot, one that has all rules; later events are measured again.

        `epochs_over`: epochs of the rounds before this one; where the server has no test images, these have no snapshots.
        `draws`: whether pictures are drawn.
        """
        self.folder, self.rules, self.loggers, self.draws = folder, rules, loggers, draws
        self.first = next(iter(rules))
        """The rule that makes the model."""
        events = list(folder.metrics)
        curves = Measurements.of(events).curves
        of_sums = [name for name, rule in rules.items() if rule.needs.experts]
        groups = [of_sums, [name for name in rules if name not in of_sums]]
        self.done = {
            epoch
            for group in groups
            if group
            for epoch in set.intersection(*(set(curves.get(rule, {})) for rule in group))
        }
        """Epochs whose snapshot is complete in the log: with all rules, or with those of its exchange."""
        last = max([epochs_over, *self.done])
        complete = [event for event in events if event["epoch"] <= last]
        if folder.metrics.path.is_file():
            folder.metrics.replace(complete)
        self.measurements = Measurements.of(complete)
        self._before = max(self.measurements.elapsed.values(), default=0.0)
        self._started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds the run has been active, without the time it was stopped."""
        return self._before + time.monotonic() - self._started

    @property
    def chosen(self) -> int | None:
        """The epoch with the best model on validation images, the earliest of equals; None without such images."""
        curve = self.measurements.validation.get(self.first, {})
        return best_epoch(curve) if curve else None

    def snapshot(self, snapshot: Snapshot, epochs: range, site: Site) -> list[Event]:
        """Log the clients' metrics of these epochs and the scores of the snapshot; save its model if it is the best so far.

        Returns the events with scores. The model is written before the log, so a killed run makes both again.
        """
        if self.first in snapshot.scores.validation:
            curve = self.measurements.validation.get(self.first, {})
            if snapshot.scores.validation[self.first].accuracy > max(curve.values(), default=-1.0):
                self._model(snapshot, site).save(self.folder.model, flush=False)
        scored = list(self._score_events(snapshot))
        events = [*self._training_events(snapshot.uploads, epochs), *scored]
        for event in events:
            self.measurements.add(event)
        self.folder.metrics.append(events)
        self.done.add(snapshot.epoch)
        write_events(events, self.loggers)
        return scored

    @staticmethod
    def _training_events(uploads: UploadFolder, epochs: range) -> Iterator[Event]:
        """The clients' metrics of these epochs, from the histories in their uploads."""
        for path in uploads.paths:
            manifest = blob.peek(path, "upload")
            for entry in manifest["history"]:
                if entry["epoch"] in epochs:
                    yield {**entry, "event": "epoch", "client": manifest["client"]}

    def _score_events(self, snapshot: Snapshot) -> Iterator[Event]:
        """Accuracies of clients and rules, and metrics of rules that work between rounds."""
        epoch, scores = snapshot.epoch, snapshot.scores
        times = {"seconds": snapshot.seconds, "elapsed": self.elapsed}
        for client, score in scores.clients.items():
            yield {"event": "client", "epoch": epoch, "client": client, "accuracy": score.accuracy}
        for rule, score in scores.rules.items():
            validation = {"validation": scores.validation[rule].accuracy} if rule in scores.validation else {}
            yield {"event": "snapshot", "epoch": epoch, "rule": rule, **score.short(), **times, **validation}
        for rule, model in snapshot.models.items():
            if isinstance(model.inference, Single) and model.inference.facts:
                yield {"event": "fusion", "epoch": epoch, "rule": rule, **model.inference.facts}

    def _model(self, snapshot: Snapshot, site: Site) -> GlobalModel:
        """The first rule's model of a snapshot."""
        uploads, model = snapshot.uploads, snapshot.models.get(self.first)
        with site.arithmetic(uploads.broadcast.parameters):
            return model or acts.fuse(uploads, uploads.broadcast, site, self.rules[self.first])

    def round_model(self, number: int, snapshot: Snapshot, site: Site) -> GlobalModel:
        """Save and return the model of a round."""
        model = self._model(snapshot, site)
        model.save(self.folder.round_model(number))
        return model

    def finish(self, snapshot: Snapshot, facts: Facts, site: Site, test: Images) -> Result:
        """Write the model, the picture and at last `result.json`, which marks the run as finished."""
        uploads, scores, broadcast = snapshot.uploads, snapshot.scores, snapshot.uploads.broadcast
        epoch, personal = self._finish_model(snapshot, site), dict[str, dict[str, float | None]]()
        remarks = [*facts.remarks]
        if self.chosen not in (None, epoch):
            remarks.append(
                f"the model is of epoch {epoch}; that of epoch {self.chosen}, best on validation images, is gone"
            )
        if scores.rules and broadcast.recipe.reveal.class_counts is not False:
            with site.arithmetic(broadcast.parameters):
                personal = score_personal(self.rules, scores, uploads, broadcast, test, site)
        result = {
            "recipe_digest": broadcast.digest,
            "partition": facts.partition,
            "uploads": {path.stem: Upload.content_of(path) for path in uploads.paths},
            "bytes_down": sum(down for down, _ in facts.traffic.values()),
            "bytes_up": sum(up for _, up in facts.traffic.values()),
            "traffic": {name: {"down": down, "up": up} for name, (down, up) in facts.traffic.items()},
            "remarks": remarks,
            "model": {"rule": self.first, "epoch": epoch, "chosen_on": "validation" if self.chosen == epoch else "end"},
            "rules": {name: score.plain() for name, score in scores.rules.items()},
            "clients": {name: score.plain() for name, score in scores.clients.items()},
            "personalised": personal,
        }
        if self.draws and self.measurements.curves:
            curves = {name: [curve] for name, curve in self.measurements.curves.items()}
            title = f"{broadcast.recipe.method} on {facts.data}"
            pictures.draw_accuracy(curves, self.folder.path / "accuracy.png", title)
        self.folder.write_json("result.json", result)
        return Result.of(RunRecord(self.folder.path, measurements=self.measurements, result=result))

    def _finish_model(self, snapshot: Snapshot, site: Site) -> int:
        """Write the final model; returns its epoch."""
        chosen = self.chosen
        if chosen is not None and (self.folder.model / "manifest.json").is_file():
            for path in self.folder.model.iterdir():
                flush_file(path)
            flush_folder(self.folder.model)
            return chosen
        if chosen is not None and chosen != snapshot.epoch:
            number, rest = divmod(chosen, snapshot.uploads.broadcast.recipe.training.epochs)
            if rest == 0 and (self.folder.round_model(number) / "manifest.json").is_file():
                GlobalModel.load(self.folder.round_model(number)).save(self.folder.model)
                return chosen
            log.warning(
                "%s: the model of epoch %d, best on validation images, is gone; the last one is kept instead",
                self.folder.model,
                chosen,
            )
        self._model(snapshot, site).save(self.folder.model)
        return snapshot.epoch
