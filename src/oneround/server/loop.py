"""The one server loop: prepare, collect uploads, fuse and score them, record it, next round or finish.

Two transports collect the uploads: workers on this machine (simulate/) and sites on Flower (federate/). Everything else a
server does is here, so that a simulation and a federation of one recipe give the same result. A killed run is resumed from its
folder: finished snapshots are in the log, the round is in the broadcast, everything else follows from seeds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from oneround import acts
from oneround.errors import (
    DataError,
    Interrupted,
    OutOfTime,
    ProtocolError,
    RecipeError,
    RunError,
    in_one_line,
    printable,
)
from oneround.evaluate import Scores, score_uploads
from oneround.global_model import GlobalModel
from oneround.protocol import Broadcast, Upload, UploadFolder, blob
from oneround.runs import pictures
from oneround.runs.environment import environment
from oneround.runs.folder import RunFolder
from oneround.runs.loggers import open_loggers
from oneround.runs.result import Result
from oneround.runs.writer import Facts, RunWriter, Snapshot
from oneround.server.plan import DealtPlan, Plan
from oneround.site import choose_device
from oneround.training import Emit, silent
from oneround.training.shared_base import depths_of
from oneround.training.step import unrecorded

log = logging.getLogger("oneround")
SERVER_ERRORS = (OSError, MemoryError, torch.OutOfMemoryError, RecipeError, DataError, Interrupted, OutOfTime)
"""Errors in fusing that no upload is to blame for."""


class Transport(Protocol):
    """How uploads reach the server."""

    snapshots: bool
    """Whether uploads can be had before a round is over."""
    live: bool
    """Whether clients emit their epochs while they train; otherwise the server emits them when an upload has arrived."""
    trusted: bool
    """Whether uploads come from this program itself; others may be faulty or hostile and break the fusion."""

    def agree(self, broadcast: Broadcast) -> Broadcast:
        """For masked sums: the broadcast with the sites' public keys."""

    def survey(self, broadcast: Broadcast) -> dict[str, Tensor]:
        """For a split chosen before training: the class histograms of all sites, as they disclose them."""

    def collect(self, broadcast: Broadcast, epoch: int) -> list[str]:
        """Write this round's uploads at the end of `epoch`, checked, to the run's folder; returns their clients, sorted."""

    def begin(self, broadcast: Broadcast, epoch: int) -> None:
        """Let clients train on to `epoch`, the next to be collected, while the uploads that were collected are scored."""

    def discard(self, client: str) -> None:
        """Drop this client's upload: it cannot be fused."""

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes down to and up from every client, over all rounds so far."""

    def remarks(self) -> list[str]:
        """Remarks in the result on how the uploads were collected."""


def open_run(plan: Plan, folder: RunFolder, emit: Emit = silent, batched: bool = False) -> None:
    """Initialise the run's folder, or check the run in it, which must have this recipe. The caller has locked the folder.

    `batched`: whether clients are trained together, which a new run's environment says.
    """
    if is_begun(plan, folder):
        if folder.result.exists():
            _check_finished(folder)
        if not folder.result.exists():
            _check_broadcast(plan, folder, emit)
        return
    broadcast = plan.prepare(emit)  # first: a recipe that cannot be prepared leaves nothing behind
    mode = {"batched": True} if batched else {}
    folder.write_json("environment.json", environment(choose_device(plan.recipe.local.device)) | mode)
    if isinstance(plan, DealtPlan):
        folder.write_json("partition.json", plan.partition())
    broadcast.write(folder.broadcast)
    blob.write_durably(folder.recipe, plan.recipe.with_absolute_paths().to_yaml().encode())


def is_begun(plan: Plan, folder: RunFolder) -> bool:
    """Whether this run was started here before; RecipeError if another run was."""
    if not folder.recipe.exists():
        return False
    if folder.read_recipe().digest != plan.recipe.digest:
        raise RecipeError(
            f"{folder.path}: was started with another recipe ({folder.recipe}); use that one, or choose another --out"
        )
    if not folder.broadcast.exists():
        return False
    if plan.split is None:
        return True
    if not (folder.path / "partition.json").exists():
        return False
    if folder.read_partition()["digest"] != plan.split.digest:
        raise RecipeError(f"{folder.path}: was started on other data or another partition; choose another --out")
    return True


def _check_finished(folder: RunFolder) -> None:
    """Reopen a finished run whose model or uploads are missing: they are made again."""
    lost = [name for name in folder.read_result()["uploads"] if not folder.upload(name).is_file()]
    if lost or not (folder.model / "manifest.json").is_file():
        missing = f"uploads of {', '.join(lost)}" if lost else "the model"
        log.warning("%s: finished, but %s went missing; made again", folder.path, missing)
        folder.result.unlink()


def _check_broadcast(plan: Plan, folder: RunFolder, emit: Emit) -> None:
    """Prepare a damaged broadcast again; it must be equal to the first, or the uploads so far would belong to another."""
    try:
        if Broadcast.read(folder.broadcast).recipe.digest == plan.recipe.digest:
            return
        log.warning("%s: belongs to another recipe; prepared again", folder.broadcast)
    except (ProtocolError, RecipeError) as error:
        log.warning("%s; prepared again", error)
    if plan.recipe.exchanges > 1 and list(folder.metrics):
        raise RunError(
            f"{folder.broadcast}: damaged, and earlier rounds' weights were in it; start over with another --out"
        )
    raw = plan.prepare(emit).pack()
    manifest, _ = blob.unpack(raw, "broadcast", "broadcast")
    try:
        first_digest = blob.peek(folder.broadcast, "broadcast").get("sha256")
    except ProtocolError:
        first_digest = None  # the damage is in the manifest itself
    if first_digest not in (None, manifest["sha256"]):
        raise RunError(
            f"{folder.broadcast}: damaged, and a new one differs (another device, or other initial weights); "
            "start over with another --out"
        )
    blob.write_durably(folder.broadcast, raw)


def serve(plan: Plan, folder: RunFolder, transport: Transport, emit: Emit, draws: bool = True) -> Result:
    """Run all rounds of an opened run; writes the result, with pictures if it `draws`, and returns it."""
    rules = {rule.label: rule for rule in acts.rules_of(plan.recipe)}
    with open_loggers(plan.recipe, folder.path) as loggers:
        writer = RunWriter(folder, rules, loggers, Broadcast.read(folder.broadcast).first_epoch, draws)
        return ServerLoop(plan, folder, transport, writer, emit).run()


class ServerLoop:
    """The server's side of one run."""

    def __init__(self, plan: Plan, folder: RunFolder, transport: Transport, writer: RunWriter, emit: Emit) -> None:
        self.plan, self.folder, self.transport, self.writer, self.emit = plan, folder, transport, writer, emit
        self.site = replace(plan.server(folder.path), emit=emit)
        self.epochs = plan.snapshot_epochs if transport.snapshots else plan.round_ends
        """Epochs after which uploads are collected and scored."""
        self._known_sums = set[str]()
        """Sums do not change from snapshot to snapshot, and are checked once."""

    def run(self) -> Result:
        """Collect, score and record every snapshot that is not in the log yet."""
        with ThreadPoolExecutor(1, thread_name_prefix="picture") as beside:
            snapshot = self._run_rounds(beside)
        remarks = [*self.plan.remarks(), *self.transport.remarks(), *stopped_early(snapshot.uploads)]
        digest = self.plan.partition_digest(snapshot.uploads)
        facts = Facts(self.plan.data.name, digest, self.transport.traffic(), remarks)
        return self.writer.finish(snapshot, facts, self.site, self.plan.data.test)

    def _run_rounds(self, beside: Executor) -> Snapshot:
        """The snapshot of the last epoch. `beside`: draws the partition while clients train on."""
        broadcast, snapshot = self._begin_round(), None
        picture: Future[None] | None = None
        for epoch in self.epochs:
            ends_round = epoch == broadcast.last_epoch
            if epoch <= broadcast.first_epoch or (epoch in self.writer.done and not ends_round):
                continue
            snapshot = self._collect(broadcast, epoch)
            picture = picture or beside.submit(self._draw_partition)
            logged: list[dict[str, Any]] = []
            if epoch not in self.writer.done:
                before = max((earlier for earlier in self.epochs if earlier < epoch), default=0)
                with unrecorded:
                    logged = self.writer.snapshot(snapshot, range(before + 1, epoch + 1), self.site)
            self._report(snapshot, broadcast, logged)
            if ends_round and self.plan.recipe.stacked and epoch != self.epochs[-1]:
                second = acts.stack(snapshot.uploads, broadcast, self.site)
                self.folder.keep_first_exchange()
                second.write(self.folder.broadcast)
                broadcast = self._begin_round()
            elif ends_round and self.plan.recipe.rounds > 1:
                model = self.writer.round_model(broadcast.round, snapshot, self.site)
                if epoch != self.epochs[-1]:
                    with self.site.arithmetic(broadcast.parameters):
                        acts.advance(model, broadcast).write(self.folder.broadcast)
                    broadcast = self._begin_round()
        assert snapshot is not None and picture is not None, "the last epoch is always scored"
        picture.result()
        return snapshot

    def _begin_round(self) -> Broadcast:
        """Read the broadcast of the current round and remove the uploads of the round before; those of a first exchange are kept."""
        broadcast = Broadcast.read(self.folder.broadcast)
        if broadcast.masked and not broadcast.roster:
            self.transport.agree(broadcast).write(self.folder.broadcast)
            broadcast = Broadcast.read(self.folder.broadcast)
        share = broadcast.recipe.share
        if share is not None and share.surveyed and not broadcast.depths:
            depths = depths_of(broadcast.recipe, broadcast.shape[0], self.transport.survey(broadcast))
            replace(broadcast, depths=depths).write(self.folder.broadcast)
            broadcast = Broadcast.read(self.folder.broadcast)
        if broadcast.round > 1:
            for path in sorted((self.folder.path / "uploads").glob("*.safetensors")):
                epoch = Upload.epoch_of(path)
                if epoch is None or epoch > broadcast.first_epoch:
                    continue
                if broadcast.experts:
                    path.rename(self.folder.first_exchange.upload(path.stem))
                else:
                    path.unlink()  # the broadcast has the network that it was fused into
        return broadcast

    def _collect(self, broadcast: Broadcast, epoch: int) -> Snapshot:
        """Collect and score the uploads of an epoch; one that makes fusing fail is dropped, and the others are fused."""
        while True:
            names = self.transport.collect(broadcast, epoch)
            following = next((later for later in self.epochs if epoch < later <= broadcast.last_epoch), None)
            if following is not None:
                self.transport.begin(broadcast, following)
            paths = [self.folder.upload(name) for name in names]
            uploads = UploadFolder(paths, broadcast, acts.statistics_of(broadcast), self._known_sums)
            try:
                snapshot = self._score(uploads, epoch)
            except SERVER_ERRORS:
                raise
            except Exception as error:
                if self.transport.trusted or broadcast.masked:
                    raise
                log.warning("fusing failed (%s); looking for the upload that is to blame", in_one_line(error))
                culprits = find_culprits(uploads, lambda some: self._score(some, epoch))
                if not culprits:
                    raise
                for client in culprits:
                    self.transport.discard(client)
                continue
            if not self.transport.live:
                self._emit_epochs(uploads)
            return snapshot

    def _emit_epochs(self, uploads: UploadFolder) -> None:
        for upload in uploads:
            for entry in upload.history:
                self.emit({**entry, "event": "epoch", "client": upload.client})

    def _draw_partition(self) -> None:
        """Draw the partition, after the first snapshot: loading the library of pictures would delay the first epoch."""
        plan, path = self.plan, self.folder.path / "partition.png"
        if self.writer.draws and plan.split is not None and not path.exists():
            title = f"{plan.data.name}, {plan.recipe.partition.label}, seed {plan.recipe.seeds.partition}"
            pictures.draw_partition(plan.split, plan.data.class_names, path, title)

    def _score(self, uploads: UploadFolder, epoch: int) -> Snapshot:
        """Score every rule on test and validation images, if the server has some."""
        started, broadcast, site = time.monotonic(), uploads.broadcast, self.site
        self.emit({"event": "scoring", "epoch": epoch})
        scores, rules, test = Scores({}, {}, {}, {}), self.writer.rules, self.plan.data.test
        if broadcast.recipe.stacked:  # some rules need the networks, some the sums that come after them
            rules = {name: rule for name, rule in rules.items() if not acts.missing_inputs(rule, broadcast)}
        models: dict[str, GlobalModel] = {}
        with unrecorded, site.arithmetic(broadcast.parameters):  # clients may train on beside it
            if len(test):
                batch = broadcast.recipe.evaluation.transductive
                scores = score_uploads(rules, uploads, broadcast, test, site, models, site.validation, batch)
            if rules and not self.transport.trusted:
                first = next(iter(rules))
                model = models.get(first) or acts.fuse(uploads, broadcast, site, rules[first])
                model.check_finite()
        return Snapshot(epoch, uploads, scores, models, time.monotonic() - started)

    def _report(self, snapshot: Snapshot, broadcast: Broadcast, logged: list[dict[str, Any]]) -> None:
        """Emit a snapshot with a summary and its events in the log, so that no callback has to read the log."""
        rounds, scores = self.plan.recipe.exchanges, snapshot.scores
        when = f"round {broadcast.round} of {rounds}" if rounds > 1 else f"epoch {snapshot.epoch}"
        accuracy = {name: score.accuracy for name, score in scores.rules.items()}
        left = sum(epoch > snapshot.epoch for epoch in self.epochs)
        event = {"event": "snapshot", "epoch": snapshot.epoch, "when": when, "seconds": snapshot.seconds, "left": left}
        self.emit({**event, "accuracy": accuracy, "logged": logged})
        accuracies = ", ".join(f"{name} {value:.2%}" for name, value in accuracy.items())
        log.info("%s, %d uploads: %s", when, len(snapshot.uploads), accuracies or "no test images here to score it")


