"""The in-process transport: all clients on this machine.

Epoch-major: all clients train to the next snapshot, the uploads-so-far are fused and scored, then on. With several rounds, the
end of each is a snapshot, and what was fused there is broadcast again. Idle clients live on disk, scoring holds one network at
a time, so memory does not grow with the number of clients. A run can be killed at any moment and resumed: uploads and states
are replaced whole, the log says which snapshots are done, everything else follows from seeds.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from oneround import acts
from oneround.closing import Facts, finish, logging_to, record
from oneround.crew import Crew, crew_size, load_workers
from oneround.data import Dataset, load_dataset
from oneround.errors import Interrupted, OutOfTime, ProtocolError, RecipeError, RunError
from oneround.evaluate import Score, score_uploads
from oneround.folder import RunFolder
from oneround.learning import Emit, silent
from oneround.learning.schedules import consensus, spread
from oneround.observe import pictures
from oneround.observe.environment import environment
from oneround.observe.sinks import Sink, opened, pour
from oneround.protocol import Broadcast, GlobalModel, Upload, UploadFolder, blob
from oneround.recipe import Recipe
from oneround.runs import Plan, Result
from oneround.site import choose_device

log = logging.getLogger("oneround")


def run(
    recipe: Recipe,
    folder: Path,
    *,
    data: Dataset | None = None,
    resume: bool = False,
    emit: Emit = silent,
    crew: Crew | None = None,
    deadline: float | None = None,
) -> Result:
    """Run a recipe; everything it finds is in `folder`. With `resume` go on where an earlier run was stopped.

    At `deadline` (`time.time()`) every client ends its epoch and saves it, and `OutOfTime` is raised.
    """
    place = RunFolder(folder)
    if place.recipe.exists() and not resume:
        raise RecipeError(f"{folder}: there is a run here already; go on with --resume, or choose another --out")
    emit = partial(_log_trouble, emit)
    data = data or load_dataset(recipe.data, recipe.local.data_path)
    plan = Plan.of(recipe, data)
    announcement = {"event": "plan", "lines": plan.lines(), "steps": plan.steps, "epochs": plan.recipe.epochs}
    with place.locked(), logging_to(folder):
        begun = _begun(place, plan)
        if begun:
            _check_finished(place)
        size = crew_size(plan.recipe.local, plan.traffic.parameters, len(plan.clients))
        try:
            if crew is None and size > 1 and not place.result.exists():
                load_workers()
            emit(announcement)
            if not begun:
                _begin(place, plan, emit)
            if not place.result.exists():
                if begun:
                    _mend_broadcast(place, plan, emit)
                with (
                    opened(recipe, folder) as sinks,
                    nullcontext(crew) if crew else Crew(plan.data.train, size, emit, deadline) as workers,
                ):
                    _train_and_score(place, plan, workers, emit, sinks)
        except KeyboardInterrupt:
            go_on = f"go on with oneround run {folder} --resume" if place.recipe.exists() else "nothing was trained yet"
            raise Interrupted(f"interrupted; {go_on}") from None
        except BrokenProcessPool:
            raise RunError(
                f"{folder}: a training process died (out of memory?); go on with oneround run {folder} --resume, perhaps with --set local.workers=1"
            ) from None
        return Result.read(folder)


def _check_finished(place: RunFolder) -> None:
    """A finished run whose model or uploads are gone is not finished: what is missing is made again."""
    if not place.result.exists():
        return
    lost = [name for name in place.read_result()["uploads"] if not place.upload(name).is_file()]
    if lost or not (place.model / "manifest.json").is_file():
        what = f"uploads of {', '.join(lost)}" if lost else "the model"
        log.warning("%s: finished, but %s went missing; made again", place.path, what)
        place.result.unlink()


def _begun(place: RunFolder, plan: Plan) -> bool:
    """Whether a run was begun here already; if so it must be this one."""
    if place.recipe.exists():
        begun = place.read_recipe()
        if begun.digest != plan.recipe.digest:
            raise RecipeError(
                f"{place.path}: was begun with another recipe ({place.recipe}); use that one, or choose another --out"
            )
        if place.broadcast.exists() and (place.path / "partition.json").exists():
            told = place.read_json("partition.json", ["digest"], f"remove it and go on with {place.resumption}")
            if told["digest"] != plan.split.digest:
                raise RecipeError(f"{place.path}: was begun on other data or another partition; choose another --out")
            return True
    return False


def _begin(place: RunFolder, plan: Plan, emit: Emit) -> None:
    """Write down what this run is, and what every client starts from."""
    rule, seed = plan.recipe.partition, plan.recipe.seeds.partition
    place.write_json("environment.json", environment(choose_device(plan.recipe.local.device)))
    place.write_json("partition.json", plan.partition())
    title = f"{plan.data.name}, {rule.label}, seed {seed}"
    pictures.draw_partition(plan.split, plan.data.class_names, place.path / "partition.png", title)
    plan.simulated(emit).write(place.broadcast)
    blob.write_durably(place.recipe, plan.recipe.to_yaml().encode())
    for remark in plan.remarks():
        log.warning(remark)


def _mend_broadcast(place: RunFolder, plan: Plan, emit: Emit) -> None:
    """Prepare a damaged broadcast again; it must come out as it was, or what clients trained so far would not fit it."""
    try:
        if Broadcast.read(place.broadcast).digest == plan.recipe.digest:
            return
        log.warning("%s: of another recipe; prepared again", place.broadcast)
    except (ProtocolError, RecipeError) as error:
        log.warning("%s; prepared again", error)
    if plan.recipe.rounds > 1 and list(place.metrics):
        raise RunError(
            f"{place.broadcast}: damaged, and what rounds before had learned is in it; begin anew with another --out"
        )
    raw = plan.simulated(emit).pack()
    manifest, _ = blob.unpack(raw, "broadcast", "broadcast")
    try:
        promised = blob.peek(place.broadcast, "broadcast").get("sha256")
    except ProtocolError:
        promised = None  # the damage is in the manifest itself
    if promised not in (None, manifest["sha256"]):
        raise RunError(
            f"{place.broadcast}: damaged, and prepared again it differs (another device, or other initial weights); "
            "begin anew with another --out"
        )
    blob.write_durably(place.broadcast, raw)


def _train_and_score(place: RunFolder, plan: Plan, crew: Crew, emit: Emit, sinks: Sequence[Sink]) -> None:
    site, clock = plan.server(place.path), Clock(place)
    broadcast, uploads = _round(place, plan)
    rules = {rule.label: rule for rule in acts.rules_of(plan.recipe)}
    scored = _scored(place, set(rules))
    scores: dict[str, Score] = {}
    alone: dict[str, Score] = {}
    made: dict[str, GlobalModel] = {}
    spreads = place.read_spreads()
    standing = _standing(place, plan)
    behind = [name for name in plan.clients if spreads and standing[name] != plan.stops[-1] and not place.states(name)]
    for stop in sorted(spreads) if behind else ():  # with what the others' spread was then
        standing |= _train(place, plan, crew, behind, stop, spreads)
    for stop in plan.meetings:
        ends = stop == broadcast.last_epoch
        over = stop in scored or (stop not in plan.stops and stop in spreads)
        if stop <= broadcast.first_epoch or (over and not ends):
            continue
        waiting = [name for name in plan.participants(broadcast.round) if standing[name] != stop]
        standing |= _train(place, plan, crew, waiting, stop, spreads)
        _check_all_arrived(place, uploads, stop)
        if plan.meets_every_epoch and stop not in spreads:
            spreads[stop] = spread(upload.weights["prototypes"] for upload in uploads)
            place.write_spreads(spreads)
        if stop not in plan.stops:
            continue
        started = time.monotonic()
        emit({"event": "scoring", "epoch": stop})
        with site.arithmetic(plan.traffic.parameters):
            made = {}
            scores, alone, held = score_uploads(rules, uploads, broadcast, plan.data.test, site, made, site.validation)
        seconds = time.monotonic() - started
        if stop not in scored:
            before = max((epoch for epoch in plan.stops if epoch < stop), default=0)
            epochs = range(before + 1, stop + 1)
            pour(record(place, uploads, epochs, scores, alone, held, made, seconds, clock.elapsed), sinks)
        found = {name: score.accuracy for name, score in scores.items()}
        when = f"round {broadcast.round} of {plan.recipe.rounds}" if plan.recipe.rounds > 1 else f"epoch {stop}"
        left = sum(epoch > stop for epoch in plan.stops)
        emit({"event": "snapshot", "epoch": stop, "when": when, "accuracy": found, "seconds": seconds, "left": left})
        log.info("%s: %s", when, ", ".join(f"{name} {accuracy:.2%}" for name, accuracy in found.items()))
        if ends and stop != plan.stops[-1]:
            with site.arithmetic(plan.traffic.parameters):
                acts.advance(made[next(iter(rules))], broadcast).write(place.broadcast)
            broadcast, uploads = _round(place, plan)
    traffic = {name: (turns * plan.traffic.down, turns * plan.traffic.up) for name, turns in plan.turns.items()}
    finish(
        place,
        uploads,
        site,
        Facts(plan.data.name, plan.split.digest, traffic, plan.remarks()),
        scores,
        alone,
        made,
        plan.data.test,
    )
    shutil.rmtree(place.path / "clients", ignore_errors=True)


class Clock:
    """How long the run has been at work, the time it was stopped left out."""

    def __init__(self, place: RunFolder) -> None:
        self.before = max((event.get("elapsed", 0.0) for event in place.metrics), default=0.0)
        self.started = time.monotonic()

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.started


def _round(place: RunFolder, plan: Plan) -> tuple[Broadcast, UploadFolder]:
    """What the round that is due begins with, and where its uploads come to lie; those of the round before are removed."""
    broadcast = Broadcast.read(place.broadcast)
    names = plan.participants(broadcast.round)
    for name in plan.clients if broadcast.round > 1 else ():
        epoch = Upload.epoch_of(place.upload(name))
        if epoch is not None and epoch <= broadcast.first_epoch:
            place.upload(name).unlink()
    paths = [place.upload(name) for name in names]
    return broadcast, UploadFolder(paths, broadcast, acts.statistics_of(broadcast))


def _standing(place: RunFolder, plan: Plan) -> dict[str, int | None]:
    """The epoch of every client's upload. What is damaged, uploads or states, is discarded, to be trained again."""
    standing: dict[str, int | None] = {}
    for name in plan.clients:
        upload = place.upload(name)
        standing[name] = Upload.epoch_of(upload)
        damaged = [path for path in place.states(name) if not blob.is_whole(path, "state")]
        if standing[name] is None and upload.exists():
            damaged.append(upload)
        for path in damaged:
            log.warning("%s: damaged; discarded, %s trains again", path, name)
            path.unlink()
    return standing


