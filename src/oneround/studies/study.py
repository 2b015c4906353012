"""One recipe on several partitions: which rule is better, and is the difference significant?

Rules are compared on the same uploads, partition by partition, so that differences between partitions (±10 points at α = 0.05) cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from oneround import acts
from oneround.config.load import change
from oneround.config.recipe import Recipe
from oneround.data import load_dataset
from oneround.errors import Interrupted, RecipeError
from oneround.evaluate import score_uploads
from oneround.protocol import Broadcast, UploadFolder
from oneround.runs import pictures
from oneround.runs.folder import RunFolder
from oneround.runs.record import local_accuracy_summary
from oneround.runs.result import Result
from oneround.server.plan import DealtPlan
from oneround.simulate import run
from oneround.simulate.workers import TrainJob, WorkerPool
from oneround.site import Site, num_workers
from oneround.training import Emit, silent

CENTRAL = "centralised"


@dataclass(frozen=True)
class Study:
    """Results of one recipe on several partitions."""

    recipe: Recipe
    folder: Path
    partitions: tuple[int, ...]
    results: tuple[Result, ...]
    centralised: float
    """Accuracy of the same network trained as long on all data in one place: what no federation can expect to beat."""

    def record(self) -> dict[str, Any]:
        """Everything measured, as plain data."""
        return {
            "recipe": self.recipe.plain(),
            "partitions": list(self.partitions),
            "partition_digests": [result.partition for result in self.results],
            "rules": {name: [result.rules[name] for result in self.results] for name in self.results[0].rules},
            "clients": [dict(result.clients) for result in self.results],
            CENTRAL: self.centralised,
            "remarks": [list(result.remarks) for result in self.results],
        }

    @property
    def accuracies(self) -> dict[str, list[float]]:
        """Accuracies in percent, by partition: of every rule, the local models, and the centralised bound."""
        shares = [
            {**result.rules, **local_accuracy_summary(result.clients), CENTRAL: self.centralised}
            for result in self.results
        ]
        return {name: [100 * each[name] for each in shares] for name in shares[0]}


def study(
    recipe: Recipe, folder: str | PathLike[str], partitions: Sequence[int], *, resume: bool = False, emit: Emit = silent
) -> Study:
    """Run the recipe on each partition seed, and once on all data together."""
    if recipe.label_noise is not None:
        raise RecipeError("label_noise: a study has one set of labels for all its partitions; use oneround sweep")
    folder = Path(folder)
    runs = [(RunFolder(folder / f"partition_{seed}"), change(recipe, {"seeds.partition": seed})) for seed in partitions]
    if not resume and any(run_folder.recipe.exists() for run_folder, _ in runs):
        raise RecipeError(f"{folder}: there is a run here already; continue with --resume, or choose another --out")
    data = load_dataset(recipe.data, recipe.local.data_path)
    plan = DealtPlan.of(_unmasked(runs[0][1]), data)
    try:
        results, bound = _run_all(runs, RunFolder(folder / CENTRAL), plan, resume, emit)
    except Interrupted:
        raise Interrupted(f"interrupted; continue with --resume and the same --out {folder}") from None
    finished = Study(recipe, folder, tuple(partitions), tuple(results), bound)
    curves = {name: [result.curves[name] for result in results] for name in results[0].rules}
    title = f"{recipe.method} on {data.name}, partitions {', '.join(map(str, partitions))}"
    pictures.draw_accuracy(curves, folder / "accuracy.png", title, {CENTRAL: bound})
    RunFolder(folder).write_json("study.json", finished.record())
    return finished


def _unmasked(recipe: Recipe) -> Recipe:
    """The recipe for all data in one place, without masks: these need at least two clients."""
    return change(recipe, {"sums.secure": False, "reveal.class_counts": True}) if recipe.secure else recipe


def _run_all(
    runs: Sequence[tuple[RunFolder, Recipe]], central: RunFolder, plan: DealtPlan, resume: bool, emit: Emit
) -> tuple[list[Result], float]:
    """The result of every run, and the accuracy of the centralised training."""
    data = plan.data
    # One more job than clients: the same pool trains on all data, which keeps a second core busy even when one client has most samples.
    workers = num_workers(plan.recipe.local, plan.traffic.parameters, len(plan.split.clients) + 1)
    with WorkerPool(data.train, workers, emit) as pool:
        if not central.broadcast.exists():
            plan.prepare().write(central.broadcast)
        emit({"event": CENTRAL, "steps": plan.steps_of(len(data.train))})
        job = TrainJob(CENTRAL, np.arange(len(data.train)), central, plan.recipe.round_epochs, plan.recipe.local)
        training = None if central.upload(CENTRAL).exists() else pool.submit(job)
        results = []
        for run_folder, recipe in runs:
            tagged = partial(_tag, emit, recipe.seeds.partition)
            results.append(run(recipe, run_folder.path, data=data, resume=resume, emit=tagged, workers=pool))
        if training is not None:
            training.result()
        return results, _central_accuracy(central, plan)


def _tag(emit: Emit, partition: int, event: dict[str, Any]) -> None:
    emit({**event, "partition": partition})


def _central_accuracy(run_folder: RunFolder, plan: DealtPlan) -> float:
    broadcast = Broadcast.read(run_folder.broadcast)
    uploads = UploadFolder([run_folder.upload(CENTRAL)], broadcast, acts.statistics_of(broadcast))
    site = Site("server", local=plan.recipe.local)
    # Without a network there is no local model to score, so the first rule is.
    rules = {} if plan.recipe.trains else {CENTRAL: acts.rules_of(plan.recipe)[0]}
    with site.arithmetic(plan.traffic.parameters):
        scores, clients, *_ = score_uploads(rules, uploads, broadcast, plan.data.test, site)
    return {**clients, **scores}[CENTRAL].accuracy