def stopped_early(uploads: UploadFolder) -> list[str]:
    """A remark on every client whose safeguards ended its training before the last epoch."""
    manifests, last = [blob.peek(path, "upload") for path in uploads.paths], uploads.broadcast.last_epoch
    early = [each for each in manifests if each.get("stopped") and each["epoch"] < last]
    return [
        f"{each['client']} stopped after epoch {each['epoch']} of {last}: {printable(each['stopped'], 500)}"
        for each in early
    ]


def find_culprits(uploads: UploadFolder, fuse: Callable[[UploadFolder], object]) -> list[str]:
    """Clients whose uploads make `fuse` fail: all that fail alone, else the first whose removal makes the rest succeed.

    Calls `fuse` at most 2·len(uploads) times. Empty if no single upload is to blame.
    """

    def fails(paths: list[Path]) -> bool:
        try:
            fuse(UploadFolder(paths, uploads.broadcast, uploads.statistics))
        except SERVER_ERRORS:
            raise
        except Exception as error:
            log.info("%s cannot be fused (%s)", ", ".join(path.stem for path in paths), in_one_line(error))
            return True
        return False

    if len(uploads) < 2:
        return []
    failing = [path for path in uploads.paths if fails([path])]
    if not failing or len(failing) == len(uploads):
        rests = ([each for each in uploads.paths if each != path] for path in uploads.paths)
        failing = next(([path] for path, rest in zip(uploads.paths, rests, strict=True) if not fails(rest)), [])
    return [path.stem for path in failing]


def check_federation(plan: Plan) -> None:
    """Refuse, before anything is sent, a recipe that only a simulation can run and a quorum of more than all sites."""
    recipe = plan.recipe
    if recipe.alignment and plan.needs_other_clients:
        raise RecipeError(
            f"alignment.schedule = {recipe.alignment.schedule.kind}: needs the other clients every epoch, which only a "
            "simulation can offer; choose another"
        )
    if recipe.quorum and recipe.quorum > plan.num_sites:
        raise RecipeError(f"quorum = {recipe.quorum}: must be ≤ {plan.num_sites}, the number of sites")