def _train(
    place: RunFolder, plan: Plan, crew: Crew, names: Sequence[str], stop: int, spreads: Mapping[int, float]
) -> dict[str, int | None]:
    """Let these clients train to the end of an epoch, the largest first; where they stand then. One trains even when time is over."""
    told = {"consensus": consensus(spreads, stop - 1)}
    clients, sizes = plan.clients, plan.split.sizes
    waiting: list[Future[str]] = []
    for name in sorted(names, key=lambda name: -sizes[clients[name]]):
        if not (waiting and crew.out_of_time):  # a crew of one has trained it when `submit` comes back
            waiting.append(crew.submit(plan.job(place, name, stop, told)))
    arrived = 0
    late: OutOfTime | None = None
    for done in as_completed(waiting):
        try:
            log.info("%s is at epoch %d", done.result(), stop)
            arrived += 1
        except OutOfTime as error:
            late = error  # the others end their epoch too and save it
        except CancelledError:
            continue
        for each in waiting if crew.out_of_time else ():
            each.cancel()
    if late is not None:
        raise late
    if arrived < len(names) or (names and stop < plan.stops[-1] and crew.out_of_time):
        raise OutOfTime(f"{place.path}: stopped before epoch {stop} was scored, the time is over; resume to go on")
    return dict.fromkeys(names, stop)


