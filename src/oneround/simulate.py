"""The in-process transport: all clients on this machine.

Epoch-major: all clients train to the next snapshot, the uploads-so-far are fused and scored, then on. Idle clients live on
disk, scoring holds one network at a time, so memory does not grow with the number of clients. A run can be killed at any
moment and resumed: uploads and states are replaced whole, the log says which snapshots are done, everything else follows
from seeds.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from oneround import acts
from oneround.crew import Crew, crew_size
from oneround.data import Dataset, load_dataset
from oneround.errors import Interrupted, RecipeError, RunError
from oneround.evaluate import Score, score_uploads
from oneround.learning import Emit, silent
from oneround.learning.schedules import consensus, spread
from oneround.observe import pictures
from oneround.observe.environment import environment
from oneround.protocol import Broadcast, Upload, UploadFolder, blob
from oneround.recipe import Recipe
from oneround.runs import Plan, Result, RunFolder
from oneround.site import Site, choose_device

log = logging.getLogger("oneround")


def run(
    recipe: Recipe,
    folder: Path,
    *,
    data: Dataset | None = None,
    resume: bool = False,
    emit: Emit = silent,
    crew: Crew | None = None,
) -> Result:
    """Run a recipe; everything it finds is in `folder`. With `resume` go on where an earlier run was stopped."""
    place = RunFolder(folder)
    if place.recipe.exists() and not resume:
        raise RecipeError(f"{folder}: there is a run here already; go on with --resume, or choose another --out")
    data = data or load_dataset(recipe.data, recipe.local.data_path)
    plan = Plan.of(recipe, data)
    announcement = {"event": "plan", "lines": plan.lines(), "steps": plan.steps, "epochs": plan.recipe.training.epochs}
    with place.locked(), _logging(folder):
        begun = _begun(place, plan)
        emit(announcement)
        if not begun:
            _begin(place, plan, emit)
        if not place.result.exists():
            size = crew_size(plan.recipe.local, plan.traffic.parameters, len(plan.clients))
            try:
                with nullcontext(crew) if crew else Crew(data.train, size, emit) as workers:
                    _train_and_score(place, plan, workers, emit)
            except KeyboardInterrupt:
                raise Interrupted(f"interrupted; go on with oneround run {folder} --resume") from None
            except BrokenProcessPool:
                raise RunError(
                    f"{folder}: a training process died (out of memory?); go on with oneround run {folder} --resume, perhaps with --set local.workers=1"
                ) from None
        return Result.read(folder)


def _begun(place: RunFolder, plan: Plan) -> bool:
    """Whether a run was begun here already; if so it must be this one."""
    if place.recipe.exists():
        begun = place.read_recipe()
        if begun.digest != plan.recipe.digest:
            raise RecipeError(
                f"{place.path}: was begun with another recipe ({place.recipe}); use that one, or choose another --out"
            )
        if place.broadcast.exists() and (place.path / "partition.json").exists():
            told = json.loads((place.path / "partition.json").read_text(encoding="utf-8"))
            if told["digest"] != plan.split.digest:
                raise RecipeError(f"{place.path}: was begun on other data or another partition; choose another --out")
            return True
    return False


def _begin(place: RunFolder, plan: Plan, emit: Emit) -> None:
    """Write down what this run is, and what every client starts from."""
    rule, seed = plan.recipe.partition, plan.recipe.seeds.partition
    place.write_json("environment.json", environment(choose_device(plan.recipe.local.device)))
    place.write_json(
        "partition.json", {"data": plan.data.name, "rule": rule.dump(), "seed": seed, **plan.split.plain()}
    )
    title = f"{plan.data.name}, {rule.label}, seed {seed}"
    pictures.draw_partition(plan.split, plan.data.class_names, place.path / "partition.png", title)
    plan.prepare(emit).write(place.broadcast)
    blob.write_durably(place.recipe, plan.recipe.to_yaml().encode())
    for remark in plan.remarks():
        log.warning(remark)


def _train_and_score(place: RunFolder, plan: Plan, crew: Crew, emit: Emit) -> None:
    recipe, clients = plan.recipe, plan.clients
    site = Site("server", folder=place.path, local=recipe.local)
    broadcast = Broadcast.read(place.broadcast)
    uploads = UploadFolder([place.upload(name) for name in clients], broadcast, acts.statistics_of(broadcast))
    rules = {rule.label: rule for rule in acts.rules_of(recipe)}
    scored = _scored(place, set(rules))
    scores: dict[str, Score] = {}
    alone: dict[str, Score] = {}
    spreads = place.read_spreads()
    for stop in plan.meetings:
        if stop != plan.stops[-1] and (stop in scored or (stop not in plan.stops and stop in spreads)):
            continue
        told = {"consensus": consensus(spreads, stop - 1)}
        waiting = [
            crew.submit(place.job(name, plan.split.clients[number], stop, recipe.local, told))
            for name, number in sorted(clients.items(), key=lambda item: -plan.split.sizes[item[1]])
            if Upload.epoch_of(place.upload(name)) != stop
        ]
        for done in as_completed(waiting):
            log.info("%s is at epoch %d", done.result(), stop)
        _check_all_arrived(place, uploads, stop)
        if plan.meets_every_epoch and stop not in spreads:
            spreads[stop] = spread(upload.weights["prototypes"] for upload in uploads)
            place.write_spreads(spreads)
        if stop not in plan.stops:
            continue
        started = time.monotonic()
        with site.arithmetic(plan.traffic.parameters):
            scores, alone = score_uploads(rules, uploads, broadcast, plan.data.test, site.device)
        seconds = time.monotonic() - started
        if stop not in scored:
            _record(place, plan, uploads, stop, scores, alone, seconds)
        emit({"event": "snapshot", "epoch": stop, "accuracy": {name: score.accuracy for name, score in scores.items()}})
        log.info("epoch %d: %s", stop, ", ".join(f"{name} {score.accuracy:.2%}" for name, score in scores.items()))
    _finish(place, plan, site, scores, alone)


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


def _record(
    place: RunFolder,
    plan: Plan,
    uploads: UploadFolder,
    stop: int,
    scores: Mapping[str, Score],
    alone: Mapping[str, Score],
    seconds: float,
) -> None:
    """Log what the clients measured since the last snapshot, then the snapshot."""
    before = max((epoch for epoch in plan.stops if epoch < stop), default=0)
    events: list[dict[str, Any]] = []
    for path in uploads.paths:
        manifest = blob.peek(path, "upload")
        events += [
            {"event": "epoch", "client": manifest["client"], **entry}
            for entry in manifest["history"]
            if before < entry["epoch"] <= stop
        ]
    events += [
        {"event": "client", "epoch": stop, "client": name, "accuracy": score.accuracy} for name, score in alone.items()
    ]
    events += [
        {"event": "snapshot", "epoch": stop, "rule": name, "accuracy": score.accuracy, "seconds": seconds}
        for name, score in scores.items()
    ]
    place.metrics.append(events)


def _finish(place: RunFolder, plan: Plan, site: Site, scores: Mapping[str, Score], alone: Mapping[str, Score]) -> None:
    uploads = place.uploads()
    acts.fuse(uploads, uploads.broadcast, site).save(place.model)
    place.write_json(
        "result.json",
        {
            "recipe_digest": plan.recipe.digest,
            "partition": plan.split.digest,
            "uploads": {upload.client: upload.content for upload in uploads},
            "bytes_down": plan.traffic.down * len(uploads),
            "bytes_up": plan.traffic.up * len(uploads),
            "remarks": plan.remarks(),
            "rules": {name: score.plain() for name, score in scores.items()},
            "clients": {name: score.plain() for name, score in alone.items()},
        },
    )
    curves = Result.read(place.path).curves
    pictures.draw_accuracy(
        {name: [curve] for name, curve in curves.items()},
        place.path / "accuracy.png",
        f"{plan.recipe.method} on {plan.data.name}",
    )
    shutil.rmtree(place.path / "clients", ignore_errors=True)


@contextmanager
def _logging(folder: Path) -> Iterator[None]:
    """`run.log`: what happened when, in words."""
    handler = logging.FileHandler(folder / "run.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
