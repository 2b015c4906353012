"""The same recipe over several partitions: which rule is better, and is the difference real?

Rules are compared on the same uploads, partition by partition, so partition luck (±10 points at α = 0.05) cancels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oneround import acts
from oneround.crew import Crew, crew_size
from oneround.data import load_dataset
from oneround.errors import Interrupted, RecipeError
from oneround.evaluate import score_uploads
from oneround.folder import RunFolder
from oneround.learning import Emit, silent
from oneround.observe import pictures
from oneround.observe.statistics import Summary, paired
from oneround.observe.tables import Row
from oneround.protocol import Broadcast, UploadFolder, blob
from oneround.reading import change
from oneround.recipe import Recipe
from oneround.runs import Plan, Result
from oneround.simulate import run
from oneround.site import Site

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


def accuracies(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Percent over partitions: every rule, the clients alone, and the centralised bound."""
    values = {name: [100 * value for value in found] for name, found in record["rules"].items()}
    if all(record["clients"]):  # under masks no client is scored alone
        values["best client alone"] = [100 * max(clients.values()) for clients in record["clients"]]
        values["mean client alone"] = [100 * float(np.mean(list(clients.values()))) for clients in record["clients"]]
    values[CENTRAL] = [100 * record[CENTRAL]] * len(record["partitions"])
    return values


def table_rows(values: Mapping[str, Sequence[float]], baseline: str) -> list[Row]:
    """With the paired difference to the baseline, where it is among the values."""
    base = values.get(baseline)
    return [
        Row(name, Summary(tuple(found)), paired(found, base) if base is not None and name != baseline else None)
        for name, found in values.items()
    ]


def study(
    recipe: Recipe, folder: Path, partitions: Sequence[int], *, resume: bool = False, emit: Emit = silent
) -> Study:
    """Run the recipe on each partition seed, and once on all data together."""
    if recipe.label_noise is not None:
        raise RecipeError("label_noise: a study has one set of labels for all its partitions; use oneround sweep")
    begun = [folder / f"partition_{seed}" for seed in partitions if (folder / f"partition_{seed}/recipe.yaml").exists()]
    if begun and not resume:
        raise RecipeError(f"{folder}: there is a run here already; go on with --resume, or choose another --out")
    data = load_dataset(recipe.data, recipe.local.data_path)
    recipes = [change(recipe, {"seeds.partition": seed}) for seed in partitions]
    plan = Plan.of(_open(recipes[0]), data)
    try:
        results, bound = _run_all(recipes, plan, folder, partitions, resume, emit)
    except Interrupted:
        raise Interrupted(f"interrupted; go on with --resume and the same --out {folder}") from None
    finished = Study(recipe, folder, tuple(partitions), tuple(results), bound)
    curves = {name: [result.curves[name] for result in results] for name in results[0].rules}
    title = f"{recipe.method} on {data.name}, partitions {', '.join(map(str, partitions))}"
    pictures.draw_accuracy(curves, folder / "accuracy.png", title, {CENTRAL: bound})
    blob.write_durably(folder / "study.json", json.dumps(finished.record(), indent=1, ensure_ascii=False).encode())
    return finished


def _open(recipe: Recipe) -> Recipe:
    """The recipe for all data in one place, where there is nobody to mask with."""
    return change(recipe, {"sums.secure": False, "reveal.class_counts": True}) if recipe.secure else recipe


def _run_all(
    recipes: Sequence[Recipe], plan: Plan, folder: Path, partitions: Sequence[int], resume: bool, emit: Emit
) -> tuple[list[Result], float]:
    data = plan.data
    # Workers also take the centralised training, so there is work for a second core even when one client has most samples.
    with Crew(
        data.train, crew_size(plan.recipe.local, plan.traffic.parameters, len(plan.split.clients) + 1), emit
    ) as crew:
        central = RunFolder(folder / CENTRAL)
        if not central.broadcast.exists():
            plan.prepare().write(central.broadcast)
        emit({"event": CENTRAL, "steps": plan.steps_of(len(data.train))})
        job = central.job(CENTRAL, np.arange(len(data.train)), plan.recipe.training.epochs, plan.recipe.local, {})
        waiting = None if central.upload(CENTRAL).exists() else crew.submit(job)
        results = [
            run(each, folder / f"partition_{seed}", data=data, resume=resume, emit=partial(_tag, emit, seed), crew=crew)
            for each, seed in zip(recipes, partitions, strict=True)
        ]
        if waiting is not None:
            waiting.result()
        return results, _central_score(central, plan)


def _tag(emit: Emit, seed: int, event: dict[str, Any]) -> None:
    emit({**event, "partition": seed})


def _central_score(place: RunFolder, plan: Plan) -> float:
    broadcast = Broadcast.read(place.broadcast)
    uploads = UploadFolder([place.upload(CENTRAL)], broadcast, acts.statistics_of(broadcast))
    site = Site("server", local=plan.recipe.local)
    with site.arithmetic(plan.traffic.parameters):
        summed = (
            {} if plan.recipe.trains else {CENTRAL: acts.rules_of(plan.recipe)[0]}
        )  # its own rule is the bound itself
        scores, alone, _ = score_uploads(summed, uploads, broadcast, plan.data.test, site)
    return {**alone, **scores}[CENTRAL].accuracy