def _check_all_arrived(place: RunFolder, uploads: UploadFolder, stop: int) -> None:
    """A client that its rails stopped has uploaded less than asked; that is the end of the run, and all is kept."""
    told = [blob.peek(path, "upload") for path in uploads.paths]
    stopped = [manifest["stopped"] for manifest in told if manifest["epoch"] != stop]
    if stopped:
        raise RunError(
            "\n".join(stopped)
            + f"\nevery client's upload so far is in {place.path}/uploads; score them with oneround fuse {place.path}"
        )


def _scored(place: RunFolder, rules: set[str]) -> set[int]:
    """Epochs whose snapshot is in the log complete; what is there of others is dropped, it will be measured again."""
    events = list(place.metrics)
    seen: dict[int, set[str]] = {}
    for event in events:
        if event["event"] == "snapshot":
            seen.setdefault(event["epoch"], set()).add(event["rule"])
    done = {epoch for epoch, names in seen.items() if names >= rules}
    last = max(done, default=0)
    if events:
        place.metrics.keep(event for event in events if event["epoch"] <= last)
    return done


def _log_trouble(emit: Emit, event: dict[str, Any]) -> None:
    """Pass an event on; what went wrong also goes into the log."""
    if event["event"] == "trouble" and emit is not silent:  # which logs it itself
        log.warning(event["text"])
    emit(event)
