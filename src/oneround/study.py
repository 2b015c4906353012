"""The same recipe over several partitions: which rule is better, and is the difference real?

Rules are compared on the same uploads, partition by partition, so partition luck (±10 points at α = 0.05) cancels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oneround import acts
from oneround.crew import Crew, Job, crew_size
from oneround.data import load_dataset
from oneround.evaluate import score_uploads
from oneround.learning import Emit, silent
from oneround.learning.batches import steps_per_epoch
from oneround.observe import pictures
from oneround.observe.statistics import Summary, paired
from oneround.protocol import Broadcast, UploadFolder, blob
from oneround.reading import change
from oneround.recipe import Recipe
from oneround.runs import Plan, Result, RunFolder
from oneround.simulate import run
from oneround.site import Site

CENTRAL = "centralised"


@dataclass(frozen=True)
class Row:
    """One line of the table: accuracies over partitions, and their paired difference to the baseline."""

    name: str
    accuracy: Summary
    difference: Summary | None


@dataclass(frozen=True)
class Study:
    """Results of one recipe on several partitions."""

    recipe: Recipe
    folder: Path
    partitions: tuple[int, ...]
    results: tuple[Result, ...]
    centralised: float
    """Accuracy of the same network trained as long on all data in one place: what no federation can expect to beat."""

    def rows(self, baseline: str = "average") -> list[Row]:
        """Every rule, the clients alone, and the centralised bound, in percent."""
        rules = {name: [100 * result.rules[name] for result in self.results] for name in self.results[0].rules}
        rules["best client alone"] = [100 * max(result.clients.values()) for result in self.results]
        rules["mean client alone"] = [100 * float(np.mean(list(result.clients.values()))) for result in self.results]
        rules[CENTRAL] = [100 * self.centralised] * len(self.results)
        base = rules.get(baseline)
        return [
            Row(name, Summary(tuple(values)), paired(values, base) if base and name != baseline else None)
            for name, values in rules.items()
        ]


def study(
    recipe: Recipe, folder: Path, partitions: Sequence[int], *, resume: bool = False, emit: Emit = silent
) -> Study:
    """Run the recipe on each partition seed, and once on all data together."""
    data = load_dataset(recipe.data, recipe.local.data_path)
    recipes = [change(recipe, {"seeds.partition": seed}) for seed in partitions]
    plan = Plan.of(recipes[0], data)
    # Workers also take the centralised training, so there is work for a second core even when one client has most samples.
    with Crew(data.train, crew_size(plan.recipe.local, plan.parameters, len(plan.split.clients) + 1), emit) as crew:
        central = RunFolder(folder / CENTRAL)
        everything = np.arange(len(data.train))
        plan.broadcast.write(central.broadcast)
        emit({"event": CENTRAL, "steps": recipe.training.epochs * steps_per_epoch(len(data.train), recipe.training)})
        job = Job(
            CENTRAL,
            everything,
            central.broadcast,
            central.upload(CENTRAL),
            central.state(CENTRAL),
            recipe.training.epochs,
            plan.recipe.local,
        )
        waiting = None if central.upload(CENTRAL).exists() else crew.submit(job)
        results = [
            run(each, folder / f"partition_{seed}", data=data, resume=resume, emit=partial(_tag, emit, seed), crew=crew)
            for each, seed in zip(recipes, partitions, strict=True)
        ]
        if waiting is not None:
            waiting.result()
        bound = _central_score(central, plan)
    finished = Study(recipe, folder, tuple(partitions), tuple(results), bound)
    curves = {name: [result.curves[name] for result in results] for name in results[0].rules}
    title = f"{recipe.method} on {data.name}, partitions {', '.join(map(str, partitions))}"
    pictures.draw_accuracy(curves, folder / "accuracy.png", title, {CENTRAL: bound})
    blob.write_durably(folder / "study.json", json.dumps(_plain(finished), indent=1, ensure_ascii=False).encode())
    return finished


def _tag(emit: Emit, seed: int, event: dict[str, Any]) -> None:
    emit({**event, "partition": seed})


def _central_score(place: RunFolder, plan: Plan) -> float:
    broadcast = Broadcast.read(place.broadcast)
    uploads = UploadFolder([place.upload(CENTRAL)], broadcast, acts.statistics_of(broadcast))
    site = Site("server", local=plan.recipe.local)
    with site.arithmetic(plan.parameters):
        _, alone = score_uploads({}, uploads, broadcast, plan.data.test, site.device)
    return alone[CENTRAL].accuracy


def _plain(finished: Study) -> dict[str, Any]:
    return {
        "recipe": finished.recipe.plain(),
        "partitions": list(finished.partitions),
        "partition_digests": [result.partition for result in finished.results],
        "rules": {name: [result.rules[name] for result in finished.results] for name in finished.results[0].rules},
        "clients": [dict(result.clients) for result in finished.results],
        CENTRAL: finished.centralised,
        "remarks": [list(result.remarks) for result in finished.results],
    }
